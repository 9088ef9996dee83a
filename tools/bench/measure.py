"""Rounds in which contestants alternate, and the statistics of their times."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench.data import Workload
from tools.bench.options import CACHE_STATES, BenchError, Options

Drafts = list[list[int]]

DIGITS = 5
"""Significant digits kept in files; further ones are noise."""
_MIN_STEPS, _MAX_STEPS = 3, 50
_TURN_SECONDS = 0.03
_CHECKED_STEPS = 4
_CALM = 0.01
_MAX_ROUNDS = 5
"""Rounds are repeated up to this multiple of the requested number."""


class Contestant:
    """One way of doing a step's work; the base class does nothing and is usable as it is.

    The harness times only the call ``function(*arguments(step))``, not the preparation of its
    arguments. The steps of a lap come in order, each once, so a contestant may keep state between
    steps. The results of calls are dropped, except in the warm-up.

    Attributes:
        name: Short name, the key in results.
        detail: Exact description, for the record.
        function: The timed function.
        captured: Whether a GPU replays its steps as a graph.
        semantics: Contestants with equal semantics must draft the same; None: it does not draft.
    """

    name: str = ""
    detail: str = ""
    function: Callable[..., Any]
    captured: bool = True
    semantics: tuple[Any, ...] | None = None

    def activate(self) -> None:
        """Sets process-wide state that other contestants change too; called before its turn."""

    def reset(self) -> None:
        """Goes back to the workload's base lengths, before step 0 of a lap."""

    def arguments(self, step: int) -> tuple[Any, ...]:
        """Returns the arguments of ``function`` in this step."""
        return ()

    def drafts(self, result: Any) -> Drafts:
        """Returns the drafts in a result, each without its unused positions."""
        return []


@dataclass
class Measurement:
    """Raw figures: microseconds per step in each round, per contestant."""

    rounds_us: dict[str, list[float]] = field(default_factory=dict)
    worst_us: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    same_drafts: bool | None = None
    """Whether contestants of equal semantics drafted the same in the warm-up; None: not
    compared."""
    disturbed_rounds: int | None = None
    """Rounds in which the process waited noticeably for a core; None: unknown."""
    drafted_share: float | None = None
    """Share of requests for which our op drafted in the warm-up."""


def measure_wait_ns() -> int:
    """Returns how long this process's threads have been ready to run without a core; 0 if the
    system does not report it."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended
    return total


def measure(contestants: Sequence[Contestant], lap: int, options: Options) -> Measurement:
    """Measures the contestants, of which our op is the first.

    In each round all of them do the same steps, one contestant after the other; the first one
    changes from round to round. The first step of a turn is not timed: it loads the contestant's
    data and code into the caches (a cold state evicts the data again after it).

    A round in which this process had to wait for a core measures other work on the machine and
    distorts the slower contestant's time more. Such rounds are repeated up to a limit; then the
    calmest rounds count, and the result contains the number of disturbed ones among them.

    Args:
        lap: Steps of the workload; at its end all go back to the base lengths, untimed.
    """
    result = Measurement()
    for contestant in contestants:
        contestant.activate()
        contestant.reset()
    check(contestants, result)
    steps = options.steps or _choose_steps(contestants, options)
    result.steps = steps = min(steps, lap - 1)
    # Ones, not zeros: untouched pages all map to one page of zeros, which evicts nothing.
    other_memory = np.ones(CACHE_STATES[options.cache] // 8, np.int64)
    at = lap  # the first round begins with a reset
    rounds: list[tuple[float, dict[str, tuple[float, float]]]] = []
    """The largest share of a turn's time that was spent waiting for a core, and the turns."""
    gc.disable()
    try:
        for number in range(-1, _MAX_ROUNDS * options.rounds):  # round -1 is the warm-up
            if sum(disturbance <= _CALM for disturbance, _ in rounds) == options.rounds:
                break
            if at + steps + 1 > lap:
                at = 0
                for contestant in contestants:
                    contestant.reset()
            turns: dict[str, tuple[float, float]] = {}
            shares = []
            for contestant in rotate(contestants, number):
                start, wait = time.perf_counter_ns(), measure_wait_ns()
                turns[contestant.name] = _time_turn(contestant, at, steps, other_memory)
                elapsed = time.perf_counter_ns() - start
                shares.append((measure_wait_ns() - wait) / max(elapsed, 1))
            if number >= 0:
                rounds.append((max(shares), turns))
            at += steps + 1
            gc.collect(0)
    finally:
        gc.enable()
    calmest = sorted(rounds, key=lambda each: each[0])[: options.rounds]
    result.disturbed_rounds = sum(disturbance > _CALM for disturbance, _ in calmest)
    for contestant in contestants:
        means, longest = zip(*(turns[contestant.name] for _, turns in calmest), strict=True)
        result.rounds_us[contestant.name] = list(means)
        result.worst_us[contestant.name] = max(longest)
    return result


