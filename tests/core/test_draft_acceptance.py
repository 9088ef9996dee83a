"""Tests the estimates of tokens per step."""

from __future__ import annotations

import math

import pytest
from ngram_npu.draft_acceptance import Acceptance


def test_tokens_without_drafts_are_one_and_others_unknown_before_a_verified_step() -> None:
    acceptance = Acceptance(5)
    acceptance.observe(8, ())
    assert acceptance.estimate_tokens_per_step(0) == 1.0
    assert acceptance.estimate_tokens_per_step(3) is None


def test_step_informs_all_lengths() -> None:
    acceptance = Acceptance(3)
    for _ in range(2000):
        acceptance.observe(64, [32, 16, 8, 8])  # 50 % accept a first token, and 50 % of these more
    tokens = [acceptance.estimate_tokens_per_step(length) for length in range(4)]
    assert tokens == pytest.approx([1, 1.5, 1.75, 1.875], rel=1e-3)


def test_unverified_positions_are_estimated_from_the_position_before() -> None:
    acceptance = Acceptance(4)
    for _ in range(2000):
        acceptance.observe(100, [20, 40, 40])  # 80 % accept a first token, half of them a second
    assert acceptance.estimate_tokens_per_step(2) == pytest.approx(2.2, rel=1e-3)
    assert acceptance.estimate_tokens_per_step(4) == pytest.approx(2.2 + 0.2 + 0.1, rel=1e-3)


def test_prior_of_a_later_position_has_the_weight_of_one_request() -> None:
    acceptance = Acceptance(2)
    acceptance.observe(4, [0, 4, 0])  # all accept a first token, none a second
    assert acceptance.estimate_tokens_per_step(2) == pytest.approx(1 + 1 + 1 * (0 + 1) / (4 + 1))


@pytest.mark.parametrize(("batch", "steps"), [(1, 500), (2, 250), (5, 100), (8, 64), (256, 64)])
@pytest.mark.parametrize("counts", [(), (1, 0)], ids=["without drafts", "with drafts"])
def test_weight_falls_to_one_over_e(batch: int, steps: int, counts: tuple[int, ...]) -> None:
    """Steps without drafts expire an observation as fast as steps with drafts."""
    acceptance = Acceptance(1)
    acceptance.observe(batch, [0, 1000])
    added = 0.0
    for _ in range(steps):
        acceptance.observe(batch, counts)
        added = added * math.exp(-1 / steps) + sum(counts)
    acceptance.observe(batch, [1000, 0])
    old, added = 1000 * math.exp(-1 - 1 / steps), added * math.exp(-1 / steps)
    expected = 1 + old / (old + added + 1000)
    assert acceptance.estimate_tokens_per_step(1) == pytest.approx(expected)


def test_estimate_is_kept_until_new_steps_outweigh_it() -> None:
    acceptance = Acceptance(5)
    acceptance.observe(8, [0, 0, 0, 0, 0, 8])
    for _ in range(5000):
        acceptance.observe(8, ())
    assert acceptance.estimate_tokens_per_step(1) == pytest.approx(2.0)
    acceptance.observe(8, [8, 0, 0, 0, 0, 0])
    assert acceptance.estimate_tokens_per_step(5) == pytest.approx(1.0, abs=1e-6)
