"""Contains the device tensor with the state of all slots, and uploads changes to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import ngram_npu._C as _C
from ngram_npu.async_state.batch import AsyncConfig
from ngram_npu.async_state.device import Device, HostBuffer

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Writes = tuple[Int64Array, Int32Array]
"""Distinct indices, and the values to write there."""

CHUNK_ITEMS = _C.CHUNK_ITEMS
UNUSED = -1
NO_CELLS: Writes = np.zeros(0, np.int64), np.zeros(0, np.int32)
NewRows = tuple[Sequence[Int32Array], Int64Array]
"""The contents of new rows, and the lengths of the rows that they replace."""


class Rows(NamedTuple):
    """Complete new rows, split into chunks."""

    indices: Int64Array
    """[C], the index of each chunk in the device tensor."""
    chunks: Int32Array
    """[C,CHUNK_ITEMS]; UNUSED after a row's end, up to the end of the replaced row."""
    num_token_chunks: int
    """Number of chunks of token rows, which come first; the others are chunks of block tables."""
    min_block_id: int
    """The smallest block ID in the block tables."""


NO_ROWS = Rows(NO_CELLS[0], np.zeros((0, CHUNK_ITEMS), np.int32), 0, 0)

_PADDING = np.zeros(1, np.int32)


def count_chunks(length: int) -> int:
    """Returns the number of chunks of a row with this length."""
    return -(-length // CHUNK_ITEMS)


class Upload:
    """One device tensor that contains the tokens, block tables and counts of all slots.

    New rows of tokens and blocks are written in *chunks*, everything else as single *cells*. A
    step's changes are copied in one transfer, then chunks and cells are scattered on the device. A
    step with more chunks or cells than fit is copied in several transfers.

    Attributes:
        token_ids: [R,S] int32 on the device, like all tensors below.
        block_tables: [R,NB] for each KV group, UNUSED after a row's blocks.
        num_tokens: [R].
        acceptance: [R,2], the neural drafter's acceptance (``merge_drafts_``).
        fixed: [F], the step's arrays that are not indexed by slot; the address never changes.
        first_blocks: [R] for each KV group, on the host: index of each row's first block cell.
    """

    def __init__(self, device: Device, config: AsyncConfig, num_fixed: int) -> None:
        """Allocates and clears all tensors; ``fixed`` has ``num_fixed`` elements."""
        self._device = device
        rows, slots = config.max_rows, np.arange(config.max_rows)
        widths = [config.row_capacity, *(group.max_blocks for group in config.kv_groups)]
        pitches = [*map(count_chunks, widths)]
        sizes = [*(rows * pitch for pitch in pitches), count_chunks(rows), count_chunks(2 * rows)]
        *starts, lengths, accepted, end = np.cumsum([0, *sizes]).tolist()
        self._rows = [start + slots * pitch for start, pitch in zip(starts, pitches, strict=True)]
        self.first_blocks = [CHUNK_ITEMS * row for row in self._rows[1:]]
        self._count_cells = [CHUNK_ITEMS * lengths + slots]
        if config.merge is not None:
            self._count_cells += [CHUNK_ITEMS * accepted + 2 * slots + i for i in range(2)]
        self._chunks = device.tensor((end, CHUNK_ITEMS), torch.int32)
        self._cells = self._chunks.view(-1)
        self._blocks = self._chunks[starts[1] : lengths]
        *tables, num_tokens, acceptance = self._chunks.split_with_sizes(sizes)
        self.token_ids, *block_tables = (
            table.view(rows, -1)[:, :width] for table, width in zip(tables, widths, strict=True)
        )
        self.block_tables = tuple(block_tables)
        self.num_tokens = num_tokens.view(-1)[:rows]
        self.acceptance = acceptance.view(-1, 2)[:rows]
        self._allocate_buffers(config, num_fixed)
        self.clear()

    def _allocate_buffers(self, config: AsyncConfig, num_fixed: int) -> None:
        """Allocates the device buffer and the staging buffers: packed chunks and cells, then the
        elements of ``fixed``."""
        # This is enough for a step in which every admitted request schedules its complete prompt.
        tables = 1 + len(config.kv_groups)
        self._max_chunks = config.max_rows * tables + count_chunks(config.max_step_tokens)
        self._max_cells = self._max_chunks * CHUNK_ITEMS
        # Chunks and cells have 64-bit indices. The size is a multiple of CHUNK_ITEMS, so that the
        # buffer can be viewed as chunks.
        self._packed_size = self._max_chunks * 2 * CHUNK_ITEMS + self._max_cells * 3
        self._size = self._packed_size + num_fixed
        self._buffer = self._device.tensor((self._size,), torch.int32)
        self._buffer_indices = self._buffer[: self._packed_size].view(torch.int64)
        self._buffer_chunks = self._buffer[: self._packed_size].view(-1, CHUNK_ITEMS)
        self.fixed = self._buffer[self._packed_size :]
        # Steps alternate between two buffers. When a step begins, the copies of the last step may
        # still be pending. Those of the step before it are done, because it is reconciled.
        self._staging = [HostBuffer(self._device, self._size) for _ in range(2)]

    def clear(self) -> None:
        """Marks all entries of the block tables as UNUSED."""
        unused = self._device.host_tensor(self._blocks.shape, torch.int32)
        self._device.copy(self._blocks, unused.fill_(UNUSED), "main")

    def pack_rows(self, slots: Int64Array, tables: list[NewRows]) -> Rows:
        """Returns the chunks of new rows: the token rows, then the block rows of each KV group."""
        rows = [row for contents, _ in tables for row in contents]
        first_indices = np.concatenate([first_chunks[slots] for first_chunks in self._rows])
        replaced_lengths = np.concatenate([lengths for _, lengths in tables])
        return Rows(*_C.pack_rows(rows, first_indices, replaced_lengths, len(slots)))

    def make_length_writes(self, slots: Int64Array, lengths: Int32Array) -> list[Writes]:
        """Returns the writes that set the lengths of new rows and reset their acceptance."""
        length_cells, *acceptance_cells = (cells[slots] for cells in self._count_cells)
        return [(length_cells, lengths), *((cells, 0 * lengths) for cells in acceptance_cells)]

    def send(self, step: int, rows: Rows, cells: list[Writes], fixed: list[Int32Array]) -> None:
        """Writes the rows, then the cells, and the arrays ``fixed`` to the begin of the tensor
        ``fixed``.

        ``step`` is the number of the step; consecutive steps use different staging buffers.
        """
        indices, values = zip(*cells, strict=True)
        all_cells = np.concatenate(indices), np.concatenate(values)
        num_filled_buffers = max(
            len(rows.indices) / self._max_chunks, len(all_cells[0]) / self._max_cells
        )
        num_copies, staging = math.ceil(num_filled_buffers) or 1, self._staging[step % 2]
        staging.reserve(num_copies * self._size)
        for i in range(num_copies):
            chunks = _select_part(rows[:2], i, self._max_chunks)
            part = _select_part(all_cells, i, self._max_cells)
            self._copy(staging, i * self._size, chunks, part, fixed)

    def _copy(
        self,
        staging: HostBuffer,
        offset: int,
        chunks: Writes,
        cells: Writes,
        fixed: list[Int32Array],
    ) -> None:
        num_chunks, num_cells = len(chunks[0]), len(cells[0])
        # With an even number of elements after the 64-bit indices, the indices are aligned.
        values_begin = self._packed_size - num_chunks * CHUNK_ITEMS - num_cells - num_cells % 2
        cells_begin = values_begin - 2 * num_cells
        chunks_begin = cells_begin - 2 * num_chunks
        packed = [chunks[0].view(np.int32), cells[0].view(np.int32), cells[1]]
        packed += [_PADDING[: num_cells % 2], chunks[1].reshape(-1), *fixed]
        end = self._packed_size + sum(map(len, fixed))
        staged_range = slice(offset + chunks_begin, offset + end)
        np.concatenate(packed, out=staging.array[staged_range])
        self._device.copy(self._buffer[chunks_begin:end], staging.tensor[staged_range], "main")
        # index_copy_ is not used, because on NPUs it reads the indices on the host.
        if num_chunks:
            indices = self._buffer_indices[chunks_begin // 2 : cells_begin // 2]
            self._chunks.index_put_((indices,), self._buffer_chunks[-num_chunks:])
        if num_cells:
            indices = self._buffer_indices[cells_begin // 2 : values_begin // 2]
            values = self._buffer[values_begin : values_begin + num_cells]
            self._cells.index_put_((indices,), values)


def _select_part(writes: Writes, i: int, size: int) -> Writes:
    part = slice(i * size, (i + 1) * size)
    return writes[0][part], writes[1][part]
