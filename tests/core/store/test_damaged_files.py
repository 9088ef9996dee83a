"""Tests that a damaged store file is rejected with a reason, or loads as a valid store. Half of the
files have a correct checksum, so that damaged data also reaches the checks that follow."""

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
from core.store.requests import Request
from ngram_npu import NgramStore, StoreFileError
from ngram_npu.store import VISIBILITIES
from ngram_npu.tensors import Int32Array
from ops.parity import check_parity
from ops.specs import OPSPECS, Sample
from ops.specs.store import make_call, make_drafts

SECONDS = float(os.environ.get("NGRAM_NPU_STORE_FILE_SECONDS", "2"))
"""Duration of the test. `make prove` runs the test for an hour. A failure reports the seed."""
CHECKSUM = slice(64, 64 + 32)
BLOCK = 256
SCOPES = (0, 3, 1 << 62)
REASONS = (
    "not a store file", "its checksum does not match", "release: expected format",
    "truncated", "too long", "no store has the sizes in its header",
    "pieces for the sizes in its header",
    "corrupt: NgramStore: ",
)  # fmt: skip


def iterate_used_blocks(store: NgramStore) -> Iterator[tuple[int, Int32Array, int]]:
    """Yields for each used block: its scope, its text, and the number of tokens at its start that
    repeat the previous block's last tokens."""
    heads, tokens = (store._words[store._parts()[part]] for part in ("heads", "tokens"))
    for head, text in zip(heads.reshape(-1, 8), tokens.reshape(-1, BLOCK), strict=True):
        if head[0]:
            yield int(head[5:7].copy().view(np.int64)[0]), text[: int(head[1])], int(head[2])


def group_tokens_by_scope(store: NgramStore) -> dict[int, set[int]]:
    tokens: dict[int, set[int]] = defaultdict(set)
    for scope, text, _ in iterate_used_blocks(store):
        tokens[scope].update(text.tolist())
    return tokens


def check_step(rng: random.Random, store: NgramStore) -> int:
    """Runs a step with rows that are mostly text of the store, and returns the number of drafted
    tokens. Checks that the drafts equal those of the reference, with tokens of the scope only."""
    rows, scopes = [], []
    for _ in range(store.num_slots):
        scope = rng.choice(SCOPES)
        row = [rng.randrange(30) for _ in range(rng.randint(1, 300))]
        blocks = [block for block in iterate_used_blocks(store) if len(block[1])]
        if blocks and rng.random() < 0.8:
            scope, text, _ = rng.choice(blocks)
            start = rng.randrange(len(text))
            row = text[start : start + rng.randint(1, 40)].tolist()
        rows.append(row)
        scopes.append(scope)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([row + [0] * (max(lengths) - len(row)) for row in rows], np.int32)
    sampled = np.array([rng.randint(1, n) for n in lengths], np.int32)
    slots = np.arange(len(rows), dtype=np.int32)
    options = {"slot_indices": slots, "scopes": np.array(scopes, np.int64), "cost_limit": 40}
    args = make_call(tokens, lengths, sampled, store.tensor, make_drafts(len(rows), 6), **options)
    spec, tokens_before = OPSPECS["ngram_store_step_"], group_tokens_by_scope(store)
    check_parity(spec, FRONT_ENDS[1], Sample("damaged", args))
    args = spec.replace(args, store=store.tensor)
    FRONT_ENDS[1].call(spec.name, args)
    counts = spec.get(args, "num_draft_tokens")
    for scope, draft, count in zip(scopes, spec.get(args, "draft_token_ids"), counts, strict=True):
        assert set(draft[:count].tolist()) <= tokens_before[scope], "a token of another scope"
    return int(counts.sum())


def use_store(rng: random.Random, store: NgramStore) -> Counter[str]:
    """Merges, steps, finishes, warms and clears a store, and checks the results."""
    merged_store, warmed_store = NgramStore(2, 4096), NgramStore(1, 1024)
    merged_store.merge(store)
    merged_store.check_integrity()
    num_tokens: Counter[int] = Counter()
    for scope, text, _ in iterate_used_blocks(store):
        num_tokens[scope] += len(text)
    for scope, text, num_repeated in iterate_used_blocks(merged_store):
        num_tokens[scope] -= len(text) - num_repeated
    assert min(num_tokens.values(), default=0) >= 0, "merge: a scope received other text"
    num_drafted = sum(check_step(rng, store) for _ in range(rng.randint(1, 3)))
    store.finish(np.array([0, rng.randrange(-1, 9)], np.int32))
    warmed_store.warm([range(40), range(10, 30)], scope=SCOPES[1])
    store.merge(warmed_store)
    scope = rng.choice(SCOPES[:2])
    store.clear(scope)
    assert scope not in group_tokens_by_scope(store)
    num_renumbered = bool(store.statistics.renumberings)
    return Counter(accepted=1, drafts=num_drafted, renumbered=num_renumbered)


