"""Simulates an engine whose draft lengths a controller chooses, and computes the regret."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ngram_npu.draft_length import DraftLengthController

LENGTHS = (0, 3, 5)
BATCHES = (1, 4, 8, 16, 32, 64)
THIRD_PARTY_GAINS = {
    "4B": (1.19, 1.00, 0.90, 0.74, 0.59, 0.44),
    "27B": (1.62, 1.40, 1.33, 1.07, 0.80, 0.50),
}
"""Tokens per second with five draft tokens over those without drafts at 1.86 tokens per step, as
another project published them for two models and `BATCHES`."""
REPEATING, OTHER = 0.88, 0.03
"""Probability that a draft token is accepted, in text that repeats and in other text."""
STAY_STEPS = 8
"""Mean number of steps of a request until it may begin or end to repeat."""

GetTime = Callable[[int, int], float]
"""Returns the seconds of a step with a draft length, given the number of the step."""
GetTokens = Callable[[int], float]
"""Returns the expected tokens per step with five draft tokens, given the number of the step."""


def make_third_party_time(model: str, batch: int) -> GetTime:
    gain = THIRD_PARTY_GAINS[model][BATCHES.index(batch)]
    return lambda step, length: 0.01 * (1 + (1.86 / gain - 1) * length / 5)


def _sum_powers(probability: float, length: int) -> float:
    return sum(probability**i for i in range(length + 1))


@functools.lru_cache(1024)
def compute_share(tokens: float) -> float:
    """Returns the share of repeating text with which a step with five drafts makes `tokens`."""
    lowest, highest = _sum_powers(OTHER, 5), _sum_powers(REPEATING, 5)
    return (tokens - lowest) / (highest - lowest)


@functools.lru_cache(1024)
def compute_tokens(share: float, length: int) -> float:
    """Returns the expected tokens per step of a request."""
    return share * _sum_powers(REPEATING, length) + (1 - share) * _sum_powers(OTHER, length)


class Requests:
    """Requests whose text repeats itself now and then, so that successive steps are alike."""

    def __init__(self, batch: int, rng: random.Random) -> None:
        self._rng = rng
        self._is_repeating = [False] * batch

    def verify(self, length: int, share: float) -> list[int]:
        """Returns by number of accepted tokens the number of requests of a step."""
        rng, counts = self._rng, [0] * (length + 1)
        for i in range(len(self._is_repeating)):
            if rng.random() < 1 / STAY_STEPS:
                self._is_repeating[i] = rng.random() < share
            probability = REPEATING if self._is_repeating[i] else OTHER
            num_accepted = 0
            while num_accepted < length and rng.random() < probability:
                num_accepted += 1
            counts[num_accepted] += 1
        return counts


@dataclass
class Step:
    """Expected tokens per request and time of a step: of the length that it used, and of all."""

    length: int
    tokens: float
    seconds: float
    all_tokens: list[float]
    all_seconds: list[float]


def simulate(
    batch: int,
    num_steps: int,
    get_time: GetTime,
    get_tokens: GetTokens,
    *,
    seed: int = 0,
    distort: Callable[[random.Random, int, int], float] = lambda rng, step, length: 1.0,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Step]:
    """Runs a controller.

    Args:
        distort: Returns the factor by which the measured time of a step with a draft length differs
            from the expected one.
    """
    rng = random.Random(seed)
    controller, requests = DraftLengthController(lengths, batch), Requests(batch, rng)
    length = previous_length = 0
    steps = []
    for number in range(num_steps):
        share = compute_share(get_tokens(number))
        counts = requests.verify(length, share)
        all_tokens = [compute_tokens(share, k) for k in lengths]
        all_seconds = [get_time(number, k) for k in lengths]
        index = lengths.index(length)
        expected = all_seconds[index]
        steps.append(Step(length, all_tokens[index], expected, all_tokens, all_seconds))
        measured = expected * distort(rng, number, length)
        next_length = controller.table[batch]
        controller.observe_schedule(batch)
        controller.acceptance.observe(batch, counts if length else ())
        controller.observe_step(batch, length, measured if length == previous_length else None)
        previous_length, length = length, next_length
    return steps


def compute_regret(steps: Iterable[Step]) -> float:
    """Returns the share of the tokens per second of the best constant length that is missing."""
    steps = list(steps)
    goodput = sum(s.tokens for s in steps) / sum(s.seconds for s in steps)
    best = max(
        sum(s.all_tokens[i] for s in steps) / sum(s.all_seconds[i] for s in steps)
        for i in range(len(steps[0].all_tokens))
    )
    return 1 - goodput / best


def make_noise(deviation: float) -> Any:
    return lambda rng, step, length: math.exp(rng.gauss(0, deviation))


def make_outliers(factor: float) -> Any:
    """Makes two of 100 steps slower by `factor`."""
    return lambda rng, step, length: factor if rng.random() < 0.02 else rng.uniform(0.95, 1.05)


def make_slow_bursts() -> Any:
    """Makes 5 to 25 steps in a row two to six times slower, about every 400 steps."""
    end = -1

    def distort(rng: random.Random, step: int, length: int) -> float:
        nonlocal end
        if step >= end and rng.random() < 1 / 400:
            end = step + rng.randrange(5, 26)
        return rng.uniform(2, 6) if step < end else rng.uniform(0.95, 1.05)

    return distort


def make_slow_trials(num_steps: int) -> Any:
    """Makes the first steps of each length above 0 three times slower."""
    counts: dict[int, int] = {}

    def distort(rng: random.Random, step: int, length: int) -> float:
        counts[length] = counts.get(length, 0) + 1
        is_slow = length > 0 and counts[length] <= num_steps
        return (3.0 if is_slow else 1.0) * rng.uniform(0.95, 1.05)

    return distort
