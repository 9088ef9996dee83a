"""DeviceNgramIndex.check_integrity() finds each kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device_world import (
    ENTRIES,
    FINGERPRINT,
    HEADER,
    HELD,
    INDEXED,
    LEVEL,
    OPTIONS,
    SLOTS,
    TENANT,
    Rows,
    entries_of,
    indexed,
    some_tokens,
)
from index_world import Int32Array
from ngram_npu import DeviceNgramIndex, IntegrityError

pytestmark = pytest.mark.usefixtures("on_the_cuda_twin")


def _of_slot(words: Int32Array, slot: int) -> Any:
    used, entries = entries_of(words)
    slot_bits = int(words[SLOTS] - 1).bit_length()
    tenants = entries[used] >> np.uint64(TENANT) & np.uint64((1 << slot_bits) - 1)
    return used[tenants == slot], entries


def _broken_header(words: Int32Array) -> None:
    words[0] = 0


def _more_buckets_than_fit(words: Int32Array) -> None:
    words[2] += 1


def _strange_options(words: Int32Array) -> None:
    words[HEADER + OPTIONS] = 1 << 24 | 9 << 8 | 1


def _empty_but_indexed(words: Int32Array) -> None:
    words[HEADER + OPTIONS] = 0


def _too_long(words: Int32Array) -> None:
    words[HEADER + INDEXED] = -1


def _one_held_too_many(words: Int32Array) -> None:
    words[HEADER + HELD] += 1


def _one_in_use_too_many(words: Int32Array) -> None:
    words[ENTRIES] += 1


def _one_in_use_too_few(words: Int32Array) -> None:
    words[ENTRIES] -= 1


def _elsewhere(words: Int32Array) -> None:
    """All entries go on by a bucket."""
    _, entries = entries_of(words)
    entries[:] = np.roll(entries, 16)


def _other_fingerprint(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] ^= np.uint64(1 << FINGERPRINT)


def _no_such_level(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] |= np.uint64(7 << LEVEL)


def _behind_the_row(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] |= np.uint64((1 << TENANT) - 1)


def _right_behind_the_row(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] &= ~np.uint64((1 << TENANT) - 1)
    entries[used[0]] |= np.uint64(words[HEADER + INDEXED] + 1)


def _before_the_row(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] &= ~np.uint64((1 << TENANT) - 1)
    entries[used[0]] |= np.uint64(1)


def _lost(words: Int32Array) -> None:
    used, entries = _of_slot(words, 0)
    entries[used[0]] = 0
    words[HEADER + HELD] -= 1
    words[ENTRIES] -= 1


def _longer_than_its_row(words: Int32Array) -> None:
    words[HEADER + INDEXED] += 2


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_broken_header, "header does not match the tensor's size"),
        (_more_buckets_than_fit, "header does not match the tensor's size"),
        (_strange_options, r"the slot's state .* \(slot or page 0\)"),
        (_empty_but_indexed, r"the slot's state .* \(slot or page 0\)"),
        (_too_long, r"the slot's state .* \(slot or page 0\)"),
        (_one_held_too_many, r"number of entries does not match its entries \(slot or page 0\)"),
        (_one_in_use_too_many, "header.s number of entries does not match"),
        (_one_in_use_too_few, "header.s number of entries does not match"),
        (_elsewhere, "slot 0: an entry is not where its key leads"),
        (_other_fingerprint, "slot 0: an entry is not where its key leads"),
        (_no_such_level, "slot 0: an entry is not where its key leads"),
        (_behind_the_row, "slot 0: an entry points outside the row"),
        (_right_behind_the_row, "slot 0: an entry points outside the row"),
        (_before_the_row, "slot 0: an entry points outside the row"),
        (_lost, "slot 0: an entry is missing"),
        (_longer_than_its_row, "slot 0: the slot has indexed more tokens than the row holds"),
    ],
)
def test_a_broken_index_is_told(harm: Callable[[Int32Array], None], message: str) -> None:
    tokens = some_tokens()
    index = indexed(tokens)
    index.check_integrity(dict(enumerate(tokens)))
    harm(index.tensor.numpy())
    with pytest.raises(IntegrityError, match="DeviceNgramIndex: .*" + message):
        index.check_integrity({0: tokens[0]})


@pytest.mark.parametrize("match_policy", [0, 1])
def test_an_entry_with_the_wrong_occurrence_is_told(match_policy: int) -> None:
    tokens = np.tile(np.array([1, 2, 3], np.int32), 20)[None]
    index = indexed(tokens, match_policy)
    index.check_integrity({0: tokens[0]})
    used, entries = entries_of(index.tensor.numpy())
    entries[used] = entries[used].astype(np.int64) + (3 if match_policy == 0 else -3)
    with pytest.raises(IntegrityError, match="does not record the earliest"):
        index.check_integrity({0: tokens[0]})


def test_a_slot_that_is_none() -> None:
    with pytest.raises(IntegrityError, match="slot 9: the index has no such slot"):
        indexed(some_tokens()).check_integrity({9: some_tokens()[0]})


def test_a_copy_is_an_index() -> None:
    """The tensor contains no address."""
    tokens = some_tokens()
    index = indexed(tokens)
    copy = DeviceNgramIndex(3, tokens.size, min_n=2, max_n=4, device="cpu")
    copy.tensor[:] = index.tensor
    index.tensor[:] = -1
    copy.check_integrity(dict(enumerate(tokens)))


def test_an_index_at_an_odd_word_is_scanned_around() -> None:
    """64-bit entries need 8-byte alignment."""
    whole = indexed(some_tokens())
    words = torch.zeros(whole.tensor.numel() + 1, dtype=torch.int32)
    words[1:] = whole.tensor
    before = words.clone()
    whole.tensor = words[1:]
    Rows(some_tokens(), 290, whole).step()
    assert torch.equal(words, before)
