"""The running loop is lossless, whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_state.async_proof import prove
from async_state.engine import run
from async_state.scenario import DEVICES, Scenario

QUICK = 100
"""Of the seeded scenarios, so many notice every fault (test_faults.py)."""
_SLOW = [pytest.param(first, marks=pytest.mark.slow) for first in (100, 200, 300)]


@pytest.mark.parametrize("first", [0, *_SLOW])
def test_seeded_scenarios(first: int) -> None:
    """Lossless, and not idle: all events occur. `run(scenario(number))` repeats a failed one."""
    result = prove(QUICK, first)
    assert not result["failed"]
    for figure in (
        "readmissions", "moves", "discarded", "padded", "accepted", "rejected", "indexed",
    ):  # fmt: skip
        assert result["totals"][figure] > 50, figure
    for figure in (
        "empty", "rebuilt", "bad samples", "neural drafts", "n-grams instead", "n-grams behind",
    ):  # fmt: skip
        assert result["totals"][figure] > 0, figure


@settings(max_examples=30)
@given(rng=st.randoms(use_true_random=False), device=st.sampled_from(DEVICES))
def test_drawn_scenarios(rng: random.Random, device: str) -> None:
    run(Scenario(rng, device))
