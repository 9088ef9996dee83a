"""Damaged files of stores: each is refused with a reason, or gives a store that works. A correct
checksum lets the code behind it read damaged data too."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backends import FRONT_ENDS
from core.store.requests import COSTS, Request
from ngram_npu import NgramStore, StoreFileError, store_file
from ngram_npu.memory import Int32Array
from ngram_npu.store import VISIBILITIES
from ops.parity import check_parity
from ops.specs import OPSPECS, Sample
from ops.specs.store import NAMES, UNLIMITED, no_drafts

SECONDS = float(os.environ.get("NGRAM_NPU_STORE_FILE_SECONDS", "2"))
"""Of new seeds; `make prove` gives it an hour. A failure names the seed."""
CHECKSUM = slice(64, 64 + 32)
BLOCK = 256
SCOPES = (0, 3, 1 << 62)
REFUSALS = (
    "not a file of a store", "its checksum does not match", "release: expected format",
    "truncated", "too long", "cannot have the sizes it names", "has more pieces",
    "corrupt: NgramStore: ",
)  # fmt: skip


def blocks_of(store: NgramStore) -> Iterator[tuple[int, Int32Array, int]]:
    """Scope and text of each block that is in use, and how much of it the block repeats."""
    heads, tokens = (store._words[store._parts()[part]] for part in ("heads", "tokens"))
    for head, text in zip(heads.reshape(-1, 8), tokens.reshape(-1, BLOCK), strict=True):
        if head[0]:
            yield int(head[5:7].copy().view(np.int64)[0]), text[: int(head[1])], int(head[2])


def held(store: NgramStore) -> dict[int, set[int]]:
    """The tokens of each scope."""
    found: dict[int, set[int]] = defaultdict(set)
    for scope, text, _ in blocks_of(store):
        found[scope].update(text.tolist())
    return found


def step(rng: random.Random, store: NgramStore) -> int:
    """Requests that mostly say something held: drafts are the reference's and of what their scope
    holds. Returns their number of tokens."""
    rows, scopes = [], []
    for _ in range(store.num_slots):
        scope = rng.choice(SCOPES)
        row = [rng.randrange(30) for _ in range(rng.randint(1, 300))]
        blocks = [block for block in blocks_of(store) if len(block[1])]
        if blocks and rng.random() < 0.8:
            scope, text, _ = rng.choice(blocks)
            start = rng.randrange(len(text))
            row = text[start : start + rng.randint(1, 40)].tolist()
        rows.append(row)
        scopes.append(scope)
    lengths = np.array([len(row) for row in rows], np.int32)
    given = {
        "token_ids": np.array([row + [0] * (max(lengths) - len(row)) for row in rows], np.int32),
        "num_tokens": lengths,
        "num_sampled": np.array([rng.randint(1, n) for n in lengths], np.int32),
        "store": store.tensor,
        "slot_indices": np.arange(len(rows), dtype=np.int32),
        "scopes": np.array(scopes, np.int64),
        **no_drafts(len(rows), 6),
        "max_len": UNLIMITED,
        "costs": COSTS,
        "cost_limit": 40,
        "fill": False,
    }
    args, before = tuple(given.get(name) for name in NAMES), held(store)
    spec = OPSPECS["ngram_store_step_"]
    check_parity(spec, FRONT_ENDS[1], Sample("damaged", args))
    FRONT_ENDS[1].call(spec.name, args)
    counts = spec.get(args, "num_draft_tokens")
    for scope, draft, count in zip(scopes, spec.get(args, "draft_token_ids"), counts, strict=True):
        assert set(draft[:count].tolist()) <= before[scope], "drafted what its scope does not hold"
    return int(counts.sum())


def use(rng: random.Random, store: NgramStore) -> Counter[str]:
    """What a store may meet."""
    copy, other = NgramStore(2, 4096), NgramStore(1, 1024)
    copy.merge(store)
    copy.check_integrity()
    left: Counter[int] = Counter()
    for of, sign in ((store, 1), (copy, -1)):
        for scope, text, repeated in blocks_of(of):
            left[scope] += sign * (len(text) - (repeated if of is copy else 0))
    assert min(left.values(), default=0) >= 0, "merge: a scope was told what it does not hold"
    drafts = sum(step(rng, store) for _ in range(rng.randint(1, 3)))
    store.finish(np.array([0, rng.randrange(-1, 9)], np.int32))
    other.warm([range(40), range(10, 30)], scope=SCOPES[1])
    store.merge(other)
    cleared = rng.choice(SCOPES[:2])
    store.clear(cleared)
    assert cleared not in held(store)
    return Counter(accepted=1, drafts=drafts, renumbered=bool(store.statistics.renumberings))


def with_its_checksum(data: bytes) -> bytes:
    if len(data) < CHECKSUM.stop:
        return data
    digest = hashlib.blake2b(data[CHECKSUM.stop :], digest_size=32)
    digest.update(data[: CHECKSUM.start])
    return data[: CHECKSUM.start] + digest.digest() + data[CHECKSUM.stop :]


def damaged(rng: random.Random, saved: bytes) -> bytes:
    """Up to three bits, words or stretches are others."""
    data = bytearray(saved)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, other = (4 * rng.randrange(max(1, len(data) // 4)) for _ in range(2))
        size = rng.choice((1, 4, 4, 32, 1024, len(data)))
        old, word = (int.from_bytes(saved[i : i + 4], "little") for i in (at, other))
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind <= 3 and at + 4 <= len(data):
            serial = word + rng.randint(-12, 3)
            value = rng.choice(
                (0, -1, 1, 2**31 - 1, -(2**31), old + 1, old - 1, old ^ 1 << rng.randrange(32),
                 serial, serial << 8 | rng.randrange(BLOCK), BLOCK, rng.randrange(17))
            )  # fmt: skip
            struct.pack_into("<I", data, at, value % 2**32)
        elif kind == 4:
            data[at : at + size] = data[other : other + len(data[at : at + size])]
        elif kind == 5:
            del data[at : at + size]
        else:
            data[at:at] = data[other : other + min(size, 1024)]
    if rng.random() < 0.7 and len(data) >= CHECKSUM.stop:
        struct.pack_into("<Q", data, 24, len(data) - CHECKSUM.stop)
    return bytes(data)


def examine(rng: random.Random, data: bytes, path: Path, *, whole: bool) -> Counter[str]:
    """``whole``: the checksum is right, so that the file may be accepted."""
    path.write_bytes(data)
    try:
        store = NgramStore.load(path, num_slots=rng.choice((None, 1)))
    except StoreFileError as error:
        return Counter({next(reason for reason in REFUSALS if reason in str(error)): 1})
    assert whole, "a file that is not as it was written was accepted"
    return use(rng, store)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Empty, with a little, full, with a cleared scope, and before the serial numbers' end."""
    made, path = [], tmp_path_factory.mktemp("saved") / "store"
    for visibility in VISIBILITIES:
        for kind, turns in (("empty", 0), ("some", 4), ("full", 38), ("cleared", 38), ("end", 9)):
            rng, store = random.Random(kind), NgramStore(2, 2048 + 256, visibility=visibility)
            if kind == "end":
                store._words[5] = (1 << 24) - 3  # the next serial number
            for turn in range(turns):
                own = turn // 13 % len(SCOPES)
                if turn % 13 == 0:
                    requests = [Request(store, slot, SCOPES[own], [1000 * own]) for slot in (0, 1)]
                for request in requests:
                    size = rng.randint(1, 90)
                    request.say([1000 * own + rng.randrange(30) for _ in range(size)])
            if kind == "cleared":
                store.clear(SCOPES[1])
            store.save(path)
            made.append(path.read_bytes())
    return made


