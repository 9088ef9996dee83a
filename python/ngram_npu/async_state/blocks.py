"""Block tables: the KV blocks of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngram_npu.async_state.batch import AsyncConfig, Batch, NewBlocks
from ngram_npu.async_state.host_state import RowChanges, Step, int32_vector, live_slots
from ngram_npu.async_state.upload import NO_CELLS, Int64Array, NewRows, Writes

_NO_ROWS: NewRows = (), np.zeros(0, np.int64)


class Planned(NamedTuple):
    """A batch's changes of a block table."""

    num_blocks: Int64Array
    """[R], the new number of blocks of each slot."""
    admitted: NewRows
    """Of each admission's slot."""
    appended: Writes


class BlockTable:
    """The block table of one KV group, [R, NB] int32 by slot, -1 where unused: only how many blocks
    each slot has; the blocks are on the device."""

    def __init__(self, config: AsyncConfig, index: int, first_blocks: Int64Array) -> None:
        self._config = config
        self._index = index
        group = config.kv_groups[index]
        self._block_size, self._width = group.block_size, group.max_blocks
        self._first_blocks = first_blocks
        self._num_blocks = np.zeros(config.max_rows, np.int64)

    def plan(self, batch: Batch, changes: RowChanges, step: Step) -> Planned:
        """The batch's changes of the table.

        Raises:
            ValueError: more blocks than a row has, a row that is not live, or fewer blocks than the
                step may need.
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
        self._check_room(step, num_blocks)
        return Planned(num_blocks, admitted, appended)

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
        check_used(int(blocks.min()), "new_blocks")
        gained = np.bincount(slots, minlength=len(num_blocks))
        cells = (self._first_blocks + num_blocks).take(slots)
        if np.count_nonzero(gained) < len(slots):  # one row gets several
            order = slots.argsort(kind="stable")
            ordered = slots[order]
            cells = cells[order] + np.arange(len(slots)) - ordered.searchsorted(ordered)
            blocks = blocks[order]
        num_blocks = num_blocks + gained
        self._check_width(int(num_blocks.max()))
        return (cells, blocks), num_blocks

    def commit(self, planned: Planned) -> None:
        self._num_blocks = planned.num_blocks

    def _check_width(self, count: int) -> None:
        if count > self._width:
            raise ValueError(f"block_ids: expected at most {self._width} blocks a row, got {count}")

    def _check_room(self, step: Step, num_blocks: Int64Array) -> None:
        room = num_blocks.take(step.slots) * self._block_size
        lacking = self._stored(step.host_num_computed + step.num_scheduled_tokens) > room
        if np.count_nonzero(lacking):
            i = int(lacking.argmax())
            raise ValueError(
                f"new_blocks: expected blocks of KV group {self._index} for up to "
                f"{step.host_num_computed[i] + step.num_scheduled_tokens[i]} tokens at batch "
                f"position {i} (block_size {self._block_size}, cp_world {self._config.cp_world}), "
                f"got {num_blocks[step.slots[i]]}"
            )

    def _stored(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """The number of a request's first `tokens` whose KV is on this rank, in consecutive slots.
        For whole blocks of the block manager it is 1/cp_world of them."""
        world, interleave = self._config.cp_world, self._config.cp_interleave
        if world == 1:
            return tokens
        rounds, rest = np.divmod(tokens, world * interleave)
        here: npt.NDArray[np.integer[Any]] = rounds * interleave + np.clip(
            rest - self._config.cp_rank * interleave, 0, interleave
        )
        return here


def check_used(smallest: int, field: str) -> None:
    """Refuses a negative id: to the device it is an unused entry, which stores no KV."""
    if smallest < 0:
        raise ValueError(f"{field}: block_ids: expected ids >= 0, got {smallest}")
