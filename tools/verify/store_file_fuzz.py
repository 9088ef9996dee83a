"""Loads damaged store files: each must be rejected or give a store that works.

    python -m tools.verify.store_file_fuzz --seconds 3600 --seed 1 --json FILE

A file is changed at random, then read as it is and with a corrected checksum, so that the code
after the checksum reads damaged data too. It must be rejected with StoreFileError; or, if its
checksum is correct, the store must give the same results as the reference, not show a scope another
one's text, and be merged to a consistent one. Anything else is a finding, with a seed for
which this file is the first one. A file on which the process ended is left in the temporary folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import reference
from ngram_npu import _C, NgramStore, StoreFileError
from ngram_npu.memory import Int32Array
from ngram_npu.store import VISIBILITIES

CHECKSUM = slice(64, 64 + 32)
BLOCK = 256
SCOPES = (0, 3, 1 << 62)
MEMORY = 5 << 30
"""Bytes that a file may make the process reserve: two of the largest stores. It commits only what
has contents."""
REFUSALS = {
    "foreign": ("not a file of a store",),
    "checksum": ("its checksum does not match",),
    "version": ("release: expected format",),
    "size": ("truncated", "too long", "cannot have the sizes it names", "has more pieces"),
    "integrity": ("corrupt: NgramStore: ",),
}
EXPECTED = (*(f"refused by {kind}" for kind in REFUSALS), "accepted", "drafts", "renumbered")

Held = dict[int, set[int]]


class FindingError(Exception):
    """What must not happen."""


@dataclass(frozen=True)
class Saved:
    """A file of a store, and its parts: first byte and end."""

    data: bytes
    parts: tuple[tuple[int, int], ...]


def blocks_of(store: NgramStore) -> Iterator[tuple[int, Int32Array, int]]:
    """Scope and text of each block that is in use, and how much of it the block repeats."""
    heads, tokens = _parts(store)
    for head, text in zip(heads, tokens, strict=True):
        if head[0]:
            yield int(head[5:7].copy().view(np.int64)[0]), text[: int(head[1])], int(head[2])


def held(store: NgramStore) -> Held:
    """The tokens of each scope."""
    found: Held = defaultdict(set)
    for scope, text, _ in blocks_of(store):
        found[scope].update(text.tolist())
    return found


def more_than(copy: NgramStore, store: NgramStore) -> bool:
    """Whether some scope has more text in ``copy``, without what blocks repeat, than it had."""
    left: Counter[int] = Counter()
    for scope, text, _ in blocks_of(store):
        left[scope] += len(text)
    for scope, text, repeated in blocks_of(copy):
        left[scope] -= len(text) - repeated
    return min(left.values(), default=0) < 0


def step(
    store: NgramStore, rows: Sequence[list[int]], sampled: list[int], scopes: list[int]
) -> int:
    """The kernel's and the reference's; the number of tokens drafted."""
    before, batch, k = held(store), len(rows), 6
    token_ids = np.zeros((batch, max(map(len, rows))), np.int32)
    for row, tokens in zip(token_ids, rows, strict=True):
        row[: len(tokens)] = tokens
    inputs = (
        token_ids,
        np.array([len(row) for row in rows], np.int32),
        np.array(sampled, np.int32),
    )
    slots, whose = np.arange(batch, dtype=np.int32), np.array(scopes, np.int64)
    costs = np.full((16, _C.STORE_COST_COLUMNS), 8, np.uint8)
    outcomes = []
    for words, kernel in ((store.tensor.copy(), False), (store.tensor, True)):
        drafts, paid = np.full((batch, k), -1, np.int32), np.full((batch, k), 255, np.uint8)
        counts, match_len = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        outs = (drafts, counts, match_len, paid)
        if kernel:
            names = ("draft_token_ids", "num_draft_tokens", "match_len", "draft_costs")
            _C.ngram_store_step_(
                *inputs, words, slot_indices=slots, scopes=whose, costs=costs,
                **dict(zip(names, outs, strict=True)),
            )  # fmt: skip
        else:
            reference.ngram_store_step_(
                *inputs, words, None, slots, whose, *outs, 2**63 - 1, costs, 40
            )
        outcomes.append((words, *outs))
    names = ("store", "drafts", "counts", "match_len", "costs")
    for name, expected, got in zip(names, *outcomes, strict=True):
        if not np.array_equal(expected, got):
            raise FindingError(f"step: {name}: kernel and reference differ")
    for scope, draft, count in zip(scopes, drafts, counts.tolist(), strict=True):
        if not set(draft[:count].tolist()) <= before[scope]:
            raise FindingError("step: a scope was drafted what it does not hold")
    return int(counts.sum())


def request(rng: random.Random, store: NgramStore) -> tuple[list[int], int, int]:
    """Row, number sampled, scope: something held, which goes on as the scope does elsewhere."""
    own = rng.randrange(len(SCOPES))
    scope, row = SCOPES[own], [1000 * own]
    held_blocks = [block for block in blocks_of(store) if len(block[1])]
    if held_blocks and rng.random() < 0.8:
        scope, text, _ = rng.choice(held_blocks)
        start = rng.randrange(len(text))
        row = text[start : start + rng.randint(1, 40)].tolist()
    else:
        row += [1000 * own + rng.randrange(30) for _ in range(rng.randint(0, 300))]
    return row, rng.randint(1, len(row)), scope


def use(rng: random.Random, store: NgramStore, other: NgramStore) -> Counter[str]:
    """What a store may meet; ``other`` is merged into it."""
    reached: Counter[str] = Counter()
    copy = NgramStore(2, 4096)
    copy.merge(store)
    copy.check_integrity()
    if more_than(copy, store):
        raise FindingError("merge: a scope was told what it does not hold")
    for _ in range(rng.randint(1, 3)):
        requests = [request(rng, store) for _ in range(store.num_slots)]
        rows, sampled, scopes = map(list, zip(*requests, strict=True))
        reached["drafts"] += step(store, rows, sampled, scopes)
    store.finish(np.array([0, rng.randrange(-1, 9)], np.int32))
    store.merge(other)
    cleared = rng.choice(SCOPES[:2])
    store.clear(cleared)
    if cleared in held(store):
        raise FindingError("clear: text of the scope is left")
    reached["renumbered"] += bool(store.statistics.renumberings)
    return reached


def checksum_made_right(data: bytearray) -> bytes:
    mended = bytearray(data)
    if len(data) >= CHECKSUM.stop:
        digest = hashlib.blake2b(data[CHECKSUM.stop :], digest_size=32)
        digest.update(data[: CHECKSUM.start])
        mended[CHECKSUM] = digest.digest()
    return bytes(mended)


def damaged(rng: random.Random, saved: Saved) -> bytearray:
    """A file with one to three changes."""
    data = bytearray(saved.data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, saved, data)
    if rng.random() < 0.7 and len(data) >= CHECKSUM.stop:
        struct.pack_into("<Q", data, 24, len(data) - CHECKSUM.stop)
    return data


def examine(
    rng: random.Random, data: bytes, path: Path, others: Callable[[], NgramStore], *, whole: bool
) -> Counter[str]:
    """One file. ``whole``: its checksum is right, so that it may be accepted."""
    path.write_bytes(data)
    try:
        store = NgramStore.load(path, num_slots=rng.choice((None, 1)))
    except StoreFileError as error:
        message = str(error).removeprefix(f"{path}: ")
        for kind, texts in REFUSALS.items():
            if any(text in message for text in texts):
                return Counter({f"refused by {kind}": 1})
        raise FindingError(f"refused, but not said why: {message}") from None
    if not whole:
        raise FindingError("a file that is not as it was written was accepted")
    return Counter(accepted=1) + use(rng, store, others())


def run(seconds: float, seed: int) -> tuple[Counter[str], str | None]:
    """What was reached, and the first finding."""
    saved, reached = list(saved_stores()), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="store-file-fuzz-") as folder:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            rng = random.Random(seed)
            path = Path(folder) / f"seed-{seed}"
            original = rng.choice(saved)
            data = damaged(rng, original)
            try:
                raw = bytes(data)
                if raw != original.data:
                    reached += examine(rng, raw, path, _a_store, whole=False)
                reached += examine(rng, checksum_made_right(data), path, _a_store, whole=True)
            except Exception as error:
                if not isinstance(error, FindingError):
                    traceback.print_exc()
                return reached, f"--seed {seed}: {type(error).__name__}: {error}"
            path.unlink()
            reached["files"] += 1
            seed += 1
    return reached, None


def problems(reached: Counter[str], finding: str | None) -> list[str]:
    """Why a run is a failure; empty if it is not."""
    if finding is not None:
        return [finding]
    return [f"{name}: never reached" for name in EXPECTED if not reached[name]]


def saved_stores() -> Iterator[Saved]:
    """Empty, with a little, full, with a cleared scope, and before the serial numbers' end."""
    for visibility in VISIBILITIES:
        for kind, turns in (("empty", 0), ("some", 4), ("full", 38), ("cleared", 38), ("end", 9)):
            rng, store = random.Random(kind), NgramStore(2, 2048 + 256, visibility=visibility)
            if kind == "end":
                store.tensor[5] = (1 << 24) - 3  # the next serial number
            rows: list[list[int]] = [[1], [1]]
            for turn in range(turns):
                own = turn // 13 % len(SCOPES)
                for row in rows:
                    if turn % 13 == 0:
                        row[:] = [1000 * own]
                    row += [1000 * own + rng.randrange(30) for _ in range(rng.randint(1, 90))]
                step(store, rows, [rng.randint(1, len(row)) for row in rows], [SCOPES[own]] * 2)
            if kind == "cleared":
                store.clear(SCOPES[1])
            yield _saved(rng, store)


