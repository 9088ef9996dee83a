"""Block tables: the KV blocks of each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.async_state.batch import AsyncConfig, Batch
from ngram_npu.async_state.device import Device
from ngram_npu.async_state.mirrors import (
    Int64Array,
    RowChanges,
    Step,
    int32_vector,
    live_slots,
    ragged_ranks,
)

_UNUSED = -1

Planned = tuple[Int64Array, npt.NDArray[np.int32], Int64Array]
"""The entries to write, as flat indices and values, and the new number of blocks of each slot."""


class BlockTable:
    """The block table of one KV group, [R, NB] int32 by slot, -1 where unused.

    It is uploaded as a whole if anything changed. Both staging buffers are complete tables: a step
    updates the one it uploads with its own changes and with those of the previous step, which went
    to the other buffer.
    """

    def __init__(
        self, device: Device, table: torch.Tensor, config: AsyncConfig, index: int
    ) -> None:
        self._device = device
        self._table = table
        self._config = config
        self._index = index
        self._block_size = config.kv_groups[index].block_size
        max_rows, self._width = shape = table.shape
        self._staging = [device.host_tensor(shape, torch.int32) for _ in range(2)]
        self._flat = [staging.numpy().reshape(-1) for staging in self._staging]
        for flat in self._flat:
            flat.fill(_UNUSED)
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._missing: tuple[Int64Array, npt.NDArray[np.int32]] | None = None
        """Changes in the other staging buffer that the next one does not have yet."""

    def clear_on_device(self) -> None:
        """To be called before the first step."""
        # The first step may write to this buffer before it is copied, but then uploads all of it.
        self._device.copy(self._table, self._staging[0], "main")

    def plan(self, batch: Batch, changes: RowChanges, step: Step) -> Planned | None:
        """The batch's changes of the table; None if there are none.

        Raises:
            ValueError: more blocks than a row has, a row that is not live, or fewer blocks than the
                step may need.
        """
        planned = self._plan_entries(batch, changes)
        self._check_room(step, self._num_blocks if planned is None else planned[2])
        return planned

    def _check_room(self, step: Step, num_blocks: Int64Array) -> None:
        room = num_blocks[step.slots] * self._block_size
        lacking = self._stored(step.host_num_computed + step.num_scheduled_tokens) > room
        if lacking.any():
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

    def _plan_entries(self, batch: Batch, changes: RowChanges) -> Planned | None:
        appended = batch.new_blocks[self._index] if batch.new_blocks else None
        if not changes.admissions and (appended is None or not len(appended.rows)):
            return None
        num_blocks = self._num_blocks.copy()
        indices, values = [], []
        if changes.admissions:
            blocks = [
                int32_vector(admission.block_ids[self._index], "new/resumed: block_ids")
                for admission in changes.admissions
            ]
            counts = np.array([len(ids) for ids in blocks])
            self._check_width(int(counts.max()))
            admitted = np.array(changes.admitted)
            starts = admitted * self._width
            indices.append(np.repeat(starts, counts) + ragged_ranks(counts))
            values.append(_used(np.concatenate(blocks), "new/resumed: block_ids"))
            # Blocks of the slot's last request beyond that are removed: they may belong to another
            # request now and must not be written to.
            left = np.maximum(num_blocks[admitted] - counts, 0)
            indices.append(np.repeat(starts + counts, left) + ragged_ranks(left))
            values.append(np.full(len(indices[-1]), _UNUSED, np.int32))
            num_blocks[admitted] = counts
        if appended is not None and len(appended.rows):
            rows = int32_vector(appended.rows, "new_blocks: rows")
            block_ids = int32_vector(appended.block_ids, "new_blocks: block_ids")
            slots = live_slots(changes.slot_of, rows, "new_blocks")
            if len(slots) != len(block_ids):
                raise ValueError(
                    f"new_blocks: expected {len(slots)} block_ids, one for each of "
                    f"rows, got {len(block_ids)}"
                )
            order = np.argsort(slots, kind="stable")
            counts = np.bincount(slots, minlength=len(num_blocks))
            ordered = slots[order]
            column = num_blocks[ordered] + ragged_ranks(counts)
            self._check_width(int(column.max()) + 1)
            indices.append(ordered * self._width + column)
            values.append(_used(block_ids[order], "new_blocks: block_ids"))
            num_blocks += counts
        return np.concatenate(indices), np.concatenate(values), num_blocks

    def commit(self, step_number: int, planned: Planned | None) -> None:
        """Brings the device's table up to date."""
        flat = self._flat[step_number % 2]
        if self._missing is not None:
            flat[self._missing[0]] = self._missing[1]
            self._missing = None
        if planned is None:
            return
        indices, values, self._num_blocks = planned
        flat[indices] = values
        self._missing = (indices, values)
        self._device.copy(self._table, self._staging[step_number % 2], "main")

    def _check_width(self, count: int) -> None:
        if count > self._width:
            raise ValueError(f"block_ids: expected at most {self._width} blocks a row, got {count}")


def _used(block_ids: npt.NDArray[np.int32], field: str) -> npt.NDArray[np.int32]:
    """Checks block ids: a negative one is an unused entry to the device, which stores no KV."""
    if len(block_ids) and int(block_ids.min()) < 0:
        raise ValueError(f"{field}: expected ids >= 0, got {int(block_ids.min())}")
    return block_ids
