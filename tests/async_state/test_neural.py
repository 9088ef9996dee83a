"""Tests AsyncSpecState with a neural drafter, which test_simulation.py also tests in scenarios."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ngram_npu.async_state import AsyncSpecState, MergeConfig, NeuralDrafts

from async_state import admit_row, make_batch, make_samples, make_small_state, to_ints

PROMPT = to_ints(1, 2, 3, 1, 2)
NEURAL = [7, 8]


def make_drafter(*rows: list[int], **fields: Any) -> Any:
    return lambda outputs: NeuralDrafts(torch.tensor(rows, dtype=torch.int32), **fields)


def start_request(**changes: Any) -> AsyncSpecState:
    """Returns a state in a request's first step. If it samples 3, its n-gram draft is [1, 2]."""
    state = make_small_state(**{"merge": MergeConfig(), **changes})
    new = [admit_row(0, token_ids=PROMPT, block_ids=(to_ints(0, 1, 2),))]
    state.begin_step(make_batch([0], [5], [0], new=new))
    return state


@pytest.mark.parametrize(
    ("options", "expected", "source"), [({}, [1, -1], 1), ({"extend": True}, [1, 2], 3)]
)
def test_ngram_draft_extends_int64_neural_draft_only_with_extend(
    options: Any, expected: list[int], source: int
) -> None:
    state = start_request(merge=MergeConfig(min_match_len=9, **options))
    drafts = NeuralDrafts(torch.tensor([[1]]))
    outputs = state.end_step(make_samples(3), lambda outputs: drafts)
    assert outputs.draft_token_ids.dtype == torch.int32
    assert outputs.draft_token_ids.tolist() == [expected]
    sources = state.wait_drafts().draft_source
    assert sources is not None
    assert sources.tolist() == [source]


@pytest.mark.parametrize(
    ("config", "draft", "message"),
    [
        ({"merge": None}, make_drafter(NEURAL), "draft: expected None without AsyncConfig.merge"),
        ({}, None, "draft: expected a neural drafter, got None"),
        ({}, NEURAL, "draft: expected a callable, got list"),
    ],
)
def test_missing_or_unexpected_drafter_raises_without_change(
    config: Any, draft: Any, message: str
) -> None:
    state = start_request(**config)
    with pytest.raises(ValueError, match=f"end_step: {message}"):
        state.end_step(make_samples(3), draft)
    drafter = make_drafter(NEURAL) if state.config.merge is not None else None
    state.end_step(make_samples(3), drafter)
    assert state.reconcile().num_sampled.tolist() == [1]


def _raise_memory_error(outputs: Any) -> NeuralDrafts:
    raise MemoryError("out of memory")


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (
            make_drafter(NEURAL, NEURAL),
            ValueError,
            "merge_drafts_: ngram_draft_token_ids: .*2, 2",
        ),
        (make_drafter([7, 8, 9]), ValueError, "merge_drafts_: neural_draft_token_ids: .*got 3"),
        (lambda outputs: NEURAL, ValueError, "draft: expected NeuralDrafts, got list"),
        (_raise_memory_error, MemoryError, "out of memory"),
    ],
)
def test_state_after_failed_drafter_is_unusable_until_rebuilt(
    draft: Any, error: Any, message: str
) -> None:
    state = start_request()
    with pytest.raises(error, match=message):
        state.end_step(make_samples(3), draft)
    with pytest.raises(RuntimeError, match="call rebuild"):
        state.reconcile()
    state.rebuild([admit_row(0, token_ids=PROMPT, block_ids=(to_ints(0, 1, 2),))])
    state.begin_step(make_batch([0], [5], [0]))
    outputs = state.end_step(make_samples(3), make_drafter(NEURAL))
    assert outputs.draft_token_ids.tolist() == [NEURAL]


@pytest.mark.parametrize(
    "merge",
    [
        *({"min_match_len": value} for value in (-1, 1.5)),
        *({"min_accepted": value} for value in (-0.1, float("nan"), 32768)),
    ],
    ids=str,
)
def test_merge_config_with_invalid_value_raises(merge: Any) -> None:
    with pytest.raises(ValueError, match=f"MergeConfig: {next(iter(merge))}"):
        MergeConfig(**merge)
