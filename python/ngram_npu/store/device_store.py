"""DeviceStore: text that requests share in a device's memory, without a host function per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngram_npu.ops import device_store_append_, device_store_propose_, workspace_size
from ngram_npu.store.identifiers import Scope
from ngram_npu.tensors import IntegrityError

# csrc/core/device_store.h
BLOCK_TOKENS = 256
SIZES = (1, 2, 3, 4, 8, 16)
"""The lengths of n-grams in the table."""
_SLOT_WORDS, _HEAD_WORDS = 3, 8
_NUMBER, _PREVIOUS, _NEXT, _FILL, _SCOPE_LOW, _SCOPE_HIGH = range(6)
_SLOT_BLOCK, _SLOT_LENGTH = 0, 1
_MAX_BLOCKS = 2**20
_END_OF_NUMBERS = 2**23
_COLUMNS_PER_TOKEN = 2
_HASH_BASE = 0x9E3779B97F4A7C15


class DeviceStore:
    """The memory of the operators ``device_store_append_`` and ``device_store_propose_``.

    New text overwrites the oldest. Per token of capacity, the store takes 4 bytes for text and 48
    to 96 bytes for entries, rounded to a power of two (55 MB for 2**20 tokens). Requests share text
    only within a scope (:func:`ngram_npu.scope_of`).

    A step calls :meth:`begin_step`, then :meth:`append` and :meth:`propose`. Only ``append`` and
    ``propose`` may be captured in a graph: they launch kernels and read nothing on the host.
    Ranks that make the same calls have equal stores.

    Args:
        num_slots: maximum number of concurrently writing requests.
        token_capacity: maximum number of tokens, rounded up to blocks of 256.
        max_batch: maximum number of requests in a step.
        device: device of the tensors, which has the operators' kernels (CPU or CUDA).

    Raises:
        ValueError: a size out of bounds.
    """

    def __init__(
        self,
        num_slots: int,
        token_capacity: int,
        *,
        max_batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        num_blocks = -(-token_capacity // BLOCK_TOKENS)
        for name, value, low, high in (
            ("num_slots", num_slots, 1, 2**31 - 1),
            ("token_capacity", token_capacity, BLOCK_TOKENS + 1, _MAX_BLOCKS * BLOCK_TOKENS),
            ("max_batch", max_batch, 1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"DeviceStore: {name}: expected {low} to {high}, got {value}")
        num_columns = 1 << (_COLUMNS_PER_TOKEN * num_blocks * BLOCK_TOKENS - 1).bit_length()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.slots = zeros(num_slots, _SLOT_WORDS)
        self.text = zeros(num_blocks, BLOCK_TOKENS)
        self.blocks = zeros(num_blocks, _HEAD_WORDS)
        self.table = zeros(len(SIZES), num_columns)
        self.allocator = zeros(2)
        self._workspace = zeros(workspace_size("device_store_append_", max_batch))
        self._max_number = 1
        """Upper bound of the next block number."""

    @property
    def num_bytes(self) -> int:
        """Memory of the store's tensors on the device."""
        tensors = self.slots, self.text, self.blocks, self.table, self.allocator, self._workspace
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def begin_step(self, num_requests: int, max_new: int) -> None:
        """Renumbers the blocks if the step could exhaust the block numbers.

        Every rank must call it before each :meth:`append`, also before the replay of a graph, with
        the same values. The bound is computed from them alone, so all ranks renumber in the same
        step.

        Args:
            num_requests: maximum number of requests in the step.
            max_new: as in :meth:`append`.
        """
        num_blocks = len(self.blocks)
        num_new = min(num_blocks // 2, num_requests * -(-max_new // BLOCK_TOKENS))
        if self._max_number + num_new > _END_OF_NUMBERS:
            self._renumber()
            self._max_number = 2 * num_blocks
        self._max_number += num_new

    def append(
        self, token_ids: Tensor, num_tokens: Tensor, num_sampled: Tensor, **arguments: Any
    ) -> None:
        """Calls ``device_store_append_``.

        Args:
            token_ids, num_tokens, num_sampled: the rows after the step.
            arguments: the other arguments of the operator, except the tensors of the store.
        """
        device_store_append_(
            token_ids,
            num_tokens,
            num_sampled,
            slots=self.slots,
            text=self.text,
            blocks=self.blocks,
            table=self.table,
            allocator=self.allocator,
            workspace=self._workspace,
            **arguments,
        )

    def propose(
        self, token_ids: Tensor, num_tokens: Tensor, num_sampled: Tensor, **arguments: Any
    ) -> None:
        """Calls ``device_store_propose_``.

        Args:
            token_ids, num_tokens, num_sampled: the rows after the step.
            arguments: the other arguments of the operator, except the tensors of the store.
        """
        device_store_propose_(
            token_ids,
            num_tokens,
            num_sampled,
            text=self.text,
            blocks=self.blocks,
            table=self.table,
            **arguments,
        )

    def clear(self, scopes: Iterable[Scope | int] | None = None) -> None:
        """Removes the text of these scopes; None: of all. No token of them stays in the store's
        memory.

        It launches kernels in the current stream and waits for nothing. Requests that are writing
        continue with the text that follows.
        """
        if scopes is None:
            for tensor in (self.slots, self.text, self.blocks, self.table, self.allocator):
                tensor.zero_()
            self._max_number = 1
            return
        for scope in scopes:
            low, high = _halves(int(scope))
            has_scope = self.blocks[:, _SCOPE_LOW] == low
            has_scope &= self.blocks[:, _SCOPE_HIGH] == high
            self.text.masked_fill_(has_scope[:, None], 0)
            self.blocks.masked_fill_(has_scope[:, None], 0)

    def _renumber(self) -> None:
        """Subtracts the largest multiple of the number of blocks with which every block that is in
        the ring keeps a number above 0. Numbers that are not greater than it become 0."""
        num_blocks = len(self.blocks)
        rounds = torch.div(self.allocator[0] - 1, num_blocks, rounding_mode="floor") - 1
        offset = rounds.clamp_(min=0) * num_blocks
        numbers = self.blocks[:, _NUMBER : _NEXT + 1]
        for tensor in (self.slots[:, _SLOT_BLOCK], numbers, self.allocator):
            tensor.sub_(offset).clamp_(min=0)
        self.table.sub_(offset * BLOCK_TOKENS).clamp_(min=0)

    def check_integrity(self) -> None:
        """Checks the structure, and each entry against the text. Slow: for tests and diagnosis.

        Raises:
            IntegrityError: the message names the violated rule, and the slot, block or entry.
        """
        names = ("slots", "text", "blocks", "table", "allocator")
        arrays = {name: getattr(self, name).cpu().numpy().astype(np.int64) for name in names}
        _check_blocks(arrays["blocks"], arrays["allocator"])
        _check_slots(arrays["slots"], arrays["blocks"], arrays["allocator"])
        for level, entries in enumerate(arrays["table"]):
            _check_entries(level, entries, arrays["blocks"], arrays["text"])


Int64Array = npt.NDArray[np.int64]


def _halves(scope: int) -> tuple[int, int]:
    """Returns the low and the high 32 bits, as int32."""
    low, high = np.array([scope], np.int64).view(np.int32)
    return int(low), int(high)


def _require(holds: npt.NDArray[np.bool_], where: npt.NDArray[Any], rule: str, kind: str) -> None:
    if not holds.all():
        raise IntegrityError(f"DeviceStore: {rule} ({kind} {where[~holds][0]})")


def _is_in_ring(blocks: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    in_ring: npt.NDArray[np.bool_] = blocks[numbers % len(blocks), _NUMBER] == numbers
    return in_ring & (numbers > 0)


def _check_blocks(blocks: Int64Array, allocator: Int64Array) -> None:
    next_number = allocator[0]
    if allocator[1] != next_number or not 0 <= next_number <= _END_OF_NUMBERS:
        raise IntegrityError(f"DeviceStore: allocator: {allocator.tolist()}")
    rows = np.arange(len(blocks))
    used = blocks[:, _NUMBER] != 0
    _require(~blocks[~used].any(axis=1), rows[~used], "a free block has a state", "block")
    rows, heads = rows[used], blocks[used]
    numbers, previous, after = heads[:, _NUMBER], heads[:, _PREVIOUS], heads[:, _NEXT]
    is_recent = (numbers >= next_number - len(blocks)) & (numbers < next_number)
    is_valid = is_recent & (numbers % len(blocks) == rows)
    _require(is_valid, rows, "a block has a number that is not in the ring", "block")
    fills = heads[:, _FILL]
    _require((fills >= 1) & (fills <= BLOCK_TOKENS), rows, "a block has a wrong fill", "block")
    successors = blocks[after % len(blocks)]
    has_same_scope = (successors[:, _SCOPE_LOW : _SCOPE_HIGH + 1] == heads[:, 4:6]).all(axis=1)
    is_linked = _is_in_ring(blocks, after) & (successors[:, _PREVIOUS] == numbers)
    is_linked &= has_same_scope & (fills == BLOCK_TOKENS)
    _require(is_linked | (after == 0), rows, "a block has a wrong successor", "block")
    predecessors = blocks[previous % len(blocks)]
    is_linked = (predecessors[:, _NEXT] == numbers) & (previous < numbers)
    is_evicted = ~_is_in_ring(blocks, previous)
    _require(is_linked | is_evicted, rows, "a block has a wrong predecessor", "block")


def _check_slots(slots: Int64Array, blocks: Int64Array, allocator: Int64Array) -> None:
    rows = np.arange(len(slots))
    _require(slots[:, _SLOT_LENGTH] >= 0, rows, "a slot has a negative length", "slot")
    numbers = slots[:, _SLOT_BLOCK]
    is_assigned = (numbers >= 0) & (numbers < np.maximum(allocator[0], 1))
    _require(is_assigned, rows, "a slot has a block that was not assigned", "slot")
    in_ring = _is_in_ring(blocks, numbers)
    used = numbers[in_ring]
    is_last = blocks[used % len(blocks), _NEXT] == 0
    _require(is_last, rows[in_ring], "a slot's block is not the last one", "slot")
    if len(set(used.tolist())) != len(used):
        raise IntegrityError("DeviceStore: two slots have the same block")


def _check_entries(level: int, entries: Int64Array, blocks: Int64Array, text: Int64Array) -> None:
    """Checks the entries of one length whose text is still in the store."""
    n = SIZES[level]
    columns = np.flatnonzero(_is_in_ring(blocks, entries // BLOCK_TOKENS))
    numbers, offsets = np.divmod(entries[columns], BLOCK_TOKENS)
    rows = numbers % len(blocks)
    is_stored = offsets < blocks[rows, _FILL]
    _require(is_stored, columns, f"an entry of {n} tokens refers to no token", "column")
    previous = blocks[rows, _PREVIOUS]
    is_readable = (offsets >= n) | _is_in_ring(blocks, previous)
    columns, rows, offsets = columns[is_readable], rows[is_readable], offsets[is_readable]
    before = blocks[rows, _PREVIOUS] % len(blocks)
    gram = np.zeros(len(columns), np.uint64)
    power = 1
    for j in range(1, n + 1):
        at = offsets - j
        tokens = text[np.where(at >= 0, rows, before), at % BLOCK_TOKENS].astype(np.uint32)
        gram += tokens.astype(np.uint64) * np.uint64(power)
        power = power * _HASH_BASE % 2**64
    halves = blocks[rows, _SCOPE_LOW : _SCOPE_HIGH + 1].astype(np.int32)
    seeds = _mix(np.ascontiguousarray(halves).view(np.uint64)[:, 0])
    keys = _mix((gram ^ seeds) + np.uint64((level + 1) * _HASH_BASE % 2**64))
    expected = (keys % np.uint64(len(entries))).astype(np.int64)
    _require(expected == columns, columns, f"an entry of {n} tokens has other tokens", "column")


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
