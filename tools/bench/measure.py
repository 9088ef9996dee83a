"""Measures implementations in alternation, and computes the statistics of their times."""

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
"""Number of significant digits in files; further digits are noise."""
_MIN_STEPS, _MAX_STEPS = 3, 50
_TURN_SECONDS = 0.03
_CHECKED_STEPS = 4
_MAX_WAIT_SHARE = 0.01
"""A round is disturbed if the process waited for a core for a larger share of a turn's time."""
_MAX_ROUNDS_FACTOR = 5
"""Rounds are repeated up to this multiple of the requested number."""


class Implementation:
    """An implementation of a step, ours or a peer's.

    The harness times only the call ``function(*get_arguments(step))``, not the preparation of its
    arguments. After `reset`, each step runs once, in order, so an implementation may keep
    state between steps. Results of calls are dropped, except in `compare_drafts`.

    Attributes:
        name: Short name, the key in results.
        detail: Exact description for the results file.
        function: The timed function.
        is_captured: Whether a GPU replays the steps as a CUDA graph.
        semantics: Implementations with equal semantics must return the same drafts. None if the
            implementation does not draft.
    """

    name: str = ""
    detail: str = ""
    function: Callable[..., Any]
    is_captured: bool = True
    semantics: tuple[Any, ...] | None = None

    def activate(self) -> None:
        """Sets process-wide state, such as the number of threads; called before each turn."""

    def reset(self) -> None:
        """Resets the rows to the workload's initial lengths, before step 0."""

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        """Returns the arguments of ``function`` in this step."""
        return ()

    def get_drafts(self, result: Any) -> Drafts:
        """Returns the drafts in a result, each without its unused positions."""
        return []


@dataclass
class Measurement:
    """The times of all rounds: microseconds per step, by implementation."""

    rounds_us: dict[str, list[float]] = field(default_factory=dict)
    worst_us: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    same_drafts: bool | None = None
    """True if `compare_drafts` has compared implementations; None if there were none to compare."""
    disturbed_rounds: int | None = None
    """Number of disturbed rounds among the rounds used; None on a device."""
    drafted_share: float | None = None
    """Share of requests for which our implementation drafted in `compare_drafts`."""


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


