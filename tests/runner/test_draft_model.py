"""A draft model with n-grams: the text is the same, and each drafts where it is better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import MergeConfig, StepInputs, StepOutputs

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from examples.runner import DraftModel, Sampling
from runner import worlds

NEURAL_ALONE = NgramConfig(k=4, max_len=0)
"""A lookup that finds nothing."""


def _figures(model: Any, draft_model: Any, plain: worlds.Plain, **changes: Any) -> Any:
    """Of a run whose text is that without speculation."""
    runner = worlds.runner(model, draft_model=draft_model, **changes)
    asked = worlds.prompts(worlds.FEW)
    found = runner.generate(asked, worlds.NEW_TOKENS, stop_token_ids=plain.stops)
    assert found == plain.texts[: worlds.FEW]
    return runner.figures


@pytest.mark.parametrize("which", ["good", "bad"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"asynchronous": False, "padded": False},
        {"engine": "index", "ngram": worlds.LADDER},
        {"engine": "index", "ngram": worlds.LIVE},
        {"merge": MergeConfig(min_match_len=3, extend=True)},
        {"ngram": NEURAL_ALONE},
    ],
    ids=["scan", "unpadded", "ladder", "live", "extend", "neural alone"],
)
def test_greedy_text(
    model: Any, draft_models: Any, plain: worlds.Plain, which: str, changes: dict[str, Any]
) -> None:
    figures = _figures(model, draft_models[which], plain, **changes)
    assert figures.preemptions > 0
    assert figures.neural_accepted <= figures.neural_drafts <= figures.drafts
    if which == "good":
        assert figures.neural_accepted > figures.neural_drafts / 2 > 50
    if changes.get("ngram") is NEURAL_ALONE:
        assert (figures.drafts, figures.accepted) == (
            figures.neural_drafts,
            figures.neural_accepted,
        )
    elif which == "bad":
        assert figures.drafts - figures.neural_drafts > 50


def test_sampled_text(model: Any, draft_models: Any, sampled: worlds.Plain) -> None:
    figures = _figures(model, draft_models["good"], sampled, sampling=Sampling(0.8, seed=7))
    assert figures.neural_accepted > 50


def _steps(model: Any, **changes: Any) -> int:
    runner = worlds.runner(model, asynchronous=False, row_capacity=200, num_blocks=300, **changes)
    runner.generate(worlds.prompts(8), 80)
    found: int = runner.figures.steps
    return found


@pytest.fixture(scope="module")
def n_gram_steps(model: Any) -> int:
    return _steps(model)


@pytest.mark.parametrize(
    ("which", "window", "least"),
    [
        ("good", 64, 1.05),  # as good as the drafter alone
        ("good", 3, 0.95),  # the drafter forgets early text: each helps the other
        ("bad", 64, 1.25),  # each request first has to measure that it is useless
    ],
)
def test_steps_of_both_beside_the_better_one(
    model: Any, draft_models: Any, n_gram_steps: int, which: str, window: int, least: float
) -> None:
    changes = {"draft_model": draft_models[which], "draft_window": window}
    alone = n_gram_steps, _steps(model, ngram=NEURAL_ALONE, **changes)
    both = _steps(model, **changes)
    assert both <= least * min(alone), (both, alone)


def test_it_says_what_the_model_says(draft_models: Any) -> None:
    """Rows shorter and longer than the window, one of a single token."""
    model, width = draft_models["good"], 8
    rows = [worlds.prompts(1)[0][:n] for n in (1, 5, 8, 13)]
    drafter = DraftModel(model, 3, window=width)
    state, inputs, outputs = _state_of(rows)
    drafts = drafter.draft(state, inputs, outputs).token_ids.tolist()
    for row, draft in zip(rows[::-1], drafts, strict=True):
        seen = row[-width:]
        for token in draft:
            logits = model(torch.tensor([seen])).logits[0, -1]
            assert token == int(logits.argmax())
            seen = [*seen, token]


def _state_of(rows: list[list[int]]) -> tuple[Any, StepInputs, StepOutputs]:
    """The parts of a state that a drafter reads; the batch is in reverse slot order."""

    class State:
        token_ids = torch.full((len(rows), 16), 77, dtype=torch.int32)
        num_tokens_on_device = torch.tensor([len(row) for row in rows], dtype=torch.int32)

    class Inputs:
        slot_indices = torch.arange(len(rows), dtype=torch.int32).flip(0)

    for i, row in enumerate(rows):
        State.token_ids[i, : len(row)] = torch.tensor(row)
    inputs: Any = Inputs()
    outputs: Any = None
    return State(), inputs, outputs


def test_a_draft_model_that_does_not_fit(model: Any, draft_models: Any) -> None:
    with pytest.raises(ValueError, match="draft_model: expected None without speculation"):
        worlds.runner(model, ngram=None, draft_model=draft_models["good"])
    small = LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with pytest.raises(ValueError, match="vocabulary of 128 tokens, got 64"):
        worlds.runner(model, draft_model=LlamaForCausalLM(small))
