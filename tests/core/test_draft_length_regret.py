"""Simulates an engine whose draft lengths a controller chooses, with changing step times and
acceptance, and bounds its regret: what is missing of the tokens per second of the best of the
captured lengths."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean

import pytest
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
Distort = Callable[[random.Random, int, int], float]
"""Returns the factor by which the measured time of a step with a draft length differs from the
expected one, given the number of the step and the length."""


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
    distort: Distort = lambda rng, step, length: 1.0,
) -> list[Step]:
    """Runs a controller."""
    rng = random.Random(seed)
    controller, requests = DraftLengthController(LENGTHS, batch), Requests(batch, rng)
    length = previous_length = 0
    steps = []
    for number in range(num_steps):
        share = compute_share(get_tokens(number))
        counts = requests.verify(length, share)
        all_tokens = [compute_tokens(share, k) for k in LENGTHS]
        all_seconds = [get_time(number, k) for k in LENGTHS]
        index = LENGTHS.index(length)
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


def make_noise(deviation: float) -> Distort:
    return lambda rng, step, length: math.exp(rng.gauss(0, deviation))


def make_outliers(factor: float) -> Distort:
    """Makes two of 100 steps slower by `factor`."""
    return lambda rng, step, length: factor if rng.random() < 0.02 else rng.uniform(0.95, 1.05)


def make_slow_bursts() -> Distort:
    """Makes 5 to 25 steps in a row two to six times slower, about every 400 steps."""
    end = -1

    def distort(rng: random.Random, step: int, length: int) -> float:
        nonlocal end
        if step >= end and rng.random() < 1 / 400:
            end = step + rng.randrange(5, 26)
        return rng.uniform(2, 6) if step < end else rng.uniform(0.95, 1.05)

    return distort


def make_slow_trials(num_steps: int) -> Distort:
    """Makes the first steps of each length above 0 three times slower."""
    counts: dict[int, int] = {}

    def distort(rng: random.Random, step: int, length: int) -> float:
        counts[length] = counts.get(length, 0) + 1
        is_slow = length > 0 and counts[length] <= num_steps
        return (3.0 if is_slow else 1.0) * rng.uniform(0.95, 1.05)

    return distort


MAX_REGRET = 0.05
RECOVERY_STEPS = {1: 2000, 4: 1000} | dict.fromkeys((8, 16, 32, 64), 500)
"""By batch size, the number of steps after which the regret of a change must be low."""
DISTORTIONS: dict[str, Callable[[], Distort]] = {
    "little noise": lambda: make_noise(0.03),
    "noise": lambda: make_noise(0.2),
    "outliers": lambda: make_outliers(100),
    "slow bursts": make_slow_bursts,
    "slow first trials": lambda: make_slow_trials(8),
}


def compute_mean_regret(
    batch: int,
    get_time: GetTime,
    get_tokens: GetTokens,
    change_steps: list[int],
    num_steps: int,
    distortion: str = "little noise",
) -> float:
    """Returns the mean regret of two runs, without the steps of the recovery after each change."""
    regrets = []
    for seed in range(2):
        distort = DISTORTIONS[distortion]()
        steps = simulate(batch, num_steps, get_time, get_tokens, seed=seed, distort=distort)
        for change, end in zip(change_steps, [*change_steps[1:], num_steps], strict=True):
            regrets.append(compute_regret(steps[change + RECOVERY_STEPS[batch] : end]))
    return mean(regrets)


def alternate(values: tuple[float, float], period: int) -> GetTokens:
    return lambda step: values[step // period % 2]


@pytest.mark.parametrize("model", THIRD_PARTY_GAINS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tokens", [1.05, 1.86, 3.5])
def test_regret_is_low_at_constant_acceptance(model: str, batch: int, tokens: float) -> None:
    get_time, start = make_third_party_time(model, batch), RECOVERY_STEPS[batch]
    steps = simulate(batch, start + 1500, get_time, lambda step: tokens)
    assert compute_regret(steps[start:]) <= 0.04


@pytest.mark.slow
@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_after_each_change_of_acceptance(distortion: str, batch: int) -> None:
    period = RECOVERY_STEPS[batch] + 1000
    get_time, get_tokens = make_third_party_time("4B", batch), alternate((3.0, 1.05), period)
    changes = [*range(0, 4 * period, period)]
    regret = compute_mean_regret(batch, get_time, get_tokens, changes, 4 * period, distortion)
    assert regret <= MAX_REGRET


# Number of steps before the change, seconds of a step (given its number, its draft length and the
# seconds on a GPU of a third party), and expected tokens per step with five draft tokens.
CHANGES: dict[str, tuple[int, Callable[[int, int, float], float], GetTokens]] = {
    "drafts pay again": (5000, lambda n, k, s: s, lambda n: 1.05 if n < 5000 else 2.5),
    "drafts are faster": (
        5000,
        lambda n, k, s: 0.01 * (1 + (0.3 if n < 5000 else 0.02) * k),
        lambda n: 1.6,
    ),
    "drafts are slower": (
        5000,
        lambda n, k, s: 0.01 * (1 + (0.02 if n < 5000 else 0.3) * k),
        lambda n: 1.6,
    ),
    "all times drift": (
        4000,
        lambda n, k, s: (1 + 0.5 * math.sin(n / 500)) * s,
        alternate((1.05, 3.0), 4000),
    ),
    "a store fills": (3000, lambda n, k, s: s, lambda n: 1.1 + 0.01 * min(240, n // 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_after_a_change(name: str, batch: int) -> None:
    change, change_time, get_tokens = CHANGES[name]
    get_seconds = make_third_party_time("4B", batch)
    get_time: GetTime = lambda n, k: change_time(n, k, get_seconds(n, k))  # noqa: E731
    num_steps = change + RECOVERY_STEPS[batch] + 2000
    assert compute_mean_regret(batch, get_time, get_tokens, [0, change], num_steps) <= MAX_REGRET


@pytest.mark.slow
@pytest.mark.parametrize("distortion", ["little noise", "slow bursts"])
@pytest.mark.parametrize("period", [200, 1000])
@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_when_acceptance_changes_faster_than_it_can_be_followed(
    distortion: str, period: int, batch: int
) -> None:
    """The best constant length is the reference."""
    get_time, get_tokens = make_third_party_time("4B", batch), alternate((1.05, 3.0), period)
    regret = compute_mean_regret(batch, get_time, get_tokens, [0], 6000, distortion)
    assert regret <= MAX_REGRET


def test_losses_of_a_length_that_never_pays_are_limited() -> None:
    """Two lengths may lose 1.25 % each."""
    get_time: GetTime = lambda step, length: 0.01 * (1 + 0.5 * length)  # noqa: E731
    regret = compute_mean_regret(64, get_time, lambda step: 1.04, [0], 6000)
    assert 0.01 <= regret <= 0.026