def measure(
    implementations: Sequence[Implementation], workload_steps: int, options: Options
) -> Measurement:
    """Measures the implementations; the first is ours.

    In each round, all implementations do the same steps, one implementation after the other; its
    steps are the implementation's turn. A different implementation begins each round. The first
    step of a turn is not timed: it loads code and data into the caches. (With a cold cache state,
    the data are evicted again before each timed step.)

    If this process had to wait for a core in a round, the times include other work on the machine,
    which distorts the slower implementation's time more. Such disturbed rounds are repeated up to a
    limit. The rounds with the shortest waits are used, and the result contains the number of
    disturbed rounds among the rounds used.

    Args:
        workload_steps: Number of steps of the workload. After the last step, all implementations
            are reset to the initial lengths; the reset is not timed.
    """
    result = Measurement()
    for implementation in implementations:
        implementation.activate()
        implementation.reset()
    compare_drafts(implementations, result)
    steps = options.steps or _choose_steps(implementations, options)
    result.steps = steps = min(steps, workload_steps - 1)
    # Untouched pages of zeros would all map to one physical page, which evicts nothing.
    other_memory = np.ones(CACHE_STATES[options.cache] // 8, np.int64)
    first_step = workload_steps  # so that the first round begins with a reset
    rounds: list[tuple[float, dict[str, tuple[float, float]]]] = []
    """Per round: the largest share of a turn's time spent waiting for a core, and the turns."""
    gc.disable()
    try:
        for number in range(-1, _MAX_ROUNDS_FACTOR * options.rounds):  # round -1 is the warm-up
            if sum(share <= _MAX_WAIT_SHARE for share, _ in rounds) == options.rounds:
                break
            if first_step + steps + 1 > workload_steps:
                first_step = 0
                for implementation in implementations:
                    implementation.reset()
            turns: dict[str, tuple[float, float]] = {}
            shares = []
            for implementation in rotate(implementations, number):
                start, wait = time.perf_counter_ns(), measure_wait_ns()
                turn = _time_turn(implementation, first_step, steps, other_memory)
                turns[implementation.name] = turn
                elapsed = time.perf_counter_ns() - start
                shares.append((measure_wait_ns() - wait) / max(elapsed, 1))
            if number >= 0:
                rounds.append((max(shares), turns))
            first_step += steps + 1
            gc.collect(0)
    finally:
        gc.enable()
    used_rounds = sorted(rounds, key=lambda share_and_turns: share_and_turns[0])[: options.rounds]
    result.disturbed_rounds = sum(share > _MAX_WAIT_SHARE for share, _ in used_rounds)
    for implementation in implementations:
        means, longest = zip(*(turns[implementation.name] for _, turns in used_rounds), strict=True)
        result.rounds_us[implementation.name] = list(means)
        result.worst_us[implementation.name] = max(longest)
    return result


def rotate(implementations: Sequence[Implementation], number: int) -> list[Implementation]:
    first = number % len(implementations)
    return [*implementations[first:], *implementations[:first]]


def _time_turn(
    implementation: Implementation, first_step: int, steps: int, other_memory: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Returns the mean and the longest time of a step, in microseconds, without the first step."""
    implementation.activate()
    implementation.function(*implementation.get_arguments(first_step))
    function = implementation.function
    total = longest = 0
    for step in range(first_step + 1, first_step + steps + 1):
        arguments = implementation.get_arguments(step)
        if other_memory.size:
            other_memory.max()  # evicts the implementation's data from the caches
        start = time.perf_counter_ns()
        function(*arguments)
        elapsed = time.perf_counter_ns() - start
        total += elapsed
        longest = max(longest, elapsed)
    return total / steps / 1e3, longest / 1e3


def compare_drafts(implementations: Sequence[Implementation], result: Measurement) -> None:
    """Runs some untimed steps of each implementation, in which numba compiles, and compares the
    drafts.

    Raises:
        BenchError: Implementations with equal semantics return different drafts.
    """
    expected: dict[Hashable, tuple[str, list[Drafts]]] = {}
    for implementation in implementations:
        implementation.activate()
        drafts = []
        for step in range(_CHECKED_STEPS):
            arguments = implementation.get_arguments(step)
            drafts.append(implementation.get_drafts(implementation.function(*arguments)))
        implementation.reset()
        if implementation.semantics is None:
            continue
        if implementation is implementations[0]:
            has_draft = [bool(draft) for step_drafts in drafts for draft in step_drafts]
            result.drafted_share = sum(has_draft) / len(has_draft)
        name, first_drafts = expected.setdefault(
            implementation.semantics, (implementation.name, drafts)
        )
        if drafts != first_drafts:
            raise BenchError(f"{implementation.name} and {name}: expected the same drafts")
        if implementation.name != name:
            result.same_drafts = True


def _choose_steps(implementations: Sequence[Implementation], options: Options) -> int:
    """Returns the number of steps with which the slowest turn takes about `_TURN_SECONDS`."""
    longest_seconds = 0.0
    for implementation in implementations:
        implementation.activate()
        arguments = implementation.get_arguments(0)
        start = time.perf_counter()
        implementation.function(*arguments)
        longest_seconds = max(longest_seconds, time.perf_counter() - start)
        implementation.reset()
    evict_seconds = CACHE_STATES[options.cache] / 10e9  # other memory is read at about 10 GB/s
    steps = int(_TURN_SECONDS / max(longest_seconds + evict_seconds, 1e-9))
    return max(_MIN_STEPS, min(_MAX_STEPS, steps))


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def compute_spread(sample: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 10th and the 90th percentile."""
    values = np.percentile(np.asarray(sample, dtype=np.float64), [50, 10, 90])
    return dict(zip(("median", "p10", "p90"), map(round_digits, values), strict=True))


def compute_median_interval(sample: Sequence[float]) -> dict[str, float]:
    """Returns the median and its confidence interval: the narrowest pair of order statistics
    that contains the median of any distribution in at least 95 % of the cases.

    Raises:
        ValueError: There are fewer than 6 values, for which no such pair exists.
    """
    values, n = sorted(sample), len(sample)
    if n < 6:
        raise ValueError(f"compute_median_interval: sample: expected at least 6 values, got {n}")
    rank = 0  # of both ends of the interval, each counted from the nearer end of the values
    while 2 * sum(math.comb(n, i) for i in range(rank + 1)) <= 0.05 * 2**n:
        rank += 1
    median = float(np.median(values))
    low, high = values[rank - 1], values[n - rank]
    return dict(zip(("median", "low", "high"), map(round_digits, (median, low, high)), strict=True))


def compute_ratios(peer_us: Sequence[float], ours_us: Sequence[float]) -> dict[str, float]:
    """Returns the spread of the peer's times divided by ours, round by round. Both times of a round
    were measured close together, so a slowdown of the machine hardly affects their ratio."""
    return compute_spread([peer / ours for peer, ours in zip(peer_us, ours_us, strict=True)])


def make_result(
    workload: Workload,
    options: Options,
    details: Mapping[str, str],
    measurement: Measurement,
) -> dict[str, Any]:
    """Returns the entry of one size in the results file.

    Args:
        details: Descriptions by implementation, ours first.
    """
    ours, *peers = details
    rounds_us = measurement.rounds_us
    figures = {}
    for name, detail in details.items():
        figures[name] = {f"{key}_us": us for key, us in compute_spread(rounds_us[name]).items()}
        figures[name] |= {"what": detail}  # type: ignore[dict-item]
        if name in measurement.worst_us:
            figures[name]["worst_step_us"] = round_digits(measurement.worst_us[name])
    peer_ratios = {peer: compute_ratios(rounds_us[peer], rounds_us[ours]) for peer in peers}
    return {
        "size": str(workload.size),
        "batch": workload.size.batch,
        "context": workload.size.context,
        "cache": options.cache,
        "frontend": options.frontend,
        "engine": options.engine,
        "data": workload.description,
        "disturbed_rounds": measurement.disturbed_rounds,
        "steps_per_round": measurement.steps,
        "drafted_share": measurement.drafted_share,
        "same_drafts": measurement.same_drafts,
        "ours": figures.pop(ours),
        "peers": figures,
        "ratio": {peer: ratio.pop("median") for peer, ratio in peer_ratios.items()},
        "ratio_spread": peer_ratios,
    }
