"""Whatever happens to rows and slots, drafts are those of a rescan."""

from __future__ import annotations

import os
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from index_machine import IndexMachine
from index_world import Int32Array, Lookup, World

LADDER = 2
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    settings.default, max_examples=120, stateful_step_count=40, deadline=None
)


def _text(count: int) -> Int32Array:
    """Bytes of the standard library's sources: recorded text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    raw = b"".join((folder / f).read_bytes() for f in ("argparse.py", "typing.py", "ast.py"))
    return np.frombuffer(raw, np.uint8).astype(np.int32)[:count]


@pytest.mark.parametrize("pages", [4000, 18], ids=["room", "too-few-pages"])
@pytest.mark.parametrize("match_policy", [0, 1, LADDER], ids=["earliest", "latest", "ladder"])
@pytest.mark.parametrize("source", ["random", "text"])
def test_long_run(source: str, match_policy: int, pages: int) -> None:
    """Requests come, grow, are preempted, and go, for some thousands of compared steps; more with
    NGRAM_NPU_INDEX_STEPS, all twelve runs together."""
    wanted = int(os.environ.get("NGRAM_NPU_INDEX_STEPS", "64000")) // 12
    seed = int(os.environ.get("NGRAM_NPU_INDEX_SEED", "1"))
    rng = np.random.default_rng([seed, source == "text", match_policy, pages])
    text = _text(200_000)
    rows, capacity = 16, 1500
    started = time.perf_counter()
    steps = drafts = scanned = blind = 0
    while steps < wanted:
        low, span = int(rng.integers(1, 4)), int(rng.choice([0, 2, 3, 7]))
        lookup = Lookup(low, low + span, 4, match_policy, bool(rng.integers(2)), 1480)
        if match_policy == LADDER:
            limit = int(rng.integers(0, 150)) if rng.random() < 0.8 else None
            ladder = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
            lookup = replace(lookup, **ladder, cost_limit=limit)
        world = World(rows, capacity, lookup, rows, pages)
        streams = np.empty((rows, capacity), np.int32)

        def admit(row: int, world: World = world, streams: Int32Array = streams) -> None:
            if source == "text":
                start = rng.integers(len(text) - capacity)
                streams[row] = text[start : start + capacity]
            else:
                streams[row] = rng.integers(0, rng.integers(2, 40), capacity)
            world.write(row, streams[row, : rng.integers(0, 1200)].tolist(), at=0)
            if rng.random() < 0.5:
                world.append([row])

        for row in range(rows):
            admit(row)
        for turn in range(60):
            chosen = rng.permutation(rows)[: rng.integers(1, rows + 1)]
            sampled = np.full((len(chosen), 4), -1, np.int32)
            for i, row in enumerate(chosen):
                at, new = int(world.lengths[row]), int(rng.integers(0, 5))
                new = min(new, capacity - at)
                sampled[i, :new] = streams[row, at : at + new]
            discard = rng.random(len(chosen)) < 0.1
            world.step(chosen.tolist(), sampled, discard, advance=bool(rng.integers(2)))
            for row in np.flatnonzero(rng.random(rows) < 0.02).tolist():
                if rng.random() < 0.5:
                    world.reset([row])
                admit(row)
            if rng.random() < 0.1:
                order = rng.permutation(rows)
                for array in (world.rows, world.lengths, world.slots, streams):
                    array[:] = array[order]
            if rng.random() < 0.05:
                world.lengths[rng.integers(rows)] //= 2
            if turn == 30:
                world.index.check_integrity()
        steps += world.steps
        drafts += world.drafts
        blind += world.blind
        scanned += world.index.statistics.rows_scanned_full
    assert (scanned > 0) == (pages == 18)
    assert drafts > steps // 4
    # A slot reused without a reset, where both texts have the same eight bytes (eight spaces, in
    # Python) at the one place compared: that cannot be noticed, and lasts until the slot is built
    # anew. Seen on bytes: 0.01 to 0.11 % of the steps, none on random tokens.
    assert blind <= steps // 100
    print(f"{steps} steps, {blind} more not comparable, in {time.perf_counter() - started:.1f} s")


@pytest.mark.parametrize("match_policy", [0, 1], ids=["earliest", "latest"])
def test_what_goes_unnoticed_stays_within_the_row(match_policy: int) -> None:
    """Tokens are rewritten, but not the last eight: the index cannot notice. Drafts still follow an
    occurrence of the row's own end, in the row as it is now, and nothing else is touched."""
    rng = np.random.default_rng(match_policy)
    blind = 0
    for turn in range(60):
        lookup = Lookup(1 + turn % 3, 4 + turn % 3, 4, match_policy, bool(turn % 2))
        world = World(4, 200, lookup, 4, 40)
        for row in range(4):
            world.write(row, rng.integers(0, 3, 150).tolist())
        world.append(range(4))
        for _ in range(12):
            places = rng.integers(0, 140, 30)
            world.rows[rng.integers(0, 4, 30), places] = rng.integers(0, 4, 30)
            world.step(range(4), rng.integers(0, 3, (4, 2), dtype=np.int32))
        world.index.check_integrity()
        blind += world.blind
    assert blind > 2000
