"""Tests the rules by which the controller tries and chooses draft lengths, on exact step times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from ngram_npu.draft_length import Change, DraftLengthController

GetTime = Callable[[int, int], float]
"""Returns the seconds of a step with a draft length, given the number of the step."""


class Engine:
    """Runs a controller on exact step times. Every draft of `length` tokens has `accepted[length]`
    accepted tokens."""

    def __init__(
        self, controller: DraftLengthController, accepted: dict[int, int], batch: int = 8
    ) -> None:
        self.controller, self.accepted, self.batch = controller, accepted, batch
        self.length = self.previous_length = 0
        self.lengths: list[int] = []

    def run(self, steps: int, get_time: GetTime, **arguments: object) -> None:
        for _ in range(steps):
            length, step = self.length, len(self.lengths)
            self.lengths.append(length)
            self.length = self.controller.table[self.batch]
            self.controller.observe_schedule(self.batch)
            if length:
                counts = [0] * (length + 1)
                counts[self.accepted[length]] = self.batch
                self.controller.acceptance.observe(self.batch, counts)
            else:
                self.controller.acceptance.observe(self.batch, ())
            seconds = get_time(step, length) if length == self.previous_length else None
            self.controller.observe_step(self.batch, length, seconds, **arguments)  # type: ignore[arg-type]
            self.previous_length = length

    def find_bursts(self) -> list[tuple[int, int, int]]:
        """Returns first step, length and number of steps of each run with a length above 0."""
        bursts, step = [], 0
        for length, group in itertools.groupby(self.lengths):
            count = len([*group])
            if length:
                bursts.append((step, length, count))
            step += count
        return bursts


def make_engine(length: int = 5, num_accepted: int = 0, batch: int = 8) -> Engine:
    controller = DraftLengthController((0, length), max(batch, 8))
    return Engine(controller, {length: num_accepted}, batch)


def find_intervals(engine: Engine) -> list[int]:
    starts = [start for start, _, _ in engine.find_bursts()]
    return [later - earlier for earlier, later in itertools.pairwise(starts)]


@pytest.mark.parametrize(
    ("time_per_token", "interval"),
    [
        (0.0, 64),  # loses nothing
        (0.197, 4 * 0.985 / 0.0125),  # loses 1.25 % of the time
        (0.306, 4 * 1.53 / 0.0125),
        (1.0, 1000),  # is never given up
    ],
)
def test_losing_length_is_tried_less_often_the_more_it_loses(
    time_per_token: float, interval: float
) -> None:
    engine = make_engine()
    engine.run(4000, lambda step, length: 0.01 * (1 + time_per_token * length))
    first, second, *later = find_intervals(engine)
    assert first == second == 32  # decisions are made every 16 steps, and bursts leave a pause
    assert len(later) >= 3
    assert {*later} == {16 * math.ceil(interval / 16)}
    assert engine.controller.table[8] == 0


@pytest.mark.parametrize(("batch", "steps"), [(1, 8), (2, 8), (4, 8), (8, 4), (64, 4)])
def test_burst_verifies_about_32_requests(batch: int, steps: int) -> None:
    engine = make_engine(batch=batch)
    engine.run(500, lambda step, length: 0.01 * (1 + length))
    assert {count for _, _, count in engine.find_bursts()} == {steps}


@pytest.mark.parametrize(
    ("gain", "expected"), [(1.015, 0), (1.025, 5), (1.5, 5)], ids=["1.5 %", "2.5 %", "50 %"]
)
def test_length_is_chosen_if_it_gains_two_percent(gain: float, expected: int) -> None:
    engine = make_engine(5, num_accepted=5)
    engine.run(2000, lambda step, length: 0.01 * (6 / gain if length else 1.0))
    assert engine.lengths[-200:].count(expected) > 150


def test_chosen_length_is_left_if_it_loses_two_percent() -> None:
    engine = make_engine(5, num_accepted=5)
    engine.run(500, lambda step, length: 0.015 if length else 0.01)
    engine.accepted[5] = 0
    engine.run(3000, lambda step, length: 0.01 * 1.015 if length else 0.01)
    assert engine.lengths[-200:].count(5) > 150
    engine.run(3000, lambda step, length: 0.01 * 1.025 if length else 0.01)
    assert engine.lengths[-200:].count(0) > 150


def test_times_of_other_kinds_of_steps_are_not_compared() -> None:
    """Steps with drafts are slower only because all of them have a prefill."""
    engine = make_engine(num_accepted=1)
    for _ in range(3000):
        kind = "prefill" if engine.length or len(engine.lengths) % 2 else "plain"
        seconds = 0.1 if kind == "prefill" else 0.01
        engine.run(1, lambda step, length, s=seconds: s, kind=kind)  # type: ignore[misc]
    assert engine.lengths[-200:].count(5) > 150


def test_kinds_count_by_their_time() -> None:
    """Three of four steps have a prefill, which takes long, and slows drafts down by little."""
    engine = make_engine(num_accepted=1)
    for number in range(2000):
        is_plain = number % 4 == 0
        seconds = (0.01, 0.03) if is_plain else (0.1, 0.13)  # the mean ratio is 1.36
        kind = "plain" if is_plain else "prefill"
        engine.run(1, lambda step, length, s=seconds: s[bool(length)], kind=kind)  # type: ignore[misc]
    assert engine.lengths[-200:].count(5) > 150
    engine.accepted[5] = 0
    engine.run(1000, lambda step, length: 0.1 if length else 0.08, kind="prefill")
    assert engine.controller.table[8] == 0


@pytest.mark.parametrize(("num_decodes", "is_compared"), [(61, True), (60, False)])
def test_times_are_compared_if_numbers_of_decoding_requests_differ_by_a_sixteenth(
    num_decodes: int, is_compared: bool
) -> None:
    engine = make_engine(5, num_accepted=5, batch=64)
    for _ in range(300):
        number = num_decodes if engine.length else 64
        engine.run(1, lambda step, length: 0.01, num_decodes=number)
    assert (engine.lengths[-100:].count(5) > 50) == is_compared


BURST = (3, 5, 0.01), (1, 0, 0.01)
"""Steps, given as number, draft length and seconds: a burst, which the step after it ends."""
# Steps by kind, and what the report says of steps with five draft tokens.
OBSERVATIONS: dict[str, tuple[dict[str, list[tuple[int, int, float | None]]], str]] = {
    "newest 16 times": (
        {"": [(12, 0, 0.03), (12, 0, 0.01), (4, 0, 0.02), (3, 5, 0.02), (1, 0, 0.01)]},
        "takes 2.00 times as long",
    ),
    "last 300 steps": ({"": [(8, 0, 0.01), (280, 0, None), *BURST, (15, 0, 0.01)]}, "takes 1.00"),
    "older steps": ({"": [(8, 0, 0.01), (320, 0, None), *BURST, (15, 0, 0.01)]}, "an unknown time"),
    **{
        f"two bursts {ratio}": (
            {"": [(4, 0, 0.01), *BURST] * 3 + [(4, 0, 0.01), (3, 5, 0.01 * ratio), BURST[1]] * 2},
            f"takes {expected:.2f} times as long",
        )
        # Two bursts contradict the others if they differ by a quarter.
        for ratio, expected in {1.2: 1.0, 1.3: 1.3, 0.83: 1.0, 0.77: 0.77}.items()
    },
    "newest five bursts": (
        {"": [(4, 0, 0.01), (3, 5, 0.012), BURST[1]] * 4 + [(4, 0, 0.01), *BURST] * 3},
        "takes 1.00 times as long",
    ),
    "a slow step in a burst": (
        {"": [(4, 0, 0.01), (2, 5, 0.01), (1, 5, 0.05), BURST[1]]},
        "takes 1.00",
    ),
    "a kind of steps that no longer occurs": (
        {
            "before": [(2560, 0, 0.01), *BURST],
            "now": [(2560, 0, 0.01), (3, 5, 0.03), (1, 0, 0.01)],
        },
        "takes 2.94 times as long",
    ),
    "less than a minute": ({"": [(8, 0, 50.0), (3, 5, 59.0), (1, 0, 50.0)]}, "takes 1.18"),
    "a minute": ({"": [(8, 0, 50.0), (3, 5, 60.0), (1, 0, 50.0)]}, "an unknown time"),
    # An outlier counts at most as if all tokens took their full time.
    "an outlier": ({"": [(6, 0, 0.01), (6, 5, 50.0), (6, 0, 0.01)]}, "takes 6.00 times as long"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_times_are_compared_by_rules(name: str) -> None:
    steps_by_kind, expected = OBSERVATIONS[name]
    controller = DraftLengthController((0, 5), 8)
    for kind, steps in steps_by_kind.items():
        for count, length, seconds in steps:
            for _ in range(count):
                controller.observe_step(8, length, seconds, kind=kind)
    assert expected in controller.describe_measurements()


def test_report_states_measured_values() -> None:
    engine = make_engine(3, num_accepted=3)
    engine.run(500, lambda step, length: 0.0395 if length else 0.01)
    report = engine.controller.describe_measurements()
    assert report.startswith(
        "batch sizes 5-8: with 3 draft tokens a step takes 3.95 times as long and generates 4.00 "
        "tokens per request; the times of "
    )
    assert report.endswith(" of 500 steps were used")


def test_choice_is_made_per_range_of_batch_sizes_and_reported() -> None:
    changes: list[Change] = []
    controller = DraftLengthController((0, 5), 64, on_change=changes.append)
    Engine(controller, {5: 5}, 4).run(400, lambda step, length: 0.048 if length else 0.01)
    Engine(controller, {5: 0}, 64).run(400, lambda step, length: 0.06 if length else 0.01)
    assert controller.table == [0] * 3 + [5] * 2 + [0] * 60
    (change,) = changes
    assert (change.first, change.last, change.before, change.after) == (3, 4, 0, 5)
    assert change.gain == pytest.approx(1.25)
    assert change.goodput == pytest.approx(1.25)
    assert controller.ranges == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64)]


def test_goodput_of_a_change_is_relative_to_no_drafts() -> None:
    changes: list[Change] = []
    controller = DraftLengthController((0, 3, 5), 8, on_change=changes.append)
    engine = Engine(controller, {3: 3, 5: 5})
    engine.run(500, lambda step, length: {0: 0.01, 3: 0.02, 5: 0.05}[length])
    engine.run(1000, lambda step, length: {0: 0.01, 3: 0.02, 5: 0.02}[length])
    engine.accepted = {3: 0, 5: 0}
    engine.run(1500, lambda step, length: {0: 0.01, 3: 0.02, 5: 0.02}[length])
    assert [(change.before, change.after) for change in changes] == [(0, 3), (3, 5), (5, 0)]
    assert [change.goodput for change in changes] == pytest.approx([2.0, 3.0, 1.0])
    assert [change.gain for change in changes[:2]] == pytest.approx([2.0, 1.5])
    assert changes[2].gain > 1.02


def test_disallowed_lengths_are_never_tried() -> None:
    controller = DraftLengthController((0, 3, 5), 8, is_allowed=lambda batch, k: batch * k <= 24)
    engine = Engine(controller, {3: 3})
    engine.run(1000, lambda step, length: 0.01)
    assert {*engine.lengths} == {0, 3}


def test_controller_changes_table_in_place() -> None:
    table = [9] * 9
    controller = DraftLengthController((0, 5), 8, table=table)
    assert table == [9] + [0] * 8
    Engine(controller, {5: 5}).run(400, lambda step, length: 0.01)
    assert controller.table is table
    assert table[8] == 5


def test_invalid_observations_keep_lengths_in_bounds() -> None:
    controller = DraftLengthController((0, 3, 5), 16)
    rng = random.Random(3)
    times = [None, 0.0, -1.0, math.nan, math.inf, 1e9, 1e-300, 0.01]
    for _ in range(5000):
        batch, length = rng.choice([-1, 0, 1, 2, 16, 17, 10**6]), rng.choice([-1, 0, 1, 2, 5, 99])
        controller.observe_schedule(batch)
        controller.observe_step(batch, length, rng.choice(times))
        assert {*controller.table} <= {0, 3, 5}
        assert len(controller.table) == 17


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.nan, math.inf, 60.0])
def test_length_without_usable_times_is_tried_but_never_chosen(seconds: float | None) -> None:
    engine = make_engine(num_accepted=5)
    engine.run(1000, lambda step, length: seconds if length else 0.01)  # type: ignore[arg-type,return-value]
    assert engine.find_bursts()
    assert engine.controller.table[8] == 0


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
