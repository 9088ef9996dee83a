"""Checks that the memory of a store is in a state that the operators write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ngram_npu import NgramStore
from ngram_npu.store.contents import (
    BLOCK_TOKENS,
    END_OF_BLOCK_NUMBERS,
    HEAD_FILL,
    HEAD_NEXT,
    HEAD_NUMBER,
    HEAD_PREVIOUS,
    OCCURRENCES,
    SIZES,
    SLOT_BLOCK,
    Int64Array,
    read_scopes,
)
from ops.specs.store import STORE

_HASH_BASE = 0x9E3779B97F4A7C15
_SLOT_LENGTH = 1


def check_integrity(store: NgramStore) -> None:
    """Checks a store without pending steps, as :func:`check_contents` does."""
    tensors = {name: torch.as_tensor(getattr(store, name)).cpu() for name in STORE}
    check_contents({name: tensor.numpy().astype(np.int64) for name, tensor in tensors.items()})


def check_contents(arrays: dict[str, Int64Array]) -> None:
    """Checks the structure, and each entry against the text.

    Args:
        arrays: the arrays of a store by name.

    Raises:
        AssertionError: the message names the violated rule, and the slot, block or entry.
    """
    _check_blocks(arrays["blocks"], arrays["allocator"])
    _check_tails(arrays["blocks"], arrays["text"])
    _check_slots(arrays["slots"], arrays["blocks"], arrays["allocator"])
    for level, entries in enumerate(arrays["table"]):
        newest, second = entries[0::OCCURRENCES], entries[1::OCCURRENCES]
        columns = np.arange(len(newest))
        rule = f"the second newest entry of {SIZES[level]} tokens is not older than the newest"
        _require((second < newest) | (second == 0), columns, rule, "column")
        for entries in (newest, second):
            _check_entries(level, entries, arrays["blocks"], arrays["text"])


def _require(holds: npt.NDArray[np.bool_], where: npt.NDArray[Any], rule: str, kind: str) -> None:
    if not holds.all():
        raise AssertionError(f"{rule} ({kind} {where[~holds][0]})")


def _is_in_ring(blocks: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Returns for each block number whether the block is still stored. The blocks are a ring: a
    block replaces the one whose number is smaller by the number of blocks."""
    in_ring: npt.NDArray[np.bool_] = blocks[numbers % len(blocks), HEAD_NUMBER] == numbers
    return in_ring & (numbers > 0)


def _check_blocks(blocks: Int64Array, allocator: Int64Array) -> None:
    next_number = allocator[0]
    if allocator[1] != next_number or not 0 <= next_number <= END_OF_BLOCK_NUMBERS:
        raise AssertionError(f"the allocator has wrong numbers: {allocator.tolist()}")
    rows = np.arange(len(blocks))
    used = blocks[:, HEAD_NUMBER] != 0
    _require(~blocks[~used].any(axis=1), rows[~used], "the head of a free block is not 0", "block")
    rows, heads = rows[used], blocks[used]
    numbers, previous, after = heads[:, HEAD_NUMBER], heads[:, HEAD_PREVIOUS], heads[:, HEAD_NEXT]
    is_recent = (numbers >= next_number - len(blocks)) & (numbers < next_number)
    is_valid = is_recent & (numbers % len(blocks) == rows)
    _require(is_valid, rows, "a block's number is not one of the newest of its row", "block")
    fills = heads[:, HEAD_FILL]
    _require((fills >= 1) & (fills <= BLOCK_TOKENS), rows, "a block has a wrong fill", "block")
    successors = blocks[after % len(blocks)]
    has_same_scope = read_scopes(successors) == read_scopes(heads)
    is_linked = _is_in_ring(blocks, after) & (successors[:, HEAD_PREVIOUS] == numbers)
    is_linked &= has_same_scope & (fills == BLOCK_TOKENS)
    _require(is_linked | (after == 0), rows, "a block has a wrong successor", "block")
    predecessors = blocks[previous % len(blocks)]
    is_linked = (predecessors[:, HEAD_NEXT] == numbers) & (previous < numbers)
    is_evicted = ~_is_in_ring(blocks, previous)
    _require(is_linked | is_evicted, rows, "a block has a wrong predecessor", "block")


def _check_tails(blocks: Int64Array, text: Int64Array) -> None:
    is_unused = np.arange(BLOCK_TOKENS) >= blocks[:, HEAD_FILL, None]
    num_excess_tokens = np.count_nonzero(is_unused & (text != 0), axis=1)
    rule = "a block contains tokens after its end"
    _require(num_excess_tokens == 0, np.arange(len(text)), rule, "block")


def _check_slots(slots: Int64Array, blocks: Int64Array, allocator: Int64Array) -> None:
    rows = np.arange(len(slots))
    _require(slots[:, _SLOT_LENGTH] >= 0, rows, "a slot has a negative length", "slot")
    numbers = slots[:, SLOT_BLOCK]
    is_assigned = (numbers >= 0) & (numbers < np.maximum(allocator[0], 1))
    _require(is_assigned, rows, "a slot has a block that was not assigned", "slot")
    in_ring = _is_in_ring(blocks, numbers)
    used = numbers[in_ring]
    is_last = blocks[used % len(blocks), HEAD_NEXT] == 0
    _require(is_last, rows[in_ring], "a slot's block is not the last one", "slot")
    if len(set(used.tolist())) != len(used):
        raise AssertionError("two slots have the same block")


def _check_entries(level: int, entries: Int64Array, blocks: Int64Array, text: Int64Array) -> None:
    """Checks the entries for n-grams of one length, as far as their tokens are still stored."""
    n = SIZES[level]
    columns = np.flatnonzero(_is_in_ring(blocks, entries // BLOCK_TOKENS))
    numbers, offsets = np.divmod(entries[columns], BLOCK_TOKENS)
    rows = numbers % len(blocks)
    is_stored = offsets < blocks[rows, HEAD_FILL]
    _require(is_stored, columns, f"an entry of {n} tokens refers to no token", "column")
    previous = blocks[rows, HEAD_PREVIOUS]
    is_readable = (offsets >= n) | _is_in_ring(blocks, previous)
    columns, rows, offsets = columns[is_readable], rows[is_readable], offsets[is_readable]
    before = blocks[rows, HEAD_PREVIOUS] % len(blocks)
    gram = np.zeros(len(columns), np.uint64)
    power = 1
    for j in range(1, n + 1):
        at = offsets - j
        tokens = text[np.where(at >= 0, rows, before), at % BLOCK_TOKENS].astype(np.uint32)
        gram += tokens.astype(np.uint64) * np.uint64(power)
        power = power * _HASH_BASE % 2**64
    seeds = _mix(read_scopes(blocks[rows]).view(np.uint64))
    keys = _mix((gram ^ seeds) + np.uint64((level + 1) * _HASH_BASE % 2**64))
    expected = (keys % np.uint64(len(entries))).astype(np.int64)
    rule = f"the tokens of an entry of {n} tokens belong to another column"
    _require(expected == columns, columns, rule, "column")


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
