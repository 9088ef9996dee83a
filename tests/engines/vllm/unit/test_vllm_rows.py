"""RowRecognizer compared with a runner that knows its requests and moves their rows."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_engine import ROWS, V1, random_steps
from ngram_npu._C import RowRecognizer
from ops.guard_pages import guarded


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


def _random_steps(seed: int, vocabulary: int) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yields the requests of each step and the arguments of ``assign``. Requests end, are preempted
    and resume, move and grow."""
    engine = V1()
    for sampled, _ in random_steps(engine, seed, 120, vocabulary):
        counts = np.array([*map(len, sampled.values())], np.int32)
        batch = len(sampled)
        yield list(sampled), [engine.buffer[:batch], engine.lengths[:batch], counts]


@pytest.mark.parametrize("seed", range(10))
def test_recognizer_confuses_only_rows_with_equal_tokens(seed: int) -> None:
    """The vocabulary has two tokens, so most rows are equal at all compared positions. A slot may
    then go to another request, but two rows of a step never share a slot."""
    recognizer = RowRecognizer(num_slots=16)
    requests: dict[int, list[int]] = {}
    for _, (token_ids, lengths, counts) in _random_steps(seed, vocabulary=2):
        slots, new = _assign(recognizer, token_ids, lengths, counts)
        assert len(set(slots.tolist())) == len(slots)
        for row, (slot, is_new) in enumerate(zip(slots.tolist(), new.tolist(), strict=True)):
            tokens = token_ids[row, : lengths[row]].tolist()
            if not is_new:
                length = len(requests[slot])
                assert length <= lengths[row] - counts[row]
                assert requests[slot][-6:] == tokens[:length][-6:]
            requests[slot] = tokens


def test_strided_rows_get_the_slots_of_contiguous_rows() -> None:
    rows = np.arange(800, dtype=np.int32).reshape(2, 400)[:, 50:150]
    lengths, ones = np.array([50, 60], np.int32), np.ones(2, np.int32)
    strided, contiguous = RowRecognizer(num_slots=4), RowRecognizer(num_slots=4)
    for _ in range(3):
        lengths = (lengths + 1)[::-1].copy()
        rows[:] = rows[::-1].copy()
        first = _assign(strided, rows, lengths, ones)
        second = _assign(contiguous, rows.copy(), lengths, ones)
        assert np.array_equal(first.slots, second.slots)
        assert np.array_equal(first.new, second.new)
    assert not first.new.any()


@pytest.mark.parametrize("num_slots", [ROWS, 256])
@pytest.mark.parametrize("seed", range(15))
def test_request_keeps_its_slot_in_random_steps(seed: int, num_slots: int) -> None:
    """Odd seeds skip steps of the recognizer, in which rows grow, move, leave and resume. With as
    few slots as rows, a preempted request may get a new slot, marked as new."""
    rng, recognizer = random.Random(seed), RowRecognizer(num_slots)
    requests: dict[int, str] = {}
    slots_of_requests: dict[str, int] = {}
    num_continued = 0
    for names, arguments in _random_steps(seed, vocabulary=1000):
        if seed % 2 and rng.random() < 0.4:
            continue
        slots, new = _assign(recognizer, *arguments)
        assert len(set(slots.tolist())) == len(names)
        for name, slot, is_new in zip(names, slots.tolist(), new.tolist(), strict=True):
            assert is_new or requests[slot] == name
            if num_slots == 256:
                assert is_new == (name not in slots_of_requests)
                assert slots_of_requests.setdefault(name, slot) == slot
            requests[slot] = name
            num_continued += not is_new
    assert num_continued > 100


def test_row_continues_the_longest_matching_request() -> None:
    """Each turn of a conversation starts with the text of the previous turn."""
    recognizer = RowRecognizer(num_slots=8)
    steps = (_row(), 50), (_row(500), 7), (_row(), 40), (_row(500), 7), (_row(), 90)
    first, _, second, _, last = (_assign_row(recognizer, row, n)[0] for row, n in steps)
    assert last == first != second


def test_free_absent_slots_clears_requests_absent_for_longer() -> None:
    recognizer = RowRecognizer(num_slots=8)
    slots = [_assign_row(recognizer, _row(100 * i), 10)[0] for i in range(4)]
    for length in range(11, 30):  # a row that grows is recognized without a search
        assert _assign_row(recognizer, _row(300), length) == (slots[3], False)
    assert recognizer.free_absent_slots(21).tolist() == slots[:1]
    assert recognizer.free_absent_slots(0).tolist() == slots[1:3]
    assert recognizer.free_absent_slots(0).tolist() == []
    assert [_assign_row(recognizer, _row(100 * i), 30)[1] for i in range(4)] == [True] * 3 + [False]


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
    three = np.zeros((3, 10), np.int32), np.ones(3, np.int32), np.ones(3, np.int32)
    expected = r"^RowRecognizer: num_tokens: expected at most 2 rows, the number of slots, got 3$"
    with pytest.raises(ValueError, match=expected):
        RowRecognizer(num_slots=2).assign(*three)
    with pytest.raises(ValueError, match=r"^RowRecognizer: num_slots: expected 0 to "):
        RowRecognizer(num_slots=-1)
    with pytest.raises(ValueError, match=r"^RowRecognizer: steps: expected 0 to "):
        RowRecognizer(num_slots=1).free_absent_slots(-1)