def run(saved: list[bytes], path: Path, seconds: float) -> Counter[str]:
    """What was reached."""
    reached, seed, until = Counter[str](), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        seed += 1
        rng = random.Random(seed)
        original = rng.choice(saved)
        data = damaged(rng, original)
        try:
            if data != original:
                reached += examine(rng, data, path, whole=False)
            reached += examine(rng, with_its_checksum(data), path, whole=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return reached


def test_each_is_refused_or_works(saved: list[bytes], tmp_path: Path) -> None:
    reached = run(saved, tmp_path / "store", SECONDS)
    for what in ("accepted", "drafts", "renumbered", REFUSALS[1], REFUSALS[-1]):
        assert reached[what] > 0, what


def test_text_that_gets_another_scope_is_found(
    saved: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = NgramStore.merge

    def mixed(self: NgramStore, other: NgramStore) -> None:
        merge(self, other)
        for scope in list(other.scopes)[:1]:
            self.warm([range(900)], scope=scope)

    monkeypatch.setattr(NgramStore, "merge", mixed)
    with pytest.raises(AssertionError, match="merge: a scope was told what it does not hold"):
        run(saved, tmp_path / "store", 20)


def test_a_checksum_that_is_not_compared_is_found(
    saved: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Same(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    class Unread:
        def __init__(self, *_: object, **__: object) -> None: ...
        def update(self, _: object) -> None: ...
        def digest(self) -> bytes:
            return Same(32)

    monkeypatch.setattr(store_file.hashlib, "blake2b", Unread)
    with pytest.raises(AssertionError, match="a file that is not as it was written was accepted"):
        run(saved, tmp_path / "store", 20)