def _saved(rng: random.Random, store: NgramStore) -> Saved:
    with tempfile.TemporaryDirectory() as folder:
        store.save(Path(folder) / "store")
        data = (Path(folder) / "store").read_bytes()
    parts, at = [(0, CHECKSUM.start)], CHECKSUM.stop
    while at < len(data):
        end = at + 4 + struct.unpack_from("<I", data, at)[0]
        parts.append((at + (0 if rng.random() < 0.1 else 4), end))
        at = end
    return Saved(data, tuple(part for part in parts if part[0] < part[1]))


def _a_store() -> NgramStore:
    store = NgramStore(1, 1024)
    store.warm([range(40), range(10, 30)], scope=SCOPES[1])
    return store


def _parts(store: NgramStore) -> tuple[Any, Any]:
    blocks = store.token_capacity // BLOCK
    spans = _C.store_parts(store.num_slots, blocks, store.statistics.line_bits)
    heads = store.tensor[spans["heads"][0] :][: blocks * 8].reshape(-1, 8)
    return heads, store.tensor[slice(*spans["tokens"])].reshape(-1, BLOCK)


def _piece(rng: random.Random, saved: Saved, data: bytearray) -> tuple[slice, slice]:
    """Two places of one part, of as many bytes."""
    first, end = rng.choice(saved.parts)
    size = 4 * rng.choice((1, 1, 2, 8))
    last = max(0, min(end, len(data)) - first - size) // 4
    one, two = (first + 4 * rng.randint(0, last) for _ in range(2))
    return slice(one, one + size), slice(two, two + size)


