"""A model of the time to distribute the lookup's tiles to a GPU's blocks; no GPU is used.

    python -m tools.cuda_model [--json FILE]

For batches of even and of ragged rows it lays the blocks of three designs on an H200's
multiprocessors and adds up time: ``pieces``, as many blocks a row as its capacity is worth, begun
as others end; ``one wave``, equal shares of the list of all tiles (csrc/cuda/lookup.cuh); and
``clusters``, eight blocks per row, which join by shared memory. All read the same tokens.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench import environment
from tools.cuda_sass import RECORD as SASS

RESULT = Path(__file__).resolve().parent / "bench" / "results" / "cuda-model.json"
TILE = 4096
WARPS = 8
CLUSTER = 8
"""Blocks, at most, without asking the driver for more."""


@dataclass(frozen=True)
class Figures:
    """All times in us; from data sheets where a source is known, else assumed."""

    multiprocessors: int = 132
    tokens_per_us: float = 4.8e12 / 4 / 1e6
    """Of memory: 4.8 TB/s by the data sheet."""
    clock_mhz: float = 1755.0
    issued_per_cycle: int = 4
    """Instructions of a multiprocessor."""
    memory: float = 0.6
    """A dependent access that no cache has; assumed, as are those below."""
    cache: float = 0.25
    """One that the L2 has."""
    atomic: float = 0.35
    fence: float = 0.5
    verify: float = 0.5
    """What a candidate holds its warp up for."""
    cluster: float = 0.5
    """A cluster's barrier, and a read of another block's shared memory behind it."""


FIGURES = Figures()


@dataclass(frozen=True)
class Design:
    """A design of the kernel: a block's waits and its speed."""

    name: str
    blocks_each: int
    """Blocks per multiprocessor."""
    instructions: int
    """Of a warp for a tile."""
    tiles_under_way: int
    begin: float
    """Time until a block knows its tiles."""
    request: float
    """Time until the first loads of a request start."""
    finish: float
    """From a request's last token to its draft."""
    join: float
    """Before that, where blocks share the request."""
    end: float
    """Once for the grid, after all blocks are done."""


def designs(instructions: int, f: Figures = FIGURES) -> tuple[Design, Design, Design]:
    draft = 2 * f.cache
    pieces = Design("pieces", 5, 223, 1, 0.0, 2 * f.memory, draft, 2 * f.fence + 3 * f.atomic, 0.0)
    wave = Design(
        "one wave", 4, instructions, 2, 2 * f.memory, 2 * f.cache, draft, 2 * f.atomic,
        f.atomic + 3 * f.cache,
    )  # fmt: skip
    clusters = Design("clusters", 4, instructions, 2, 0.0, 2 * f.memory, draft, f.cluster, 0.0)
    return pieces, wave, clusters


Block = list[tuple[int, int, bool]]
"""Of each request that it reads of: tiles, tokens, and whether other blocks read of it too."""


