"""What the device keeps by slot, and what a step writes there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import ngram_npu._C as _C
from ngram_npu.async_state.batch import AsyncConfig
from ngram_npu.async_state.device import CpuDevice, Device
from ngram_npu.async_state.staging import HostBuffer

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Writes = tuple[Int64Array, Int32Array]
"""Places that differ, and what goes there."""

CHUNK = _C.CHUNK
UNUSED = -1
NO_CELLS: Writes = np.zeros(0, np.int64), np.zeros(0, np.int32)
NewRows = tuple[Sequence[Int32Array], Int64Array]
"""What the rows hold from now on, and the lengths of those that they replace."""


class Rows(NamedTuple):
    """Whole rows, in chunks."""

    places: Int64Array
    chunks: Int32Array
    """[C,CHUNK], UNUSED beyond a row's end, as far as it was longer before."""
    of_tokens: int
    """The first of them; the others are of block tables."""
    smallest_block: int


NO_ROWS = Rows(NO_CELLS[0], np.zeros((0, CHUNK), np.int32), 0, 0)

_PAD = np.zeros(1, np.int32)


def chunks_of(length: int) -> int:
    """The chunks that so much of a row takes."""
    return -(-length // CHUNK)


class Upload(ABC):
    """One tensor with all that the device keeps by slot.

    Whole rows of tokens and blocks are written in *chunks*, everything else in *cells*: elements.

    Attributes:
        token_ids: [R,S] int32 on the device, as the following.
        block_tables: [R,NB] for each KV group, UNUSED beyond a row's blocks.
        num_tokens: [R].
        acceptance: [R,2] of the neural drafter.
        fixed: [F] what is not kept by slot; always at the same address.
        first_blocks: [R] for each KV group, on the host: the cell of each row's first block.
    """

    fixed: torch.Tensor

    def __init__(self, device: Device, config: AsyncConfig) -> None:
        """Allocates everything, and clears it."""
        self._device = device
        rows, slots = config.max_rows, np.arange(config.max_rows)
        widths = [config.row_capacity, *(group.max_blocks for group in config.kv_groups)]
        pitches = [*map(chunks_of, widths)]
        sizes = [*(rows * pitch for pitch in pitches), chunks_of(rows), chunks_of(2 * rows)]
        *starts, lengths, accepted, end = np.cumsum([0, *sizes]).tolist()
        self._rows = [at + slots * pitch for at, pitch in zip(starts, pitches, strict=True)]
        self.first_blocks = [CHUNK * row for row in self._rows[1:]]
        self._own_cells = [CHUNK * lengths + slots]
        if config.merge is not None:
            self._own_cells += [CHUNK * accepted + 2 * slots + i for i in range(2)]
        self._chunks = device.tensor((end, CHUNK), torch.int32)
        self._cells = self._chunks.view(-1)
        self._blocks = self._chunks[starts[1] : lengths]
        *tables, num_tokens, acceptance = self._chunks.split_with_sizes(sizes)
        self.token_ids, *block_tables = (
            table.view(rows, -1)[:, :width] for table, width in zip(tables, widths, strict=True)
        )
        self.block_tables = tuple(block_tables)
        self.num_tokens = num_tokens.view(-1)[:rows]
        self.acceptance = acceptance.view(-1, 2)[:rows]
        self.clear()

    def clear(self) -> None:
        """Empties the block tables."""
        unused = self._device.host_tensor(self._blocks.shape, torch.int32)
        self._device.copy(self._blocks, unused.fill_(UNUSED), "main")

    def rows(self, slots: Int64Array, tables: list[NewRows]) -> Rows:
        """The chunks of new rows.

        Args:
            slots: [N].
            tables: of tokens, then of each KV group's blocks.
        """
        rows = [row for contents, _ in tables for row in contents]
        firsts = np.concatenate([first[slots] for first in self._rows])
        replaced = np.concatenate([lengths for _, lengths in tables])
        return Rows(*_C.pack_rows(rows, firsts, replaced, len(slots)))

    def lengths(self, slots: Int64Array, lengths: Int32Array) -> list[Writes]:
        """The cells of the lengths of new rows; nothing is known of their neural drafts yet."""
        first, *others = (cells[slots] for cells in self._own_cells)
        return [(first, lengths), *((cells, 0 * lengths) for cells in others)]

    @abstractmethod
    def send(self, number: int, rows: Rows, cells: list[Writes], fixed: list[Int32Array]) -> None:
        """Writes rows, then cells, and the beginning of the fixed part.

        Args:
            number: of the step.
        """


class DirectUpload(Upload):
    """Where the host's memory is the device's."""

    def __init__(self, device: Device, config: AsyncConfig, fixed: int) -> None:
        super().__init__(device, config)
        self.fixed = device.tensor((fixed,), torch.int32)
        self._there = [tensor.numpy() for tensor in (self._chunks, self._cells, self.fixed)]

    def send(self, number: int, rows: Rows, cells: list[Writes], fixed: list[Int32Array]) -> None:
        all_chunks, all_cells, all_fixed = self._there
        all_chunks[rows.places] = rows.chunks
        for places, values in cells:
            all_cells[places] = values
        begin = 0
        for part in fixed:
            all_fixed[begin : begin + len(part)] = part
            begin += len(part)


class PackedUpload(Upload):
    """One copy to a place on the device, and from there to chunks and cells.

    These are packed before the fixed part, which ends that place. A step with more of them than
    there is room for is copied in parts.
    """

    def __init__(self, device: Device, config: AsyncConfig, fixed: int) -> None:
        super().__init__(device, config)
        # As much as requests bring whose whole prompts are scheduled.
        tables = 1 + len(config.kv_groups)
        self._most_chunks = config.max_rows * tables + chunks_of(config.max_step_tokens)
        self._most_cells = self._most_chunks * CHUNK
        # Each has an index of 64 bits. Whole chunks, so that they are rows of a view.
        self._room = self._most_chunks * 2 * CHUNK + self._most_cells * 3
        self._size = self._room + fixed
        self._landing = device.tensor((self._size,), torch.int32)
        self._landed_indices = self._landing[: self._room].view(torch.int64)
        self._landed_chunks = self._landing[: self._room].view(-1, CHUNK)
        self.fixed = self._landing[self._room :]
        # Used in turn: when a step begins, the copies of the last step may not have run, but those
        # of the step before it have, because it is reconciled.
        self._staging = [HostBuffer(device, self._size) for _ in range(2)]

    def send(self, number: int, rows: Rows, cells: list[Writes], fixed: list[Int32Array]) -> None:
        places, values = zip(*cells, strict=True)
        joined = np.concatenate(places), np.concatenate(values)
        share = max(len(rows.places) / self._most_chunks, len(joined[0]) / self._most_cells)
        copies, staging = math.ceil(share) or 1, self._staging[number % 2]
        staging.reserve(copies * self._size)
        for i in range(copies):
            now = _part(rows[:2], i, self._most_chunks), _part(joined, i, self._most_cells)
            self._copy(staging, i * self._size, *now, fixed)

    def _copy(
        self,
        staging: HostBuffer,
        offset: int,
        chunks: Writes,
        cells: Writes,
        fixed: list[Int32Array],
    ) -> None:
        num_chunks, num_cells = len(chunks[0]), len(cells[0])
        # Indices have 64 bits, so that all between them and the fixed part is even.
        values_at = self._room - num_chunks * CHUNK - num_cells - num_cells % 2
        cells_at = values_at - 2 * num_cells
        chunks_at = cells_at - 2 * num_chunks
        packed = [chunks[0].view(np.int32), cells[0].view(np.int32), cells[1]]
        packed += [_PAD[: num_cells % 2], chunks[1].reshape(-1), *fixed]
        end = self._room + sum(map(len, fixed))
        staged = slice(offset + chunks_at, offset + end)
        np.concatenate(packed, out=staging.array[staged])
        self._device.copy(self._landing[chunks_at:end], staging.tensor[staged], "main")
        # Not index_copy_: that of NPUs reads the indices on the host.
        if num_chunks:
            indices = self._landed_indices[chunks_at // 2 : cells_at // 2]
            self._chunks.index_put_((indices,), self._landed_chunks[-num_chunks:])
        if num_cells:
            indices = self._landed_indices[cells_at // 2 : values_at // 2]
            values = self._landing[values_at : values_at + num_cells]
            self._cells.index_put_((indices,), values)


def upload_to(device: Device, config: AsyncConfig, fixed: int) -> Upload:
    """An Upload with so many elements in the fixed part."""
    kind = DirectUpload if isinstance(device, CpuDevice) else PackedUpload
    return kind(device, config, fixed)


def _part(writes: Writes, i: int, most: int) -> Writes:
    here = slice(i * most, (i + 1) * most)
    return writes[0][here], writes[1][here]
