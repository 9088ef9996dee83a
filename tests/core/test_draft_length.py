"""The controller that chooses draft lengths, on simulated step times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from ngram_npu.draft_length import BURST_STEPS, MAX_SECONDS, Change, DraftLengthController

LENGTHS = (0, 1, 3, 5)
Time = Callable[[int, int], float]


def memory_bound(batch: int, length: int) -> float:
    return 0.01 + 0.00001 * batch * (1 + length)


def compute_bound(batch: int, length: int) -> float:
    return 0.001 * batch * (1 + length)


class Engine:
    """Runs steps of one batch size. Every draft token is accepted with the same probability, and
    step times vary by 3 %."""

    def __init__(self, controller: DraftLengthController, probability: float) -> None:
        self.controller, self.probability = controller, probability
        self.random = random.Random(7)
        self.length = self.previous = 0
        self.lengths: list[int] = []
        self.tokens = self.seconds = 0.0

    def run(self, steps: int, batch: int, time: Time) -> None:
        for _ in range(steps):
            length = self.length
            tokens = tokens_per_step(length, self.probability)
            seconds = time(batch, length) * math.exp(self.random.gauss(0, 0.03))
            for known in LENGTHS[1:]:
                expected = batch * tokens_per_step(known, self.probability)
                self.controller.acceptance.observe(known, expected, batch)
            self.tokens += batch * tokens
            self.seconds += time(batch, length)
            self.lengths.append(length)
            self.length = self.controller.table[batch]
            self.controller.observe_schedule(batch, self.length)
            is_comparable = length == self.previous
            self.controller.observe_step(batch, length, seconds if is_comparable else None)
            self.previous = length


def tokens_per_step(length: int, probability: float) -> float:
    return sum(probability**i for i in range(length + 1))


def best_goodput(batch: int, time: Time, probability: float) -> float:
    return max(batch * tokens_per_step(k, probability) / time(batch, k) for k in LENGTHS)


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("time", [memory_bound, compute_bound])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 100])
def test_controller_reaches_best_length(batch: int, time: Time, probability: float) -> None:
    engine = Engine(DraftLengthController(LENGTHS, 128), probability)
    engine.run(500, batch, time)
    engine.tokens = engine.seconds = 0
    engine.run(2000, batch, time)
    assert engine.tokens / engine.seconds >= 0.96 * best_goodput(batch, time, probability)


def test_later_trials_without_gain_lose_less_than_one_percent() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 128), 0.02)
    engine.run(310, 128, compute_bound)
    engine.tokens = engine.seconds = 0
    engine.run(5000, 128, compute_bound)
    assert engine.tokens / engine.seconds >= 0.994 / 0.001


def test_trials_take_at_most_their_share_of_steps() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.02)
    engine.run(310, 8, compute_bound)  # the last trial begins with step 300
    assert sum(length > 0 for length in engine.lengths) == 24
    runs = [(length, len([*steps])) for length, steps in itertools.groupby(engine.lengths)]
    assert {number for length, number in runs if length > 0} == {BURST_STEPS}
    engine.run(5000, 8, compute_bound)
    assert 24 < sum(length > 0 for length in engine.lengths) <= 24 + 50


def test_change_of_load_changes_the_length_of_its_range_only() -> None:
    changes: list[Change] = []
    controller = DraftLengthController(LENGTHS, 64, on_change=changes.append)
    engine = Engine(controller, 0.8)
    engine.run(400, 4, memory_bound)
    engine.run(400, 64, compute_bound)
    assert controller.table[4] == 5
    assert {*controller.table[33:]} <= {0, 1}
    assert controller.table[5:33] == [0] * 28
    assert {(c.first, c.last) for c in changes} >= {(3, 4)}
    assert all(c.before != c.after and c.reason for c in changes)


def test_change_of_traffic_ends_drafts() -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.8)
    time: Time = lambda batch, length: 0.01 * (1 + 0.3 * length)  # noqa: E731
    engine.run(400, 8, time)
    assert engine.controller.table[8] > 0
    engine.probability = 0.05
    engine.run(3000, 8, time)
    assert engine.controller.table[8] == 0


def test_disallowed_lengths_are_never_chosen() -> None:
    controller = DraftLengthController(LENGTHS, 8, is_allowed=lambda batch, k: batch * k <= 8)
    engine = Engine(controller, 0.8)
    engine.run(1000, 8, memory_bound)
    assert {*engine.lengths} == {0, 1}


def test_known_times_are_used_before_any_trial() -> None:
    times = {0: 1.0, 1: 1.01, 3: 1.03, 5: 1.05}
    controller = DraftLengthController(LENGTHS, 8, relative_times=lambda batch: times)
    engine = Engine(controller, 0.8)
    engine.run(20, 8, memory_bound)
    assert controller.table[8] == 5
    assert {*engine.lengths} == {0, 5}


def test_table_changes_in_place() -> None:
    table = [9] * 9
    controller = DraftLengthController(LENGTHS, 8, table=table)
    assert table == [9] + [0] * 8
    Engine(controller, 0.8).run(400, 8, memory_bound)
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


@pytest.mark.parametrize("time", [memory_bound, compute_bound])
def test_every_length_is_tried_before_one_is_tried_again(time: Time) -> None:
    engine = Engine(DraftLengthController(LENGTHS, 8), 0.02)
    engine.run(200, 8, time)
    tried = [length for length, _ in itertools.groupby(engine.lengths) if length > 0]
    assert sorted(tried[:3]) == [1, 3, 5]


def test_times_of_trials_are_averaged() -> None:
    controller = DraftLengthController((0, 2), 8)
    controller.acceptance.observe(2, 29_000, 10_000)
    times, chosen = [4.0, 2.0, 2.0], list[int]()  # the averages are 4, 3 and 2.7
    previous = length = 0
    for _ in range(310):
        if len(chosen) == len(times):
            break
        seconds = times[len(chosen)] if length else 1.0
        scheduled = controller.table[8]
        controller.observe_schedule(8, scheduled)
        controller.observe_step(8, length, seconds if length == previous else None)
        if previous and not length:
            chosen.append(controller.table[8])
        previous, length = length, scheduled
    assert chosen == [0, 0, 2]


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.nan, math.inf, MAX_SECONDS])
def test_without_usable_times_nothing_is_tried(seconds: float | None) -> None:
    controller = DraftLengthController(LENGTHS, 8)
    for _ in range(1000):
        controller.observe_schedule(8, controller.table[8])
        controller.observe_step(8, 0, seconds)
        assert controller.table == [0] * 9


def test_trial_without_usable_times_ends_without_result() -> None:
    controller = DraftLengthController(LENGTHS, 8)
    length, tried = 0, 0
    for _ in range(310):
        scheduled = controller.table[8]
        controller.observe_schedule(8, scheduled)
        controller.observe_step(8, length, 0.01 if length == 0 else None)
        length = scheduled
        tried += length > 0
    assert tried == 24
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
def test_invalid_arguments_raise(
    lengths: tuple[int, ...], table: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        DraftLengthController(lengths, 8, table=table)
    assert str(error.value) == f"DraftLengthController: {message}"
