"""Counts the KV blocks of each request, and plans the changes to the block tables on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngram_npu.async_state.batch import AsyncConfig, Batch, NewBlocks
from ngram_npu.async_state.host_state import RowChanges, Step, find_live_slots, to_int32_vector
from ngram_npu.async_state.upload import NO_CELLS, Int64Array, NewRows, Writes

_NO_ROWS: NewRows = (), np.zeros(0, np.int64)


class BlockChanges(NamedTuple):
    """A batch's changes to a block table."""

    num_blocks: Int64Array
    """[R], the number of blocks of each slot after the changes."""
    admitted: NewRows
    """The block ids of the admitted requests."""
    appended: Writes
    """The block ids that are appended to rows, and their positions."""


class BlockTable:
    """Plans the changes to the block table of one KV group, [R,NB] int32 by slot.

    The table itself is on the device. The host keeps only the number of blocks per slot.
    """

    def __init__(self, config: AsyncConfig, index: int, first_blocks: Int64Array) -> None:
        self._config = config
        self._index = index
        group = config.kv_groups[index]
        self._block_size, self._max_blocks = group.block_size, group.max_blocks
        self._first_blocks = first_blocks
        self._num_blocks = np.zeros(config.max_rows, np.int64)

    def plan(self, batch: Batch, changes: RowChanges, step: Step) -> BlockChanges:
        """Returns the batch's changes to the table; changes nothing.

        Raises ValueError if a row has no request, too many blocks, or too few blocks for the step.
        """
        num_blocks, admitted, appended = self._num_blocks, _NO_ROWS, NO_CELLS
        if changes.admissions:
            blocks = [
                to_int32_vector(admission.block_ids[self._index], "new/resumed: block_ids")
                for admission in changes.admissions
            ]
            admitted = blocks, num_blocks[changes.admitted]
            num_blocks = num_blocks.copy()
            num_blocks[changes.admitted] = [*map(len, blocks)]
        if batch.new_blocks and len(batch.new_blocks[self._index].rows):
            new = batch.new_blocks[self._index]
            appended, num_blocks = self._plan_appends(new, changes.slot_of, num_blocks)
        self._check_block_counts(num_blocks, changes.slot_of)
        self._check_capacity(step, num_blocks)
        return BlockChanges(num_blocks, admitted, appended)

    def _plan_appends(
        self, new: NewBlocks, slot_of: Int64Array, num_blocks: Int64Array
    ) -> tuple[Writes, Int64Array]:
        rows = to_int32_vector(new.rows, "new_blocks: rows")
        blocks = to_int32_vector(new.block_ids, "new_blocks: block_ids")
        slots = find_live_slots(slot_of, rows, "new_blocks")
        if len(slots) != len(blocks):
            raise ValueError(
                f"new_blocks: expected {len(slots)} block_ids, one for each of "
                f"rows, got {len(blocks)}"
            )
        check_block_ids(int(blocks.min()), "new_blocks")
        num_new_blocks = np.bincount(slots, minlength=len(num_blocks))
        cells = (self._first_blocks + num_blocks).take(slots)
        if np.count_nonzero(num_new_blocks) < len(slots):  # a row receives several blocks
            order = slots.argsort(kind="stable")
            ordered = slots[order]
            cells = cells[order] + np.arange(len(slots)) - ordered.searchsorted(ordered)
            blocks = blocks[order]
        return (cells, blocks), num_blocks + num_new_blocks

    def commit(self, changes: BlockChanges) -> None:
        self._num_blocks = changes.num_blocks

    def _check_block_counts(self, num_blocks: Int64Array, slot_of: Int64Array) -> None:
        if num_blocks is self._num_blocks:
            return
        slot = int(num_blocks.argmax())
        if num_blocks[slot] > self._max_blocks:
            row = int((slot_of == slot).argmax())
            raise ValueError(
                f"block_ids: expected at most {self._max_blocks} blocks in row {row} "
                f"(KVGroup.max_blocks of KV group {self._index}), got {num_blocks[slot]}"
            )

    def _check_capacity(self, step: Step, num_blocks: Int64Array) -> None:
        capacity = num_blocks.take(step.slots) * self._block_size
        num_tokens = step.host_num_computed + step.num_scheduled_tokens
        num_stored = self._count_stored_tokens(num_tokens)
        has_too_few_blocks = num_stored > capacity
        if np.count_nonzero(has_too_few_blocks):
            i = int(has_too_few_blocks.argmax())
            expected = -(-int(num_stored[i]) // self._block_size)
            raise ValueError(
                f"block_ids, new_blocks: expected {expected} blocks of KV group {self._index} in "
                f"row {step.rows[i]} for {num_tokens[i]} tokens (block_size {self._block_size}, "
                f"cp_world {self._config.cp_world}), got {num_blocks[step.slots[i]]}"
            )

    def _count_stored_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """Returns how many of the first ``tokens`` tokens of each request this rank stores.

        The rank stores these tokens in consecutive KV slots. For complete blocks of the block
        manager, the result is ``tokens / cp_world``.
        """
        world, interleave = self._config.cp_world, self._config.cp_interleave
        if world == 1:
            return tokens
        num_rounds, remainder = np.divmod(tokens, world * interleave)
        num_last_tokens = np.clip(remainder - self._config.cp_rank * interleave, 0, interleave)
        stored: npt.NDArray[np.integer[Any]] = num_rounds * interleave + num_last_tokens
        return stored


def check_block_ids(smallest: int, field: str) -> None:
    """Raises ValueError for a negative id, which the device would treat as an unused entry."""
    if smallest < 0:
        raise ValueError(f"{field}: block_ids: expected ids >= 0, got {smallest}")
