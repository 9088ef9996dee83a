"""Tests the controller that chooses draft lengths, with simulated step times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from ngram_npu.draft_length import BURST_STEPS, MAX_SECONDS, Change, DraftLengthController

LENGTHS = (0, 1, 3, 5)
GetTime = Callable[[int, int], float]
"""Returns the seconds of a step, given the batch size and the draft length."""


def get_memory_bound_time(batch: int, length: int) -> float:
    return 0.01 + 0.00001 * batch * (1 + length)


def get_compute_bound_time(batch: int, length: int) -> float:
    return 0.001 * batch * (1 + length)


class Engine:
    """Simulates steps with a controller. Every draft token is accepted with the same probability,
    and step times have a standard deviation of 3 %."""

    def __init__(self, controller: DraftLengthController, probability: float) -> None:
        self.controller, self.probability = controller, probability
        self.random = random.Random(7)
        self.length = self.previous_length = 0
        self.lengths: list[int] = []
        self.tokens = self.seconds = 0.0

    def run(self, steps: int, batch: int, get_time: GetTime) -> None:
        for _ in range(steps):
            length = self.length
            tokens = compute_tokens(length, self.probability)
            seconds = get_time(batch, length) * math.exp(self.random.gauss(0, 0.03))
            for draft_length in LENGTHS[1:]:
                expected = batch * compute_tokens(draft_length, self.probability)
                self.controller.acceptance.observe(draft_length, expected, batch)
            self.tokens += batch * tokens
            self.seconds += get_time(batch, length)
            self.lengths.append(length)
            self.length = self.controller.table[batch]
            self.controller.observe_schedule(batch, self.length)
            is_comparable = length == self.previous_length
            self.controller.observe_step(batch, length, seconds if is_comparable else None)
            self.previous_length = length


def compute_tokens(length: int, probability: float) -> float:
    """Returns the expected number of tokens of a request per step."""
    return sum(probability**i for i in range(length + 1))


def compute_best_goodput(batch: int, get_time: GetTime, probability: float) -> float:
    return max(batch * compute_tokens(k, probability) / get_time(batch, k) for k in LENGTHS)


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("get_time", [get_memory_bound_time, get_compute_bound_time])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 100])
def test_controller_reaches_best_length(batch: int, get_time: GetTime, probability: float) -> None:
    engine = Engine(DraftLengthController(LENGTHS, 128), probability)
    engine.run(500, batch, get_time)
    engine.tokens = engine.seconds = 0
    engine.run(2000, batch, get_time)
    best_goodput = compute_best_goodput(batch, get_time, probability)
    assert engine.tokens / engine.seconds >= 0.96 * best_goodput


def test_later_trials_without_gain_reduce_goodput_by_less_than_one_percent() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 128), 0.02)
    engine.run(310, 128, get_compute_bound_time)
    engine.tokens = engine.seconds = 0
    engine.run(5000, 128, get_compute_bound_time)
    assert engine.tokens / engine.seconds >= 0.994 / 0.001


def test_later_trials_take_at_most_one_percent_of_steps() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.02)
    engine.run(310, 8, get_compute_bound_time)  # the last trial begins with step 300
    assert sum(length > 0 for length in engine.lengths) == 24
    runs = [(length, len([*steps])) for length, steps in itertools.groupby(engine.lengths)]
    assert {count for length, count in runs if length > 0} == {BURST_STEPS}
    engine.run(5000, 8, get_compute_bound_time)
    assert 24 < sum(length > 0 for length in engine.lengths) <= 24 + 50


def test_change_of_load_changes_length_only_for_its_batch_sizes() -> None:
    changes: list[Change] = []
    controller = DraftLengthController(LENGTHS, 64, on_change=changes.append)
    engine = Engine(controller, 0.8)
    engine.run(400, 4, get_memory_bound_time)
    engine.run(400, 64, get_compute_bound_time)
    assert controller.table[4] == 5
    assert {*controller.table[33:]} <= {0, 1}
    assert controller.table[5:33] == [0] * 28
    assert {(change.first, change.last) for change in changes} >= {(3, 4)}
    assert all(change.before != change.after and change.reason for change in changes)


def test_lower_acceptance_ends_drafts() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.8)
    get_time: GetTime = lambda batch, length: 0.01 * (1 + 0.3 * length)  # noqa: E731
    engine.run(400, 8, get_time)
    assert engine.controller.table[8] > 0
    engine.probability = 0.05
    engine.run(3000, 8, get_time)
    assert engine.controller.table[8] == 0


def test_disallowed_lengths_are_never_chosen() -> None:
    controller = DraftLengthController(LENGTHS, 8, is_allowed=lambda batch, k: batch * k <= 8)
    engine = Engine(controller, 0.8)
    engine.run(1000, 8, get_memory_bound_time)
    assert {*engine.lengths} == {0, 1}


def test_relative_times_are_used_before_any_trial() -> None:
    relative_times = {0: 1.0, 1: 1.01, 3: 1.03, 5: 1.05}
    controller = DraftLengthController(LENGTHS, 8, relative_times=lambda batch: relative_times)
    engine = Engine(controller, 0.8)
    engine.run(20, 8, get_memory_bound_time)
    assert controller.table[8] == 5
    assert {*engine.lengths} == {0, 5}


def test_controller_changes_table_in_place() -> None:
    table = [9] * 9
    controller = DraftLengthController(LENGTHS, 8, table=table)
    assert table == [9] + [0] * 8
    Engine(controller, 0.8).run(400, 8, get_memory_bound_time)
    assert controller.table is table
    assert table[8] == 5


def test_invalid_observations_keep_lengths_in_bounds() -> None:
    controller = DraftLengthController(LENGTHS, 16)
    rng = random.Random(3)
    times = [None, 0.0, -1.0, math.nan, math.inf, 1e9, 1e-300, 0.01]
    for _ in range(5000):
        batch, length = rng.choice([-1, 0, 1, 2, 16, 17, 10**6]), rng.choice([-1, 0, 1, 2, 5, 99])
        controller.observe_schedule(batch, length)
        controller.observe_step(batch, length, rng.choice(times))
        controller.acceptance.observe(length, rng.choice([-1, 0, 5, math.nan, 1e9]), batch)
        assert {*controller.table} <= {*LENGTHS}
        assert len(controller.table) == 17


@pytest.mark.parametrize("get_time", [get_memory_bound_time, get_compute_bound_time])
def test_every_length_is_tried_once_before_any_second_trial(get_time: GetTime) -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.02)
    engine.run(200, 8, get_time)
    trial_lengths = [length for length, _ in itertools.groupby(engine.lengths) if length > 0]
    assert sorted(trial_lengths[:3]) == [1, 3, 5]


def test_times_of_trials_are_averaged() -> None:
    controller = DraftLengthController((0, 2), 8)
    controller.acceptance.observe(2, 29_000, 10_000)
    times, chosen_lengths = [4.0, 2.0, 2.0], list[int]()  # the averages are 4, 3 and 2.7
    previous = length = 0
    for _ in range(310):
        if len(chosen_lengths) == len(times):
            break
        seconds = times[len(chosen_lengths)] if length else 1.0
        scheduled_length = controller.table[8]
        controller.observe_schedule(8, scheduled_length)
        controller.observe_step(8, length, seconds if length == previous else None)
        if previous and not length:
            chosen_lengths.append(controller.table[8])
        previous, length = length, scheduled_length
    assert chosen_lengths == [0, 0, 2]


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.nan, math.inf, MAX_SECONDS])
def test_controller_without_usable_times_starts_no_trial(seconds: float | None) -> None:
    controller = DraftLengthController(LENGTHS, 8)
    for _ in range(1000):
        controller.observe_schedule(8, controller.table[8])
        controller.observe_step(8, 0, seconds)
        assert controller.table == [0] * 9


def test_trial_without_usable_times_ends_without_result() -> None:
    controller = DraftLengthController(LENGTHS, 8)
    length, num_trial_steps = 0, 0
    for _ in range(310):
        scheduled_length = controller.table[8]
        controller.observe_schedule(8, scheduled_length)
        controller.observe_step(8, length, 0.01 if length == 0 else None)
        length = scheduled_length
        num_trial_steps += length > 0
    assert num_trial_steps == 24
    assert controller.table[8] == 0


@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ((0,), None, "lengths: expected 0 and further values, ascending, got [0]"),
        ((1, 2), None, "lengths: expected 0 and further values, ascending, got [1, 2]"),
        ((0, 3, 2), None, "lengths: expected 0 and further values, ascending, got [0, 3, 2]"),
        ((0, 2), [0] * 8, "table: expected 9 elements, got 8"),
    ],
)
def test_controller_with_invalid_arguments_raises(
    lengths: tuple[int, ...], table: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        DraftLengthController(lengths, 8, table=table)
    assert str(error.value) == f"DraftLengthController: {message}"


def test_times_of_different_batch_sizes_are_not_compared() -> None:
    """Step times are proportional to the batch, and requests end while a trial runs."""
    controller = DraftLengthController(LENGTHS, 64)
    for length in LENGTHS[1:]:
        controller.acceptance.observe(length, 120, 100)
    batch, length = 64, 0
    for _ in range(1000):
        batch = 64 if length == 0 else batch - 4
        scheduled_length = controller.table[batch]
        controller.observe_schedule(batch, scheduled_length)
        controller.observe_step(batch, length, batch * (1 + length / 4) * 1e-3)
        assert scheduled_length == 0 or batch > 48, "only trials draft"
        length = scheduled_length