def rotate(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _time_turn(
    contestant: Contestant, at: int, steps: int, other_memory: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Returns the mean and the longest microseconds of the steps after the first."""
    contestant.activate()
    contestant.function(*contestant.arguments(at))
    function = contestant.function
    total = longest = 0
    for step in range(at + 1, at + steps + 1):
        arguments = contestant.arguments(step)
        if other_memory.size:
            other_memory.max()  # evicts the contestant's data from the caches
        start = time.perf_counter_ns()
        function(*arguments)
        elapsed = time.perf_counter_ns() - start
        total += elapsed
        longest = max(longest, elapsed)
    return total / steps / 1e3, longest / 1e3


def check(contestants: Sequence[Contestant], result: Measurement) -> None:
    """Runs a few untimed steps of all contestants (numba compiles here) and compares their drafts.

    Raises:
        BenchError: Contestants of equal semantics draft differently.
    """
    expected: dict[Hashable, tuple[str, list[Drafts]]] = {}
    for contestant in contestants:
        contestant.activate()
        drafts = []
        for step in range(_CHECKED_STEPS):
            arguments = contestant.arguments(step)
            drafts.append(contestant.drafts(contestant.function(*arguments)))
        contestant.reset()
        if contestant.semantics is None:
            continue
        if contestant is contestants[0]:
            rows = [bool(draft) for step_drafts in drafts for draft in step_drafts]
            result.drafted_share = sum(rows) / len(rows)
        name, other = expected.setdefault(contestant.semantics, (contestant.name, drafts))
        if drafts != other:
            raise BenchError(f"{contestant.name} and {name} draft differently: times not compared")
        if contestant.name != name:
            result.same_drafts = True


def _choose_steps(contestants: Sequence[Contestant], options: Options) -> int:
    """Returns a number of steps that keeps the slowest contestant's turn near `_TURN_SECONDS`."""
    slowest = 0.0
    for contestant in contestants:
        contestant.activate()
        arguments = contestant.arguments(0)
        start = time.perf_counter()
        contestant.function(*arguments)
        slowest = max(slowest, time.perf_counter() - start)
        contestant.reset()
    extra = CACHE_STATES[options.cache] / 10e9
    steps = int(_TURN_SECONDS / max(slowest + extra, 1e-9))
    return max(_MIN_STEPS, min(_MAX_STEPS, steps))


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def spread(sample: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 10th and the 90th percentile."""
    values = np.percentile(np.asarray(sample, dtype=np.float64), [50, 10, 90])
    return dict(zip(("median", "p10", "p90"), map(round_digits, values), strict=True))


def median_interval(sample: Sequence[float]) -> dict[str, float]:
    """Returns the median and a confidence interval of it: the narrowest pair of order statistics
    that contains the median of any distribution in at least 95 % of the cases.

    Raises:
        ValueError: There are fewer than 6 values, for which no pair does.
    """
    values, n = sorted(sample), len(sample)
    if n < 6:
        raise ValueError(f"median_interval: sample: expected at least 6 values, got {n}")
    outside = 0
    while 2 * sum(math.comb(n, i) for i in range(outside + 1)) <= 0.05 * 2**n:
        outside += 1
    middle = float(np.median(values))
    low, high = values[outside - 1], values[n - outside]
    return dict(zip(("median", "low", "high"), map(round_digits, (middle, low, high)), strict=True))


def ratios(peer_us: Sequence[float], ours_us: Sequence[float]) -> dict[str, float]:
    """Returns the spread of peer over ours, round by round. Both were measured close together in
    time, so a slowdown of the machine in a round hardly affects their ratio."""
    return spread([peer / ours for peer, ours in zip(peer_us, ours_us, strict=True)])


def compare(
    workload: Workload,
    options: Options,
    details: Mapping[str, str],
    measurement: Measurement,
) -> dict[str, Any]:
    """Returns the result of one size.

    Args:
        details: Descriptions by contestant, our op first.
    """
    ours, *peers = details
    rounds_us = measurement.rounds_us
    figures = {}
    for name, detail in details.items():
        figures[name] = {f"{key}_us": us for key, us in spread(rounds_us[name]).items()}
        figures[name] |= {"what": detail}  # type: ignore[dict-item]
        if name in measurement.worst_us:
            figures[name]["worst_step_us"] = round_digits(measurement.worst_us[name])
    peer_ratios = {peer: ratios(rounds_us[peer], rounds_us[ours]) for peer in peers}
    return {
        "size": str(workload.size),
        "batch": workload.size.batch,
        "context": workload.size.context,
        "cache": options.cache,
        "frontend": options.frontend,
        "engine": options.engine,
        "data": workload.describes,
        "disturbed_rounds": measurement.disturbed_rounds,
        "steps_per_round": measurement.steps,
        "drafted_share": measurement.drafted_share,
        "same_drafts": measurement.same_drafts,
        "ours": figures.pop(ours),
        "peers": figures,
        "ratio": {peer: ratio.pop("median") for peer, ratio in peer_ratios.items()},
        "ratio_spread": peer_ratios,
    }
