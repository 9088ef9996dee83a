"""Simulates the controller with changing step times and acceptance, and bounds its regret: what is
missing of the tokens per second of the best of the captured lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from draft_length_simulation import (
    BATCHES,
    THIRD_PARTY_GAINS,
    GetTime,
    GetTokens,
    compute_regret,
    make_noise,
    make_outliers,
    make_slow_bursts,
    make_slow_trials,
    make_third_party_time,
    simulate,
)

MAX_REGRET = 0.05
RECOVERY_STEPS = {1: 2000, 4: 1000} | dict.fromkeys((8, 16, 32, 64), 500)
"""By batch size, the number of steps after which the regret of a change must be low."""
DISTORTIONS: dict[str, Callable[[], Any]] = {
    "constant": lambda: make_noise(0.0),
    "noise": lambda: make_noise(0.2),
    "outliers x10": lambda: make_outliers(10),
    "outliers x100": lambda: make_outliers(100),
    "slow bursts": make_slow_bursts,
}


def compute_mean_regret(
    batch: int,
    get_time: GetTime,
    get_tokens: GetTokens,
    change_steps: list[int],
    num_steps: int,
    make_distortion: Callable[[], Any] = lambda: make_noise(0.03),
    seeds: int = 2,
) -> float:
    """Returns the mean regret, without the steps of the recovery after each change."""
    regrets = []
    for seed in range(seeds):
        distort = make_distortion()
        steps = simulate(batch, num_steps, get_time, get_tokens, seed=seed, distort=distort)
        for change, end in zip(change_steps, [*change_steps[1:], num_steps], strict=True):
            regrets.append(compute_regret(steps[change + RECOVERY_STEPS[batch] : end]))
    regret = mean(regrets)
    print(f"regret: {regret:.3f}, at most {max(regrets):.3f}")
    return regret


def alternate(values: tuple[float, float], period: int) -> GetTokens:
    return lambda step: values[step // period % 2]


@pytest.mark.parametrize("model", THIRD_PARTY_GAINS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tokens", [1.05, 1.86, 3.5])
def test_regret_is_low_at_constant_acceptance(model: str, batch: int, tokens: float) -> None:
    get_time = make_third_party_time(model, batch)
    regret = compute_mean_regret(
        batch, get_time, lambda step: tokens, [0], RECOVERY_STEPS[batch] + 1500, seeds=1
    )
    assert regret <= 0.04


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_after_each_change_of_acceptance(distortion: str, batch: int) -> None:
    period = RECOVERY_STEPS[batch] + 1000
    regret = compute_mean_regret(
        batch,
        make_third_party_time("4B", batch),
        alternate((1.05, 3.0), period),
        [*range(0, 4 * period, period)],
        4 * period,
        DISTORTIONS[distortion],
    )
    assert regret <= MAX_REGRET


@pytest.mark.parametrize("period", [200, 1000])
@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_when_acceptance_changes_faster_than_it_can_be_followed(
    period: int, batch: int
) -> None:
    """The best constant length is the reference."""
    get_time, get_tokens = make_third_party_time("4B", batch), alternate((1.05, 3.0), period)
    for distortion in ("constant", "slow bursts"):
        regret = compute_mean_regret(
            batch, get_time, get_tokens, [0], 6000, DISTORTIONS[distortion], seeds=1
        )
        assert regret <= MAX_REGRET


@pytest.mark.parametrize(("batch", "phase"), [(1, 5000), (4, 5000), (8, 5000), (8, 20_000)])
def test_controller_returns_after_a_phase_in_which_no_drafts_were_best(
    batch: int, phase: int
) -> None:
    regret = compute_mean_regret(
        batch,
        make_third_party_time("4B", batch),
        lambda step: 1.05 if step < phase else 2.5,
        [0, phase],
        phase + RECOVERY_STEPS[batch] + 1000,
        seeds=1,
    )
    assert regret <= MAX_REGRET


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("num_slow_steps", [4, 8])
def test_slow_first_trials_do_not_block_the_best_length(batch: int, num_slow_steps: int) -> None:
    """The first steps with each length take three times too long, as in a compilation."""
    regret = compute_mean_regret(
        batch,
        make_third_party_time("27B", batch),
        lambda step: 2.5,
        [0],
        RECOVERY_STEPS[batch] + 1000,
        lambda: make_slow_trials(num_slow_steps),
    )
    assert regret <= MAX_REGRET


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("costs", [(0.3, 0.02), (0.02, 0.3)], ids=["faster", "slower"])
def test_regret_is_low_after_step_times_change(batch: int, costs: tuple[float, float]) -> None:
    regret = compute_mean_regret(
        batch,
        lambda step, length: 0.01 * (1 + costs[step >= 5000] * length),
        lambda step: 1.6,
        [0, 5000],
        5000 + RECOVERY_STEPS[batch] + 2000,
    )
    assert regret <= MAX_REGRET


@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_when_all_step_times_drift(batch: int) -> None:
    """All times change by a factor of three, as contexts grow and requests end."""
    get_time = make_third_party_time("4B", batch)
    regret = compute_mean_regret(
        batch,
        lambda step, length: (1 + 0.5 * math.sin(step / 500)) * get_time(step, length),
        alternate((1.05, 3.0), 4000),
        [0, 4000],
        8000,
    )
    assert regret <= MAX_REGRET


@pytest.mark.parametrize("batch", [1, 8])
def test_regret_is_low_while_a_store_fills(batch: int) -> None:
    """More and more tokens are accepted, and drafts begin to pay."""
    get_time, start = make_third_party_time("4B", batch), RECOVERY_STEPS[batch]
    steps = simulate(
        batch,
        start + 6000,
        get_time,
        lambda step: 1.1 + 0.01 * min(240, step // 20),
        distort=make_noise(0.05),
    )
    assert compute_regret(steps[start : start + 3000]) <= MAX_REGRET
    assert compute_regret(steps[start + 3000 :]) <= MAX_REGRET


def test_losses_of_a_length_that_never_pays_are_limited() -> None:
    """Two lengths may lose 1.25 % each."""
    get_time: GetTime = lambda step, length: 0.01 * (1 + 0.5 * length)  # noqa: E731
    regret = compute_mean_regret(64, get_time, lambda step: 1.04, [0], 6000, seeds=1)
    assert 0.01 <= regret <= 0.026
