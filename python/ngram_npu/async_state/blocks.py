"""Block tables: which KV block holds which part of a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.async_state.batch import Batch
from ngram_npu.async_state.device import Device
from ngram_npu.async_state.mirrors import Int64Array, RowChanges, live_slots, ragged_ranks

_UNUSED = -1


class BlockTable:
    """The block table of one KV group, [R, NB] int32 by slot.

    It is uploaded whole where anything changed. Both staging buffers are complete tables: a step
    brings the one it is about to upload from up to date with its own changes and with those of the
    step before, which went to the other.
    """

    def __init__(self, device: Device, table: torch.Tensor) -> None:
        self._device = device
        self._table = table
        max_rows, self._width = shape = table.shape
        self._staging = [device.host_tensor(shape, torch.int32) for _ in range(2)]
        self._flat = [staging.numpy().reshape(-1) for staging in self._staging]
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._missing: tuple[Int64Array, npt.NDArray[np.int32]] | None = None
        """What the other staging buffer got and the next one lacks."""

    def plan(
        self, index: int, batch: Batch, changes: RowChanges
    ) -> tuple[Int64Array, npt.NDArray[np.int32], Int64Array] | None:
        """The entries that the batch writes, as flat indices and values, and the new number of
        blocks of each slot; None where it changes nothing.

        Raises:
            ValueError: more blocks than a row has, or a row that is not live.
        """
        appended = batch.new_blocks[index] if batch.new_blocks else None
        if not changes.admissions and (appended is None or not len(appended.rows)):
            return None
        num_blocks = self._num_blocks.copy()
        indices, values = [], []
        if changes.admissions:
            blocks = [admission.block_ids[index] for admission in changes.admissions]
            counts = np.array([len(ids) for ids in blocks])
            self._check_width(int(counts.max()))
            admitted = np.array(changes.admitted)
            starts = admitted * self._width
            indices.append(np.repeat(starts, counts) + ragged_ranks(counts))
            values.append(np.concatenate(blocks, dtype=np.int32, casting="same_kind"))
            # What the slot's last request had beyond that is wiped, so that nothing is ever written
            # to a block that belongs to somebody else by now.
            left = np.maximum(num_blocks[admitted] - counts, 0)
            indices.append(np.repeat(starts + counts, left) + ragged_ranks(left))
            values.append(np.full(len(indices[-1]), _UNUSED, np.int32))
            num_blocks[admitted] = counts
        if appended is not None and len(appended.rows):
            slots = live_slots(changes.slot_of, appended.rows, "new_blocks")
            if len(slots) != len(appended.block_ids):
                raise ValueError(
                    f"begin_step: new_blocks: expected {len(slots)} block_ids, one for each of "
                    f"rows, got {len(appended.block_ids)}"
                )
            order = np.argsort(slots, kind="stable")
            counts = np.bincount(slots, minlength=len(num_blocks))
            ordered = slots[order]
            column = num_blocks[ordered] + ragged_ranks(counts)
            self._check_width(int(column.max()) + 1)
            indices.append(ordered * self._width + column)
            values.append(np.asarray(appended.block_ids, np.int32)[order])
            num_blocks += counts
        return np.concatenate(indices), np.concatenate(values), num_blocks

    def commit(
        self,
        step_number: int,
        planned: tuple[Int64Array, npt.NDArray[np.int32], Int64Array] | None,
    ) -> None:
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
            raise ValueError(
                f"begin_step: block_ids: expected at most {self._width} blocks a row, got {count}"
            )
