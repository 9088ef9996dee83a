"""Tests drafts from a draft model and from n-grams together: the text does not change, and the
number of steps stays close to that of the better drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu import NgramConfig
from ngram_npu.async_state import MergeConfig

pytest.importorskip("transformers")

from runner import workload
from runner.workload import Reference, make_prompts, make_runner

from examples.runner import Sampling

WITHOUT_NGRAM_DRAFTS = NgramConfig(k=4, max_len=0)
"""A lookup that never drafts."""


@pytest.mark.parametrize(
    ("quality", "changes"),
    [
        ("good", {}),
        ("bad", {}),
        ("bad", {"asynchronous": False, "padded": False}),
        ("bad", {"ngram": workload.NGRAM_BY_COST}),
        ("good", {"store": True}),
        ("bad", {"merge": MergeConfig(min_match_len=3, extend=True)}),
        ("good", {"ngram": WITHOUT_NGRAM_DRAFTS}),
    ],
    ids=["good", "bad", "bad unpadded", "bad by cost", "good store", "bad extend", "only good"],
)
def test_greedy_text_with_draft_model_equals_transformers(
    model: Any, draft_models: Any, greedy_run: Reference, quality: str, changes: Any
) -> None:
    changes = {"draft_model": draft_models[quality], **changes}
    texts, figures = workload.generate_small_batch(model, greedy_run.stops, **changes)
    assert texts == greedy_run.texts[: workload.SMALL_BATCH]
    assert figures.preemptions > 0
    assert figures.neural_accepted <= figures.neural_drafts <= figures.drafts
    if quality == "good":
        assert figures.neural_accepted > figures.neural_drafts / 2 > 50
    if changes.get("ngram") is WITHOUT_NGRAM_DRAFTS:
        assert figures.drafts == figures.neural_drafts
        assert figures.accepted == figures.neural_accepted
    elif quality == "bad":
        assert figures.drafts - figures.neural_drafts > 50


def test_sampled_text_with_draft_model_equals_text_without_speculation(
    model: Any, draft_models: Any, sampled_run: Reference
) -> None:
    changes = {"draft_model": draft_models["good"], "sampling": Sampling(0.8, seed=7)}
    texts, figures = workload.generate_small_batch(model, sampled_run.stops, **changes)
    assert texts == sampled_run.texts
    assert figures.neural_accepted > 50


@pytest.mark.parametrize(
    ("quality", "window", "max_ratio"),
    [
        ("good", 64, 1.05),  # n-grams do not help: about as many steps as with only the draft model
        # The draft model does not read early text, so n-grams save steps.
        pytest.param("good", 3, 0.95, marks=pytest.mark.slow),
        ("bad", 64, 1.25),  # each request needs some steps to measure that the model is useless
    ],
)
def test_step_count_with_both_drafters_is_within_limit_of_better_drafter(
    model: Any, draft_models: Any, quality: str, window: int, max_ratio: float
) -> None:
    neural = {"draft_model": draft_models[quality], "draft_window": window}
    step_counts = []
    for changes in ({}, {**neural, "ngram": WITHOUT_NGRAM_DRAFTS}, neural):
        changes |= {"asynchronous": False, "row_capacity": 200, "num_blocks": 300}
        runner = make_runner(model, **changes)
        runner.generate(make_prompts(8), 80)
        step_counts.append(runner.figures.steps)
    assert step_counts[2] <= max_ratio * min(step_counts[:2])


def test_draft_model_that_cannot_draft_is_rejected(model: Any, draft_models: Any) -> None:
    """The runner has no speculation, or the draft model has another vocabulary."""
    with pytest.raises(ValueError, match="draft_model: expected None without speculation"):
        make_runner(model, ngram=None, draft_model=draft_models["good"])
    other_model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=64))
    with pytest.raises(ValueError, match="vocabulary of 128 tokens, got 64"):
        make_runner(model, draft_model=other_model)