def _flip(rng: random.Random, saved: Saved, data: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _hostile_word(rng: random.Random, saved: Saved, data: bytearray) -> None:
    at = rng.randrange(*rng.choice(saved.parts), 4)
    if at + 4 > len(data):
        return
    (old,) = struct.unpack_from("<I", data, at)
    (other,) = struct.unpack_from(
        "<I", saved.data, rng.randrange(CHECKSUM.stop, len(saved.data), 4)
    )
    serial = other + rng.randint(-12, 3)
    value = rng.choice(
        (0, -1, 1, 2**31 - 1, -(2**31), old + 1, old - 1, old ^ 1 << rng.randrange(32), serial,
         serial << 8 | rng.randrange(BLOCK), BLOCK, rng.randrange(17), rng.getrandbits(32))
    )  # fmt: skip
    struct.pack_into("<I", data, at, value % 2**32)


def _swap(rng: random.Random, saved: Saved, data: bytearray) -> None:
    one, two = _piece(rng, saved, data)
    data[one], data[two] = data[two], data[one]


def _copy(rng: random.Random, saved: Saved, data: bytearray) -> None:
    one, two = _piece(rng, saved, data)
    data[one] = data[two]


def _zero(rng: random.Random, saved: Saved, data: bytearray) -> None:
    one, _ = _piece(rng, saved, data)
    data[one] = bytes(len(data[one]))


def _cut(rng: random.Random, saved: Saved, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 4, 32, 1024, len(data)))]


def _repeat(rng: random.Random, saved: Saved, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.choice((1, 4, 32, 1024))]


def _shift(rng: random.Random, saved: Saved, data: bytearray) -> None:
    """A part moves; the file's size stays."""
    first, end = rng.choice(saved.parts)
    size = rng.choice((4, 8, 32))
    piece = data[first : first + size]
    del data[first : first + size]
    data[end - size : end - size] = piece


CHANGES = (_flip, _hostile_word, _hostile_word, _swap, _copy, _zero, _cut, _repeat, _shift)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first file; the next has one more"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    from tools.bench import provenance, report  # now: not after an hour

    machine = provenance.machine()
    faulthandler.enable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    begun = time.perf_counter()
    reached, finding = run(given.seconds, given.seed)
    found = problems(reached, finding)
    result = {
        "command": "python -m tools.verify.store_file_fuzz"
        f" --seconds {given.seconds:g} --seed {given.seed}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "seconds": round(time.perf_counter() - begun, 1),
        "reached": dict(sorted(reached.items())),
        "findings": found,
    }
    if given.json is not None:
        report.write(given.json, result)
    print(report.laid_out(result["reached"]))
    for problem in found:
        print(f"store_file_fuzz: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
