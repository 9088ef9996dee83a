"""The number of KV blocks of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngram_npu.async_state.batch import AsyncConfig, Batch, NewBlocks
from ngram_npu.async_state.host_state import RowChanges, Step, int32_vector, live_slots
from ngram_npu.async_state.upload import NO_CELLS, Int64Array, NewRows, Writes

_NO_ROWS: NewRows = (), np.zeros(0, np.int64)


class BlockChanges(NamedTuple):
    """A batch's changes to a block table."""

    num_blocks: Int64Array
    """[R], the number of blocks of each slot after the changes."""
    admitted: NewRows
    """Block rows of the admitted requests."""
    appended: Writes


class BlockTable:
    """Plans the changes to the block table of one KV group, [R,NB] int32 by slot.

    The table itself is on the device. The host keeps only the number of blocks per slot.
    """

    def __init__(self, config: AsyncConfig, index: int, first_blocks: Int64Array) -> None:
        self._config = config
        self._index = index
        group = config.kv_groups[index]
        self._block_size, self._width = group.block_size, group.max_blocks
        self._first_blocks = first_blocks
        self._num_blocks = np.zeros(config.max_rows, np.int64)

    def plan(self, batch: Batch, changes: RowChanges, step: Step) -> BlockChanges:
        """Returns the batch's changes to the table; changes nothing.

        Raises ValueError if a row is not live, or has too many blocks, or too few for the step.
        """
        num_blocks, admitted, appended = self._num_blocks, _NO_ROWS, NO_CELLS
        if changes.admissions:
            blocks = [
                int32_vector(admission.block_ids[self._index], "new/resumed: block_ids")
                for admission in changes.admissions
            ]
            admitted = blocks, num_blocks[changes.admitted]
            counts = [*map(len, blocks)]
            self._check_width(max(counts))
            num_blocks = num_blocks.copy()
            num_blocks[changes.admitted] = counts
        if batch.new_blocks and len(batch.new_blocks[self._index].rows):
            new = batch.new_blocks[self._index]
            appended, num_blocks = self._append(new, changes.slot_of, num_blocks)
        self._check_capacity(step, num_blocks)
        return BlockChanges(num_blocks, admitted, appended)

    def _append(
        self, new: NewBlocks, slot_of: Int64Array, num_blocks: Int64Array
    ) -> tuple[Writes, Int64Array]:
        rows = int32_vector(new.rows, "new_blocks: rows")
        blocks = int32_vector(new.block_ids, "new_blocks: block_ids")
        slots = live_slots(slot_of, rows, "new_blocks")
        if len(slots) != len(blocks):
            raise ValueError(
                f"new_blocks: expected {len(slots)} block_ids, one for each of "
                f"rows, got {len(blocks)}"
            )
        check_block_ids(int(blocks.min()), "new_blocks")
        gained = np.bincount(slots, minlength=len(num_blocks))
        cells = (self._first_blocks + num_blocks).take(slots)
        if np.count_nonzero(gained) < len(slots):  # a row receives several blocks
            order = slots.argsort(kind="stable")
            ordered = slots[order]
            cells = cells[order] + np.arange(len(slots)) - ordered.searchsorted(ordered)
            blocks = blocks[order]
        num_blocks = num_blocks + gained
        self._check_width(int(num_blocks.max()))
        return (cells, blocks), num_blocks

    def commit(self, changes: BlockChanges) -> None:
        self._num_blocks = changes.num_blocks

    def _check_width(self, count: int) -> None:
        if count > self._width:
            raise ValueError(
                f"block_ids: expected at most {self._width} blocks per row, got {count}"
            )

    def _check_capacity(self, step: Step, num_blocks: Int64Array) -> None:
        capacity = num_blocks.take(step.slots) * self._block_size
        num_tokens = step.host_num_computed + step.num_scheduled_tokens
        too_few = self._num_stored(num_tokens) > capacity
        if np.count_nonzero(too_few):
            i = int(too_few.argmax())
            raise ValueError(
                f"new_blocks: expected blocks of KV group {self._index} for up to "
                f"{num_tokens[i]} tokens at batch "
                f"position {i} (block_size {self._block_size}, cp_world {self._config.cp_world}), "
                f"got {num_blocks[step.slots[i]]}"
            )

    def _num_stored(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """Returns how many of the first ``tokens`` of each request this rank stores.

        The rank stores them in consecutive KV slots. For complete blocks of the block manager, the
        result is ``tokens / cp_world``.
        """
        world, interleave = self._config.cp_world, self._config.cp_interleave
        if world == 1:
            return tokens
        rounds, rest = np.divmod(tokens, world * interleave)
        remainder = np.clip(rest - self._config.cp_rank * interleave, 0, interleave)
        stored: npt.NDArray[np.integer[Any]] = rounds * interleave + remainder
        return stored


def check_block_ids(smallest: int, field: str) -> None:
    """Raises ValueError for a negative id, which the device would treat as an unused entry."""
    if smallest < 0:
        raise ValueError(f"{field}: block_ids: expected ids >= 0, got {smallest}")