def tiles_of(length: int) -> int:
    return max(1, -(-length // TILE))


def pieces(lengths: Sequence[int], capacity: int, f: Figures = FIGURES) -> list[Block]:
    """Block (i, g) takes the tiles g, g + groups, ... of request i; blocks begin request first."""
    return _by_row(lengths, max(1, min(8 * f.multiprocessors // len(lengths), tiles_of(capacity))))


def clusters(lengths: Sequence[int], capacity: int) -> list[Block]:
    """The same with the blocks of one cluster for each request."""
    return _by_row(lengths, min(CLUSTER, tiles_of(capacity)))


def _by_row(lengths: Sequence[int], groups: int) -> list[Block]:
    blocks: list[Block] = []
    for group in range(groups):
        for length in lengths:
            tiles = range(group, tiles_of(length), groups)
            tokens = sum(min(TILE, length - t * TILE) for t in tiles)
            blocks.append([(len(tiles), max(0, tokens), groups > 1)])
    return blocks


def one_wave(lengths: Sequence[int], capacity: int, each: int, f: Figures = FIGURES) -> list[Block]:
    """Share g of the list: each request's tiles, and before them one place that is none."""
    most = tiles_of(capacity)
    count = min(each * f.multiprocessors, len(lengths) * (most + 1 if most > 1 else 1))
    owner = np.repeat(np.arange(len(lengths)), [1 + tiles_of(n) for n in lengths])
    tile = np.concatenate([np.arange(-1, tiles_of(n)) for n in lengths])
    held = np.where(tile < 0, 0, np.clip(np.asarray(lengths)[owner] - tile * TILE, 0, TILE))
    share = -(-len(owner) // count)
    blocks: list[Block] = []
    for begin in range(0, len(owner), share):
        found: Block = []
        mine = slice(begin, begin + share)
        for request in np.unique(owner[mine]):
            of_request = owner[mine] == request
            tiles = int((tile[mine][of_request] >= 0).sum())
            shared = tiles < tiles_of(lengths[request])
            if tiles:
                found.append((tiles, int(held[mine][of_request].sum()), shared))
        blocks.append(found)
    return blocks + [[]] * (count - len(blocks))


def simulate(
    blocks: list[Block], design: Design, text_like: float = 0.0, f: Figures = FIGURES
) -> tuple[float, float]:
    """
    Args:
        text_like: how many of a warp's tiles have a candidate.

    Returns:
        Time in us, and waves. Each multiprocessor takes the next block when one ends, and a block's
        tiles take what it waits for memory; all of them together, no less than memory takes for
        the tokens, or the multiprocessors for the instructions.
    """
    slots = f.multiprocessors * design.blocks_each
    per_tile = f.memory / design.tiles_under_way + text_like * f.verify
    ends = [0.0] * min(slots, len(blocks))
    for block in blocks:
        time = design.begin
        for _, tokens, shared in block:
            time += design.request + design.finish + shared * design.join
            if tokens > 0:
                time += f.memory + max(0.0, tokens / TILE - 1) * per_tile
        heapq.heappush(ends, heapq.heappop(ends) + time)
    total = sum(tokens for block in blocks for _, tokens, _ in block)
    issued = total / TILE * WARPS * design.instructions
    issue = issued / f.issued_per_cycle / f.clock_mhz / f.multiprocessors
    latency = design.begin + design.request + f.memory + design.finish
    latency += design.join * any(shared for block in blocks for _, _, shared in block)
    return max(*ends, latency + max(issue, total / f.tokens_per_us)) + design.end, len(
        blocks
    ) / slots


def batches() -> dict[str, tuple[list[int], int, float]]:
    """By name: lengths, capacity, and how many of a warp's tiles have a candidate."""
    rng = np.random.default_rng(2026)
    k, m = 1024, 1024 * 1024
    short = rng.integers(200, 400, 1023).tolist()
    ragged = np.minimum(128 * k, 2000 + (rng.pareto(1.2, 256) * 4000)).astype(int).tolist()
    return {
        "1x128k": ([128 * k], 128 * k, 0.0),
        "128x4k": ([4 * k] * 128, 4 * k, 0.0),
        "1024x4k": ([4 * k] * 1024, 4 * k, 0.0),
        "128x32k": ([32 * k] * 128, 32 * k, 0.0),
        "128x32k text-like": ([32 * k] * 128, 32 * k, 0.2),
        "256x128k": ([128 * k] * 256, 128 * k, 0.0),
        "256 ragged up to 128k": (ragged, 128 * k, 0.0),
        "256 ragged up to 128k, text-like": (ragged, 128 * k, 0.2),
        "one of 1M among 1023 short": ([m, *short], m, 0.0),
    }


def result(
    lengths: list[int], capacity: int, text_like: float, instructions: int
) -> dict[str, Any]:
    """``bound_us``: the second design's with its tiles dealt out as evenly as can be, in parts of
    a token."""
    old, new, by_cluster = designs(instructions)
    made = {
        old.name: (pieces(lengths, capacity), old),
        new.name: (one_wave(lengths, capacity, new.blocks_each), new),
        by_cluster.name: (clusters(lengths, capacity), by_cluster),
    }
    found: dict[str, Any] = {"requests": len(lengths), "tokens": sum(lengths)}
    for name, (blocks, design) in made.items():
        time, waves = simulate(blocks, design, text_like)
        found[name] = {"us": round(time, 2), "blocks": len(blocks), "waves": round(waves, 2)}
    count = len(made[new.name][0])
    even = sum(lengths) / count
    requests = max(1.0, len(lengths) / count)
    shared = len(lengths) < count
    each = [(int(np.ceil(even / TILE / requests)), int(even / requests), shared)]
    each *= int(np.ceil(requests))
    bound, _ = simulate([list(each)] * count, new, text_like)
    found["bound_us"] = round(bound, 2)
    found["one wave over bound"] = round(found[new.name]["us"] / found["bound_us"], 3)
    return found


def model() -> dict[str, Any]:
    kernels = json.loads(SASS.read_text())["kernels"]
    instructions = kernels["ngram_step"]["instructions_per_tile"]
    return {
        "what": "a model of an H200; nothing was measured",
        "figures": asdict(FIGURES),
        "designs": [asdict(design) for design in designs(instructions)],
        "results": {
            name: result(*batch, instructions=instructions) for name, batch in batches().items()
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the results")
    given = parser.parse_args(argv)
    found = model()
    for name, one in found["results"].items():
        sys.stdout.write(
            f"{name}: pieces {one['pieces']['us']} us in {one['pieces']['waves']} waves, "
            f"one wave {one['one wave']['us']} us, {one['one wave over bound']} of the bound, "
            f"clusters {one['clusters']['us']} us\n"
        )
    if given.json:
        record = {
            "command": "python -m tools.cuda_model --json tools/bench/results/cuda-model.json",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": environment.machine(),
            **found,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