def add_checksum(data: bytes) -> bytes:
    if len(data) < CHECKSUM.stop:
        return data
    digest = hashlib.blake2b(data[CHECKSUM.stop :], digest_size=32)
    digest.update(data[: CHECKSUM.start])
    return data[: CHECKSUM.start] + digest.digest() + data[CHECKSUM.stop :]


def damage_file(rng: random.Random, saved: bytes) -> bytes:
    """Returns a file in which up to three bits, words or ranges have changed."""
    data = bytearray(saved)
    for _ in range(rng.choice((1, 1, 2, 3))):
        offset, source = (4 * rng.randrange(max(1, len(data) // 4)) for _ in range(2))
        size = rng.choice((1, 4, 4, 32, 1024, len(data)))
        word, source_word = (int.from_bytes(saved[i : i + 4], "little") for i in (offset, source))
        change = rng.randrange(7)
        if change == 0 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif change <= 3 and offset + 4 <= len(data):
            serial = source_word + rng.randint(-12, 3)
            value = rng.choice(
                (0, -1, 1, 2**31 - 1, -(2**31), word + 1, word - 1, word ^ 1 << rng.randrange(32),
                 serial, serial << 8 | rng.randrange(BLOCK), BLOCK, rng.randrange(17))
            )  # fmt: skip
            struct.pack_into("<I", data, offset, value % 2**32)
        elif change == 4:
            end = min(offset + size, len(data))
            data[offset:end] = data[source : source + end - offset]
        elif change == 5:
            del data[offset : offset + size]
        else:
            data[offset:offset] = data[source : source + min(size, 1024)]
    if rng.random() < 0.7 and len(data) >= CHECKSUM.stop:
        struct.pack_into("<Q", data, 24, len(data) - CHECKSUM.stop)
    return bytes(data)


def load_and_use_store(
    rng: random.Random, data: bytes, path: Path, *, has_valid_checksum: bool
) -> Counter[str]:
    path.write_bytes(data)
    try:
        store = NgramStore.load(path, num_slots=rng.choice((None, 1)))
    except StoreFileError as error:
        return Counter({next(reason for reason in REASONS if reason in str(error)): 1})
    assert has_valid_checksum, "a changed file was accepted"
    return use_store(rng, store)


@pytest.fixture(scope="module")
def saved_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Files of stores that are empty, partly full, full, have a cleared scope, or have used up
    nearly all serial numbers."""
    files, path = [], tmp_path_factory.mktemp("saved") / "store"
    for visibility in VISIBILITIES:
        for name, steps in (("empty", 0), ("some", 4), ("full", 38), ("cleared", 38), ("end", 9)):
            rng, store = random.Random(name), NgramStore(2, 2048 + 256, visibility=visibility)
            if name == "end":
                store._words[5] = (1 << 24) - 3  # the next serial number
            for step in range(steps):
                i = step // 13 % len(SCOPES)
                if step % 13 == 0:
                    requests = [Request(store, slot, SCOPES[i], [1000 * i]) for slot in (0, 1)]
                for request in requests:
                    size = rng.randint(1, 90)
                    request.append([1000 * i + rng.randrange(30) for _ in range(size)])
            if name == "cleared":
                store.clear(SCOPES[1])
            store.save(path)
            files.append(path.read_bytes())
    return files


def test_damaged_file_is_rejected_or_loads_as_a_valid_store(
    saved_files: list[bytes], tmp_path: Path
) -> None:
    path, seed, deadline = tmp_path / "store", 0, time.monotonic() + SECONDS
    counts = Counter[str]()
    while time.monotonic() < deadline:
        seed += 1
        rng = random.Random(seed)
        original = rng.choice(saved_files)
        data = damage_file(rng, original)
        try:
            if data != original:
                counts += load_and_use_store(rng, data, path, has_valid_checksum=False)
            counts += load_and_use_store(rng, add_checksum(data), path, has_valid_checksum=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    for event in ("accepted", "drafts", "renumbered", REASONS[1], REASONS[-1]):
        assert counts[event] > 0, event
