"""A draft model with n-grams: the text does not change, and both together need fewer steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import MergeConfig

pytest.importorskip("transformers")

from runner import workload
from runner.workload import Reference, make_prompts, make_runner

from examples.runner import DraftModel, Sampling

NEURAL_ALONE = NgramConfig(k=4, max_len=0)
"""A lookup that never drafts."""


@pytest.mark.parametrize("which", ["good", "bad"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"asynchronous": False, "padded": False},
        {"engine": "index", "ngram": workload.LADDER},
        {"engine": "index", "ngram": workload.LIVE},
        {"merge": MergeConfig(min_match_len=3, extend=True)},
        {"ngram": NEURAL_ALONE},
    ],
    ids=["scan", "unpadded", "ladder", "live", "extend", "neural alone"],
)
def test_greedy_text_with_draft_model_equals_transformers(
    model: Any, draft_models: Any, greedy: Reference, which: str, changes: dict[str, Any]
) -> None:
    changes = {"draft_model": draft_models[which], **changes}
    texts, figures = workload.generate_few(model, greedy.stops, **changes)
    assert texts == greedy.texts[: workload.FEW]
    assert figures.preemptions > 0
    assert figures.neural_accepted <= figures.neural_drafts <= figures.drafts
    if which == "good":
        assert figures.neural_accepted > figures.neural_drafts / 2 > 50
    if changes.get("ngram") is NEURAL_ALONE:
        assert figures.drafts == figures.neural_drafts
        assert figures.accepted == figures.neural_accepted
    elif which == "bad":
        assert figures.drafts - figures.neural_drafts > 50


def test_sampled_text_with_draft_model_equals_no_speculation(
    model: Any, draft_models: Any, sampled: Reference
) -> None:
    changes = {"draft_model": draft_models["good"], "sampling": Sampling(0.8, seed=7)}
    texts, figures = workload.generate_few(model, sampled.stops, **changes)
    assert texts == sampled.texts
    assert figures.neural_accepted > 50


@pytest.mark.parametrize(
    ("which", "window", "limit"),
    [
        ("good", 64, 1.05),  # as few as with the draft model alone
        ("good", 3, 0.95),  # the draft model does not read early text, so n-grams add drafts
        ("bad", 64, 1.25),  # each request needs some steps to measure that the model is useless
    ],
)
def test_steps_with_both_drafters_within_limit_of_better_one(
    model: Any, draft_models: Any, which: str, window: int, limit: float
) -> None:
    neural = {"draft_model": draft_models[which], "draft_window": window}
    steps = []
    for changes in ({}, {**neural, "ngram": NEURAL_ALONE}, neural):
        changes |= {"asynchronous": False, "row_capacity": 200, "num_blocks": 300}
        runner = make_runner(model, **changes)
        runner.generate(make_prompts(8), 80)
        steps.append(runner.figures.steps)
    assert steps[2] <= limit * min(steps[:2])


def test_drafts_equal_greedy_continuation_of_window(draft_models: Any) -> None:
    """Rows that are shorter and longer than the window, one of them a single token."""
    model, width = draft_models["good"], 8
    rows = [make_prompts(1)[0][:n] for n in (1, 5, 8, 13)]
    token_ids = torch.full((len(rows), 16), 77, dtype=torch.int32)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    state: Any = SimpleNamespace(token_ids=token_ids, num_tokens_on_device=lengths)
    reverse = torch.arange(len(rows), dtype=torch.int32).flip(0)
    inputs: Any = SimpleNamespace(slot_indices=reverse)
    outputs: Any = None
    drafts = DraftModel(model, 3, window=width).draft(state, inputs, outputs).token_ids.tolist()
    for row, draft in zip(rows[::-1], drafts, strict=True):
        context = row[-width:]
        for token in draft:
            logits = model(torch.tensor([context])).logits[0, -1]
            assert token == int(logits.argmax())
            context = [*context, token]


def test_draft_model_that_does_not_fit_raises(model: Any, draft_models: Any) -> None:
    with pytest.raises(ValueError, match="draft_model: expected None without speculation"):
        make_runner(model, ngram=None, draft_model=draft_models["good"])
    other: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=64))
    with pytest.raises(ValueError, match="vocabulary of 128 tokens, got 64"):
        make_runner(model, draft_model=other)
