"""Rounds in which contestants take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.options import CACHE_STATES, Options
from tools.bench.stats import Agreement, Drafts, drafted_share

_MIN_STEPS, _MAX_STEPS = 3, 50
_TURN_SECONDS = 0.03
_CHECKED_STEPS = 4
_CALM = 0.01
_MOST_ROUNDS = 5


class Contestant:
    """One way of doing a step's work; the base class does nothing and counts as ready.

    The harness times only the call ``function(*arguments(step))``, not the making of its arguments.
    The steps of a lap come in order, each once, so a contestant may keep state from one to the
    next. The results of calls are dropped, except in the warm-up.

    Attributes:
        name: short, the key in results.
        detail: what exactly it is, for the record.
        function: the timed function.
        captured: whether a GPU replays its steps as a graph.
        semantics: contestants with equal semantics must draft the same; None: it does not draft.
    """

    name: str = ""
    detail: str = ""
    function: Callable[..., Any]
    captured: bool = True
    semantics: tuple[Any, ...] | None = None

    def activate(self) -> None:
        """Called before its turn in a round; sets what other contestants change too."""

    def reset(self) -> None:
        """Goes back to the workload's base lengths, before step 0 of a lap."""

    def arguments(self, step: int) -> tuple[Any, ...]:
        """The arguments of ``function`` in this step."""
        return ()

    def drafts(self, result: Any) -> Drafts:
        """The drafts in a result, each without its unused places."""
        return []


@dataclass
class Measurement:
    """Raw figures: per contestant, microseconds per step in each round."""

    rounds_us: dict[str, list[float]] = field(default_factory=dict)
    worst_us: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    same_drafts: bool | None = None
    """Whether contestants of equal semantics drafted alike in the warm-up; None: nothing to
    compare."""
    disturbed_rounds: int | None = None
    """Rounds among these in which the process waited noticeably for a core; None: not known."""
    drafted_share: float | None = None
    """Share of requests for which ours drafted anything in the warm-up."""


@dataclass
class _Round:
    turns: dict[str, tuple[float, float]] = field(default_factory=dict)
    disturbance: float = 0.0
    """The largest share of a turn's time that was spent waiting for a core."""

    @property
    def calm(self) -> bool:
        return self.disturbance <= _CALM


def waited_ns() -> int:
    """How long the threads of this process have been ready to run without a core to run on; 0
    if the system does not report it."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended
    return total


class Spoiler:
    """Reads other memory to put the caches into the requested state, and lets the cores idle."""

    def __init__(self, cache: str, idle_ms: float) -> None:
        # Ones, not zeros: untouched pages all map to one page of zeros, which evicts nothing.
        self._other = np.ones(CACHE_STATES[cache] // 8, np.int64)
        self._idle = idle_ms / 1e3

    def __call__(self) -> None:
        if self._idle:
            time.sleep(self._idle)
        if self._other.size:
            self._other.max()


def measure(contestants: Sequence[Contestant], lap: int, options: Options) -> Measurement:
    """Measures the contestants, ours first in the list.

    In each round all of them do the same steps, one contestant after the other; the first one
    changes from round to round. The first step of a turn is not timed: it loads the contestant's
    data and code into the caches (a cold state evicts the data again after it).

    A round in which this process had to wait for a core measures the machine's other work, and
    distorts the slower contestant's time more. Such rounds are repeated, up to a limit; then the
    calmest rounds count, and the result says how many of them were disturbed.

    Args:
        lap: steps of the workload; at its end all go back to the base lengths, untimed.
    """
    result = Measurement()
    for contestant in contestants:
        contestant.activate()
        contestant.reset()
    check(contestants, result)
    steps = options.steps or _choose_steps(contestants, options)
    result.steps = steps = min(steps, lap - 1)
    spoil = Spoiler(options.cache, options.idle_ms)
    at = lap  # the first round begins with a reset
    rounds: list[_Round] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(-1, _MOST_ROUNDS * options.rounds):  # one more in front, to warm up
            if sum(r.calm for r in rounds) == options.rounds:
                break
            if at + steps + 1 > lap:
                at = 0
                for contestant in contestants:
                    contestant.reset()
            first = number % len(contestants)
            now = _Round()
            for contestant in [*contestants[first:], *contestants[:first]]:
                start, waiting = time.perf_counter_ns(), waited_ns()
                now.turns[contestant.name] = _turn(contestant, at, steps, spoil)
                taken = time.perf_counter_ns() - start
                share = (waited_ns() - waiting) / max(taken, 1)
                now.disturbance = max(now.disturbance, share)
            if number >= 0:
                rounds.append(now)
            at += steps + 1
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    kept = sorted(rounds, key=lambda r: r.disturbance)[: options.rounds]
    result.disturbed_rounds = sum(not r.calm for r in kept)
    for contestant in contestants:
        turns = [r.turns[contestant.name] for r in kept]
        result.rounds_us[contestant.name] = [mean for mean, _ in turns]
        result.worst_us[contestant.name] = max(worst for _, worst in turns)
    return result


def _turn(contestant: Contestant, at: int, steps: int, spoil: Spoiler) -> tuple[float, float]:
    """Mean and longest microseconds of the steps after the first."""
    contestant.activate()
    contestant.function(*contestant.arguments(at))
    function = contestant.function
    total = longest = 0
    for step in range(at + 1, at + steps + 1):
        arguments = contestant.arguments(step)
        spoil()
        start = time.perf_counter_ns()
        function(*arguments)
        elapsed = time.perf_counter_ns() - start
        total += elapsed
        longest = max(longest, elapsed)
    return total / steps / 1e3, longest / 1e3


def check(contestants: Sequence[Contestant], result: Measurement) -> None:
    """Runs a few untimed steps of all (numba compiles here) and compares their drafts."""
    agreement = Agreement()
    for contestant in contestants:
        contestant.activate()
        made = [
            contestant.drafts(contestant.function(*contestant.arguments(step)))
            for step in range(_CHECKED_STEPS)
        ]
        contestant.reset()
        if contestant.semantics is None:
            continue
        if contestant is contestants[0]:
            result.drafted_share = drafted_share(made)
        agreement.add(contestant.name, contestant.semantics, made)
    result.same_drafts = agreement.same


def _choose_steps(contestants: Sequence[Contestant], options: Options) -> int:
    """As many as make the slowest contestant's turn take a few hundredths of a second."""
    slowest = 0.0
    for contestant in contestants:
        contestant.activate()
        arguments = contestant.arguments(0)
        start = time.perf_counter()
        contestant.function(*arguments)
        slowest = max(slowest, time.perf_counter() - start)
        contestant.reset()
    extra = CACHE_STATES[options.cache] / 10e9 + options.idle_ms / 1e3
    wanted = int(_TURN_SECONDS / max(slowest + extra, 1e-9))
    return max(_MIN_STEPS, min(_MAX_STEPS, wanted))
