"""RowRecognizer compared with a runner that knows its requests and moves their rows."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from ngram_npu._C import RowRecognizer
from ops.guard_pages import guarded

WIDTH = 400


@dataclass
class Request:
    """A request of the runner."""

    name: int
    tokens: list[int]
    slots: set[int] = field(default_factory=set)


class Assignment(NamedTuple):
    slots: np.ndarray
    new: np.ndarray
    """Flags by row."""


def _assign(recognizer: RowRecognizer, *arguments: np.ndarray) -> Assignment:
    slots, rows = recognizer.assign(*arguments)
    new = np.zeros(len(slots), bool)
    new[rows] = True
    return Assignment(slots, new)


def _assign_row(recognizer: RowRecognizer, row: np.ndarray, length: int, count: int = 1) -> Any:
    """Returns the slot of a step with one row, and whether the slot is new."""
    slots, new = _assign(recognizer, row, np.array([length], np.int32), np.array([count], np.int32))
    return int(slots[0]), bool(new[0])


def _row(first: int = 0, length: int = 100) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)[None].copy()


class Runner:
    """Swaps, condenses, preempts and resumes rows, as vLLM's input batch does."""

    def __init__(self, seed: int, rows: int, vocabulary: int) -> None:
        self.rng = random.Random(seed)
        self.rows: list[Request] = []
        self.preempted: list[Request] = []
        self.capacity = rows
        self.vocabulary = vocabulary
        self.buffer = np.full((rows, WIDTH), -7, np.int32)
        self.started = 0

    def draw_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def change_batch(self) -> None:
        for request in [r for r in self.rows if len(r.tokens) > WIDTH - 8]:
            self.rows.remove(request)
        if self.rows and self.rng.random() < 0.3:
            self.preempted.append(self.rows.pop(self.rng.randrange(len(self.rows))))
        if len(self.rows) > 2 and self.rng.random() < 0.3:
            self.rows[self.rng.randrange(len(self.rows))] = self.rows[-1]  # condensed
            self.rows.pop()
        if self.preempted and len(self.rows) < self.capacity and self.rng.random() < 0.5:
            self.rows.append(self.preempted.pop(0))
        while len(self.rows) < self.capacity and self.rng.random() < 0.5:
            self.rows.append(Request(self.started, self.draw_tokens(self.rng.randrange(1, 300))))
            self.started += 1
        if self.rng.random() < 0.3:
            self.rng.shuffle(self.rows)

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the arguments of `assign`. Rows in prefill sample nothing."""
        self.change_batch()
        counts = [self.rng.choice((0, 1, 1, 2, 5)) for _ in self.rows]
        for row, (request, count) in enumerate(zip(self.rows, counts, strict=True)):
            request.tokens += self.draw_tokens(count)
            self.buffer[row, : len(request.tokens)] = request.tokens
        lengths = [len(request.tokens) for request in self.rows]
        batch = len(self.rows)
        return self.buffer[:batch], np.array(lengths, np.int32), np.array(counts, np.int32)


@pytest.mark.parametrize("seed", range(10))
def test_recognizer_with_few_slots_never_confuses_requests(seed: int) -> None:
    """There are as many slots as rows. A preempted request may get a new slot, marked as new."""
    runner = Runner(seed, rows=6, vocabulary=1000)
    recognizer = RowRecognizer(num_slots=6)
    requests: dict[int, Request] = {}
    for _ in range(120):
        slots, new = _assign(recognizer, *runner.step())
        for request, slot, fresh in zip(runner.rows, slots.tolist(), new.tolist(), strict=True):
            assert fresh or requests[slot] is request
            requests[slot] = request


@pytest.mark.parametrize("seed", range(10))
def test_recognizer_confuses_only_rows_with_equal_tokens(seed: int) -> None:
    """The vocabulary has two tokens, so many rows are equal at all compared positions. A slot may
    then go to another request, but two rows of a step never share a slot."""
    runner = Runner(seed, rows=8, vocabulary=2)
    recognizer = RowRecognizer(num_slots=16)
    requests: dict[int, tuple[int, list[int]]] = {}
    for _ in range(120):
        token_ids, lengths, counts = runner.step()
        slots, new = _assign(recognizer, token_ids, lengths, counts)
        assert len(set(slots.tolist())) == len(slots)
        for row, (slot, fresh) in enumerate(zip(slots.tolist(), new.tolist(), strict=True)):
            tokens = token_ids[row, : lengths[row]].tolist()
            if not fresh:
                length, previous = requests[slot]
                assert length <= lengths[row] - counts[row]
                assert previous[-6:] == tokens[:length][-6:]
            requests[slot] = (int(lengths[row]), tokens)


def test_request_with_changed_tokens_is_new() -> None:
    recognizer, row = RowRecognizer(num_slots=4), _row()
    _assign_row(recognizer, row, 50)
    assert not _assign_row(recognizer, row, 51)[1]
    row[0, 48] = 7
    assert _assign_row(recognizer, row, 52)[1]


def test_strided_rows_get_the_slots_of_contiguous_rows() -> None:
    buffer = np.zeros((2, 200), np.int32)
    rows = buffer[:, 50:150]
    rows[:] = np.arange(200).reshape(2, 100)
    lengths, ones = np.array([50, 60], np.int32), np.ones(2, np.int32)
    first = RowRecognizer(num_slots=4)
    second = RowRecognizer(num_slots=4)
    for _ in range(3):
        lengths += 1
        rows[:] = rows[::-1].copy()
        lengths = lengths[::-1].copy()
        strided, plain = (
            _assign(recognizer, tokens, lengths, ones)
            for recognizer, tokens in ((first, rows), (second, rows.copy()))
        )
        assert np.array_equal(strided.slots, plain.slots)
        assert np.array_equal(strided.new, plain.new)
    assert not plain.new.any()


def test_row_is_recognized_after_growth_but_not_after_shrinking() -> None:
    recognizer, row = RowRecognizer(num_slots=4), _row()
    new = [_assign_row(recognizer, row, length)[1] for length in (50, 53, 54, 54)]
    assert new == [True, False, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_request_keeps_its_slot_in_random_steps(seed: int) -> None:
    """Odd seeds skip steps of the recognizer, in which rows grow, move, leave and resume."""
    runner = Runner(seed, rows=8, vocabulary=1000)
    recognizer = RowRecognizer(num_slots=256)
    requests: dict[int, Request] = {}
    num_continued = 0
    for _ in range(120):
        step = runner.step()
        if seed % 2 and runner.rng.random() < 0.4:
            continue
        slots, new = _assign(recognizer, *step)
        assert len(set(slots.tolist())) == len(runner.rows)
        for request, slot, fresh in zip(runner.rows, slots.tolist(), new.tolist(), strict=True):
            assert fresh == (not request.slots)
            num_continued += not fresh
            assert fresh or requests[slot] is request
            request.slots.add(slot)
            assert len(request.slots) == 1
            requests[slot] = request
    assert num_continued > 100
    assert runner.started > 30


def test_row_continues_the_longest_matching_request() -> None:
    """Each turn of a conversation starts with the text of the previous turn."""
    recognizer = RowRecognizer(num_slots=8)
    slots = []
    for length in (50, 40, 90):  # the second is too short for the first
        slots.append(_assign_row(recognizer, _row(), length)[0])
        _assign_row(recognizer, _row(500), 7)
    assert slots[2] == slots[0] != slots[1]


def test_forget_absent_keeps_recent_requests() -> None:
    recognizer = RowRecognizer(num_slots=8)

    def step(row: int, length: int) -> int:
        slot: int = _assign_row(recognizer, _row(100 * row), length)[0]
        return slot

    first, second = step(0, 10), step(1, 10)
    for length in range(11, 30):  # a row that grows is recognized without a search
        assert step(1, length) == second
    assert recognizer.free_absent_slots(20).tolist() == []
    step(1, 30)
    assert recognizer.free_absent_slots(20).tolist() == [first]
    third = step(2, 10)
    assert recognizer.free_absent_slots(0).tolist() == [second]
    assert recognizer.free_absent_slots(0).tolist() == []
    assert step(2, 11) == third


def test_forget_absent_clears_all_absent_requests() -> None:
    recognizer = RowRecognizer(num_slots=8)
    slots = [_assign_row(recognizer, _row(100 * i), 10)[0] for i in range(4)]
    assert sorted(recognizer.free_absent_slots(0).tolist()) == sorted(slots[:3])
    assert recognizer.free_absent_slots(0).tolist() == []
    assert [_assign_row(recognizer, _row(100 * i), 11)[1] for i in range(4)] == [True] * 3 + [False]


def test_equal_requests_get_different_slots() -> None:
    recognizer = RowRecognizer(num_slots=4)
    rows = np.tile(np.arange(100, dtype=np.int32), (3, 1))
    lengths, ones = np.full(3, 50, np.int32), np.ones(3, np.int32)
    first = _assign(recognizer, rows, lengths, ones)
    second = _assign(recognizer, rows, lengths + 1, ones)
    assert sorted(first.slots) == sorted(second.slots)
    assert len(set(second.slots.tolist())) == 3
    assert not second.new.any()


def test_new_request_replaces_the_one_absent_longest() -> None:
    recognizer = RowRecognizer(num_slots=2)
    rows = [np.full((1, 100), token, np.int32) for token in range(3)]
    slots = [_assign_row(recognizer, row, 50)[0] for row in rows]
    assert slots[2] == slots[0] != slots[1]
    assert not _assign_row(recognizer, rows[1], 51)[1]
    assert _assign_row(recognizer, rows[0], 51)[1]


def test_empty_rows_are_always_new() -> None:
    recognizer = RowRecognizer(num_slots=2)
    empty = np.zeros((0, 10), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
    assert len(_assign(recognizer, *empty).slots) == 0
    zero = np.zeros((2, 10), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    for _ in range(2):
        slots, new = _assign(recognizer, *zero)
        assert sorted(slots.tolist()) == [0, 1]
        assert new.all()


def test_more_rows_than_slots_raises() -> None:
    three = np.zeros((3, 10), np.int32), np.ones(3, np.int32), np.ones(3, np.int32)
    expected = r"^RowRecognizer: num_tokens: expected at most 2 rows, the number of slots, got 3$"
    with pytest.raises(ValueError, match=expected):
        RowRecognizer(num_slots=2).assign(*three)


def test_row_with_invalid_length_or_count_is_new() -> None:
    for length in (-5, 0, 101, 2**31 - 1, -(2**31)):
        recognizer = RowRecognizer(num_slots=4)
        assert [_assign_row(recognizer, _row(), length)[1] for _ in range(2)] == [True, True]
    for count in (-1, 51, 2**31 - 1, -(2**31)):
        recognizer = RowRecognizer(num_slots=4)
        _assign_row(recognizer, _row(), 50)
        assert _assign_row(recognizer, _row(), 50, count)[1]


@pytest.mark.parametrize("capacity", [0, 1, 3, 40])
@pytest.mark.parametrize("at_end", [False, True])
def test_arbitrary_lengths_cause_no_out_of_bounds_read(capacity: int, at_end: bool) -> None:
    """Guard pages precede or follow the rows."""
    generator = np.random.default_rng(0)
    recognizer = RowRecognizer(num_slots=8)
    rows = guarded(np.zeros((8, capacity), np.int32), at_end=at_end, writable=True)
    for _ in range(300):
        rows[:] = generator.integers(0, 2, rows.shape)
        lengths = generator.integers(-2, capacity + 3, 8).astype(np.int32)
        counts = generator.integers(-2, 4, 8).astype(np.int32)
        slots, _ = recognizer.assign(rows, lengths, counts)
        assert sorted(slots.tolist()) == list(range(8))


def test_copy_is_independent() -> None:
    first, row = RowRecognizer(num_slots=4), _row()
    _assign_row(first, row, 50)
    second = copy.copy(first)
    assert first.free_absent_slots(0).tolist() == []
    _assign_row(first, row[:, ::-1].copy(), 50)
    assert not _assign_row(second, row, 51)[1]
    assert first.row_slots.tolist() != second.row_slots.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((1, 4), np.int64), [1], [1]), "token_ids: expected int32, got int64"),
        ((np.zeros(4, np.int32), [1], [1]), "token_ids: expected rank 2, got rank 1"),
        ((np.zeros((1, 8), np.int32)[:, ::2], [1], [1]), "token_ids: expected a contiguous inner"),
        ((np.zeros((1, 4), np.int32), [1, 1], [1, 1]), "token_ids: expected 2 rows, got 1"),
        ((np.zeros((2, 4), np.int32), [1, 1], [1]), "num_sampled: expected size 2, got size 1"),
        ((np.zeros((2, 4), np.int32), [[1]], [1]), "num_tokens: expected rank 1, got rank 2"),
    ],
)
def test_invalid_array_raises(arguments: tuple[Any, ...], message: str) -> None:
    token_ids, lengths, counts = arguments
    with pytest.raises(ValueError, match=f"^RowRecognizer: {re.escape(message)}"):
        RowRecognizer(num_slots=4).assign(
            token_ids, np.array(lengths, np.int32), np.array(counts, np.int32)
        )


def test_number_out_of_range_raises() -> None:
    with pytest.raises(ValueError, match=r"^RowRecognizer: num_slots: expected 0 to "):
        RowRecognizer(num_slots=-1)
    with pytest.raises(ValueError, match=r"^RowRecognizer: steps: expected 0 to "):
        RowRecognizer(num_slots=1).free_absent_slots(-1)
