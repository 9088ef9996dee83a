"""Tests the content of a step's upload to the device, and its number of copies and launches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import _C, NgramConfig
from ngram_npu.async_state import Admission, AsyncSpecState, Batch, KVGroup, NewBlocks

from async_state import make_batch, make_small_state, to_ints
from async_state.devices import POLICIES, LateDevice, get_value

_ROWS = 32
_GROUPS = (KVGroup(4, 200), KVGroup(8, 100))


class _CountingDevice(LateDevice):
    """Counts copies and scatters. Runs queued work later, when its policy decides."""

    def __init__(self, policy: str = "eager") -> None:
        super().__init__(policy, random.Random(0))
        self.copies = self.scatters = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        self.copies += stream == "main"
        super().copy(target, source, stream)

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
        self.scatters += 1
        super().scatter(target, indices, source)

    def read_counts(self) -> np.ndarray[Any, Any]:
        return np.array([self.copies, self.scatters, len(self.launches)])


def _make_state(device: LateDevice) -> AsyncSpecState:
    sizes = {"max_rows": _ROWS, "row_capacity": 800, "max_step_tokens": 5 * _ROWS}
    ngram = NgramConfig(k=2)
    return make_small_state(device, ngram=ngram, kv_groups=_GROUPS, **sizes)


def _admit_row(row: int, tokens: Any) -> Admission:
    counts = [-(-len(tokens) // group.block_size) for group in _GROUPS]
    blocks = [1000 * row + np.arange(count, dtype=np.int32) for count in counts]
    return Admission(row, tokens, tuple(blocks))


def _schedule_rows(scheduled: list[int], **changes: Any) -> Batch:
    rows = range(len(scheduled))
    return make_batch(rows, scheduled, [0] * len(scheduled), **changes)


def _read_row(state: AsyncSpecState, row: int) -> list[list[int]]:
    """Returns the tokens and the used blocks of a row on the device."""
    slot = int(state._host_state.slot_of[row])
    length = int(get_value(state.num_tokens_on_device)[slot])
    tables = [get_value(table)[slot].tolist() for table in state.block_tables]
    used_blocks = [[block for block in table if block >= 0] for table in tables]
    return [get_value(state.token_ids)[slot, :length].tolist(), *used_blocks]


def _list_expected_row(admission: Admission) -> list[list[int]]:
    return [admission.token_ids.tolist(), *(blocks.tolist() for blocks in admission.block_ids)]


def _assert_rows(state: AsyncSpecState, admissions: list[Admission]) -> None:
    for admission in admissions:
        assert _read_row(state, admission.row) == _list_expected_row(admission)


def _count_calls(num_joining: int) -> list[int]:
    """Counts copies, scatters and launches of a step in which `num_joining` requests replace others
    and another request gets a new block."""
    device = _CountingDevice()
    state = _make_state(device)
    sampled_tensor = device.tensor((_ROWS, 3), torch.int32)
    get_value(sampled_tensor)[:, 1:] = -1
    new = [_admit_row(row, to_ints(row, 1, 2, 3, 4)) for row in range(_ROWS)]
    state.begin_step(_schedule_rows([5] * _ROWS, new=new))
    state.end_step(sampled_tensor)
    new = [_admit_row(row, to_ints(row, 7, 8)) for row in range(num_joining)]
    old_counts = device.read_counts()
    state.begin_step(
        _schedule_rows(
            [3] * num_joining + [1] * (_ROWS - num_joining),
            removed=np.arange(num_joining, dtype=np.int32),
            new=new,
            new_blocks=(NewBlocks(to_ints(_ROWS - 1), to_ints(77)), NewBlocks()),
        )
    )
    counts: list[int] = (device.read_counts() - old_counts).tolist()
    _assert_rows(state, new)
    assert _read_row(state, _ROWS - 1)[1][2] == 77
    return counts


def test_number_of_copies_and_launches_is_independent_of_number_of_admissions() -> None:
    counts = _count_calls(1)
    assert counts == _count_calls(26)
    assert counts[:2] == [1, 2]
    assert _count_calls(0)[:2] == [1, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_larger_than_staging_buffer_are_uploaded(policy: str) -> None:
    device = LateDevice(policy, random.Random(0))
    state = _make_state(device)
    new = [_admit_row(row, np.arange(700 + row, dtype=np.int32)) for row in range(_ROWS)]
    state.begin_step(_schedule_rows([4] * _ROWS, new=new))
    device.drain()
    _assert_rows(state, new)
    state.rebuild(new[::-1])
    device.drain()
    _assert_rows(state, new)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_joining", [0, 3])
def test_blocks_larger_than_staging_buffer_are_uploaded(policy: str, num_joining: int) -> None:
    """The new blocks alone, or together with the rows of joining requests, need several copies."""
    device = _CountingDevice(policy)
    sizes = {"max_rows": 4, "row_capacity": 6000, "max_step_tokens": 64}
    groups = (KVGroup(1, 6000),)
    state = make_small_state(device, ngram=NgramConfig(k=2), kv_groups=groups, **sizes)
    first = Admission(0, to_ints(1, 2, 3), (np.arange(3, dtype=np.int32),))
    state.begin_step(_schedule_rows([3], new=[first]))
    state.end_step(device.tensor((1, 1), torch.int32))
    appended = 100 + np.arange(5000, dtype=np.int32)
    assert len(appended) > 2 * state._device_state.upload._max_cells  # a cell holds one block id
    tokens, blocks = np.arange(5990, dtype=np.int32), 7 * np.arange(6000, dtype=np.int32)
    new = [Admission(row, tokens, (blocks,)) for row in range(1, 1 + num_joining)]
    new_blocks = (NewBlocks(np.zeros_like(appended), appended),)
    old_copies = device.copies
    state.begin_step(_schedule_rows([1] * (1 + num_joining), new=new, new_blocks=new_blocks))
    assert device.copies - old_copies > 2
    device.drain()
    assert _read_row(state, 0) == [[1, 2, 3, 0], [0, 1, 2, *appended.tolist()]]
    _assert_rows(state, new)


def test_new_blocks_of_a_request_that_joins_in_the_same_step_are_appended() -> None:
    device = LateDevice("lazy", random.Random(0))
    state = _make_state(device)
    state.begin_step(_schedule_rows([4], new=[_admit_row(0, np.arange(300, dtype=np.int32))]))
    state.end_step(device.tensor((1, 1), torch.int32))
    new = _admit_row(0, to_ints(1, 2, 3))
    new_blocks = (NewBlocks(to_ints(0, 0), to_ints(5, 6)), NewBlocks(to_ints(0), to_ints(9)))
    state.begin_step(_schedule_rows([3], removed=to_ints(0), new=[new], new_blocks=new_blocks))
    device.drain()
    first, second = new.block_ids
    assert _read_row(state, 0) == [[1, 2, 3], [*first, 5, 6], [*second, 9]]


# The C++ functions that pack an upload.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [np.zeros(3)]}, "rows: expected int32 vectors"),
        ({"rows": [np.zeros((3, 1), np.int32)]}, "rows: expected int32 vectors"),
        ({"first_chunks": np.zeros(2, np.int64)}, "first_chunks: expected size 1, got size 2"),
        ({"min_items": np.array([-1])}, "min_items: expected 0 to"),
        ({"split": 2}, "split: expected 0 to 1, got 2"),
    ],
)
def test_pack_rows_with_invalid_argument_raises(changes: dict[str, Any], message: str) -> None:
    zero = np.zeros(1, np.int64)
    rows = [np.zeros(3, np.int32)]
    arguments = {"rows": rows, "first_chunks": zero, "min_items": zero, "split": 0}
    with pytest.raises(ValueError, match=message):
        _C.pack_rows(**{**arguments, **changes})


def test_pack_rows_accepts_strided_and_unaligned_rows() -> None:
    unaligned = np.frombuffer(b"x" + np.arange(4, dtype=np.int32).tobytes(), np.int32, offset=1)
    rows = [unaligned, np.arange(6, dtype=np.int32)[::-2]]
    zeros = np.zeros(2, np.int64)
    indices, chunks, num_token_chunks, min_block_id = _C.pack_rows(rows, zeros, zeros, split=1)
    assert (indices.tolist(), num_token_chunks, min_block_id) == ([0, 0], 1, 1)
    assert chunks[:, :5].tolist() == [[0, 1, 2, 3, -1], [5, 3, 1, -1, -1]]


@pytest.mark.parametrize(("begin", "count"), [(-1, 2), (0, -1), (4, 2), (2**62, 1), (0, 6)])
def test_join_spans_with_span_outside_the_items_raises(begin: int, count: int) -> None:
    items, counts = np.arange(5, dtype=np.int32), np.array([2, count], np.int32)
    with pytest.raises(ValueError, match=r"join_spans: (begins|counts): expected 0 to "):
        _C.join_spans(items, np.array([0, begin]), counts)
