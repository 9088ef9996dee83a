"""What begin_step uploads, and in how many copies and launches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import _C, NgramConfig
from ngram_npu.async_state import Admission, AsyncSpecState, Batch, KVGroup, NewBlocks
from ngram_npu.async_state.upload import PackedUpload

from async_state.late import POLICIES, LateDevice, value_of
from async_state.small import ints, small_state

_ROWS = 32
_GROUPS = (KVGroup(4, 200), KVGroup(8, 100))


class _CountingDevice(LateDevice):
    """Counts copies and launches on the main stream."""

    def __init__(self, policy: str = "eager") -> None:
        super().__init__(policy, random.Random(0))
        self.copies = self.scatters = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        self.copies += stream == "main"
        super().copy(target, source, stream)

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
        self.scatters += 1
        super().scatter(target, indices, source)

    def counts(self) -> tuple[int, int, int]:
        return self.copies, self.scatters, len(self.launches)


def _state(device: LateDevice) -> AsyncSpecState:
    sizes = {"max_rows": _ROWS, "row_capacity": 800, "max_step_tokens": 5 * _ROWS}
    return small_state(device, ngram=NgramConfig(k=2), kv_groups=_GROUPS, engine="index", **sizes)


def _admit(row: int, tokens: Any) -> Admission:
    blocks = [
        1000 * row + np.arange(-(-len(tokens) // group.block_size), dtype=np.int32)
        for group in _GROUPS
    ]
    return Admission(row, tokens, tuple(blocks))


def _batch(scheduled: list[int], **changes: Any) -> Batch:
    rows = np.arange(len(scheduled), dtype=np.int32)
    return Batch(rows, ints(*scheduled), np.zeros_like(rows), **changes)


def _content(state: AsyncSpecState, row: int) -> list[list[int]]:
    """The tokens and the used blocks of a row, as they are on the device."""
    slot = int(state._mirrors.slot_of[row])
    length = int(value_of(state.num_tokens_on_device)[slot])
    tables = [value_of(table)[slot].tolist() for table in state.block_tables]
    used = [[block for block in table if block >= 0] for table in tables]
    return [value_of(state.token_ids)[slot, :length].tolist(), *used]


def _expected(admission: Admission) -> list[list[int]]:
    return [admission.token_ids.tolist(), *(blocks.tolist() for blocks in admission.block_ids)]


def _second_step(joining: int) -> tuple[int, int, int]:
    """The copies and launches of a step that replaces so many requests, and in which one grows."""
    device = _CountingDevice()
    state = _state(device)
    sampled = device.tensor((_ROWS, 3), torch.int32)
    value_of(sampled)[:, 1:] = -1
    state.begin_step(
        _batch([5] * _ROWS, new=[_admit(row, ints(row, 1, 2, 3, 4)) for row in range(_ROWS)])
    )
    state.end_step(sampled)
    new = [_admit(row, ints(row, 7, 8)) for row in range(joining)]
    last = ints(_ROWS - 1)
    before = device.counts()
    state.begin_step(
        _batch(
            [3] * joining + [1] * (_ROWS - joining),
            removed=np.arange(joining, dtype=np.int32),
            new=new,
            new_blocks=(NewBlocks(last, ints(77)), NewBlocks()),
        )
    )
    after = device.counts()
    assert [_content(state, row) for row in range(joining)] == [_expected(one) for one in new]
    assert _content(state, _ROWS - 1)[1][2] == 77
    copies, scatters, launches = (b - a for a, b in zip(before, after, strict=True))
    return copies, scatters, launches


def test_copies_and_launches_do_not_depend_on_the_number_of_admissions() -> None:
    one = _second_step(1)
    assert one == _second_step(26)
    assert one[:2] == (1, 2)
    assert _second_step(0)[:2] == (1, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_than_one_copy_has_room_for(policy: str) -> None:
    device = LateDevice(policy, random.Random(0))
    state = _state(device)
    new = [_admit(row, np.arange(700 + row, dtype=np.int32)) for row in range(_ROWS)]
    state.begin_step(_batch([4] * _ROWS, new=new))
    device.drain()
    assert [_content(state, row) for row in range(_ROWS)] == [_expected(one) for one in new]
    state.rebuild(new[::-1])
    device.drain()
    assert [_content(state, row) for row in range(_ROWS)] == [_expected(one) for one in new]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("joining", [0, 3])
def test_step_with_more_cells_than_the_staging_buffer_holds_arrives_complete(
    policy: str, joining: int
) -> None:
    """With and without more chunks than it holds: each is a reason for more than one copy."""
    device = _CountingDevice(policy)
    group = KVGroup(1, 6000)
    sizes = {"max_rows": 4, "row_capacity": 6000, "max_step_tokens": 64}
    state = small_state(device, ngram=NgramConfig(k=2), kv_groups=(group,), **sizes)
    first = Admission(0, ints(1, 2, 3), (np.arange(3, dtype=np.int32),))
    state.begin_step(_batch([3], new=[first]))
    state.end_step(device.tensor((1, 1), torch.int32))
    appended = 100 + np.arange(5000, dtype=np.int32)
    upload = state._truth.upload
    assert isinstance(upload, PackedUpload)
    assert len(appended) > 2 * upload._most_cells
    new = [
        Admission(row, np.arange(5990, dtype=np.int32), (7 * np.arange(6000, dtype=np.int32),))
        for row in range(1, 1 + joining)
    ]
    before = device.copies
    state.begin_step(
        _batch(
            [1] * (1 + joining),
            new=new,
            new_blocks=(NewBlocks(np.zeros_like(appended), appended),),
        )
    )
    assert device.copies - before > 2
    device.drain()
    assert _content(state, 0) == [[1, 2, 3, 0], [0, 1, 2, *appended.tolist()]]
    assert [_content(state, one.row) for one in new] == [_expected(one) for one in new]


def test_blocks_appended_to_a_request_that_joins() -> None:
    device = LateDevice("lazy", random.Random(0))
    state = _state(device)
    state.begin_step(_batch([4], new=[_admit(0, np.arange(300, dtype=np.int32))]))
    again = _admit(0, ints(1, 2, 3))
    state.end_step(device.tensor((1, 1), torch.int32))
    state.begin_step(
        _batch(
            [3],
            removed=ints(0),
            new=[again],
            new_blocks=(NewBlocks(ints(0, 0), ints(5, 6)), NewBlocks(ints(0), ints(9))),
        )
    )
    device.drain()
    first, second = again.block_ids
    assert _content(state, 0) == [[1, 2, 3], [*first, 5, 6], [*second, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [np.zeros(3)]}, "rows: expected int32 vectors"),
        ({"rows": [np.zeros((3, 1), np.int32)]}, "rows: expected int32 vectors"),
        ({"firsts": np.zeros(2, np.int64)}, "firsts: expected size 1, got size 2"),
        ({"least": np.array([-1])}, "least: expected 0 to"),
        ({"split": 2}, "split: expected 0 to 1, got 2"),
    ],
)
def test_rows_that_cannot_be_packed(change: dict[str, Any], message: str) -> None:
    zero = np.zeros(1, np.int64)
    given = {"rows": [np.zeros(3, np.int32)], "firsts": zero, "least": zero, "split": 0, **change}
    with pytest.raises(ValueError, match=message):
        _C.pack_rows(**given)


@pytest.mark.parametrize(("begin", "count"), [(-1, 2), (0, -1), (4, 2), (2**62, 1), (0, 6)])
def test_spans_stay_within_their_items(begin: int, count: int) -> None:
    items, counts = np.arange(5, dtype=np.int32), np.array([2, count], np.int32)
    with pytest.raises(ValueError, match=r"join_spans: (begins|counts): expected 0 to "):
        _C.join_spans(items, np.array([0, begin]), counts)


def test_rows_may_be_strided_and_unaligned() -> None:
    raw = np.frombuffer(b"x" + np.arange(4, dtype=np.int32).tobytes(), np.int32, offset=1)
    rows = [raw, np.arange(6, dtype=np.int32)[::-2]]
    zeros = np.zeros(2, np.int64)
    places, chunks, of_split, smallest = _C.pack_rows(rows, zeros, zeros, 1)
    assert (places.tolist(), of_split, smallest) == ([0, 0], 1, 1)
    assert chunks[:, :5].tolist() == [[0, 1, 2, 3, -1], [5, 3, 1, -1, -1]]
