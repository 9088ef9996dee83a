"""The running loop is lossless, whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_state.engine import run
from async_state.scenario import DEVICES, Scenario
from tools.verify.async_proof import FIRST_SEED, prove

_SHARES = 8
_PER_SHARE = 50


@pytest.mark.parametrize("share", range(_SHARES))
def test_seeded_scenarios(share: int) -> None:
    for number in range(share * _PER_SHARE, (share + 1) * _PER_SHARE):
        seed, device = FIRST_SEED + number, DEVICES[number % len(DEVICES)]
        try:
            run(Scenario(random.Random(seed), device))
        except Exception as error:
            raise AssertionError(f"scenario {number} (seed {seed}, device {device})") from error


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), device=st.sampled_from(DEVICES))
def test_drawn_scenarios(rng: random.Random, device: str) -> None:
    run(Scenario(rng, device))


def test_the_scenarios_are_not_idle() -> None:
    """All events occur in the scenarios."""
    result = prove(60)
    assert result["lossless"] == 60
    for figure in (
        "readmissions",
        "moves",
        "discarded",
        "padded",
        "accepted",
        "rejected",
        "indexed",
    ):
        assert result["totals"][figure] > 50, figure
    for figure in (
        "empty", "rebuilt", "bad samples", "neural drafts", "n-grams instead", "n-grams behind",
    ):  # fmt: skip
        assert result["totals"][figure] > 0, figure


@pytest.mark.parametrize("drafting", ["padded", "trimmed"])
def test_padded_and_unpadded_drafter_batches_lead_to_the_same_tokens(drafting: str) -> None:
    for seed in range(20):
        outputs = []
        for unpadded in (False, True):
            scenario = Scenario(random.Random(seed), "cpu", drafting=drafting, unpadded=unpadded)
            run(scenario)
            outputs.append([r.tokens for r in scenario.requests])
        assert outputs[0] == outputs[1]
