"""A neural drafter beside the lookup, by hand; under random events: test_loop.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncSpecState, MergeConfig, NeuralDrafts

from async_state.small import admit, batch_of, ints, sampled_of, small_state

CHEAP = MergeConfig(match_costs=[1] * 16)
"""Each n-gram draft token promises 0.96 accepted ones."""
PROMPT = ints(1, 2, 3, 1, 2)
NEURAL = [7, 8]


def drafter(*rows: list[int], **more: Any) -> Any:
    return lambda outputs: NeuralDrafts(torch.tensor(rows, dtype=torch.int32), **more)


def started(**changes: Any) -> AsyncSpecState:
    """One request whose step has begun, and whose n-grams will be 1 2."""
    state = small_state(**{"merge": CHEAP, **changes})
    begin(state)
    return state


def begin(state: AsyncSpecState, **changes: Any) -> None:
    state.begin_step(
        batch_of(
            [0], [5], [0], new=[admit(0, token_ids=PROMPT, block_ids=(ints(0, 1, 2),))], **changes
        )
    )


def sources(state: AsyncSpecState) -> list[int]:
    found = state.wait_drafts().draft_source
    assert found is not None
    listed: list[int] = found.tolist()
    return listed


def test_n_grams_get_their_turn() -> None:
    """The neural drafter is trusted until the request has seen it fail."""
    state = started()
    outputs = state.end_step(sampled_of([3, -1, -1]), drafter(NEURAL))
    assert outputs.draft_token_ids.tolist() == [NEURAL]
    assert outputs.draft_source is not None
    assert outputs.draft_source.tolist() == sources(state) == [1]
    assert outputs.draft_costs is None
    state.reconcile()
    seen, verified = [], []
    for token in (1, 2, 3):  # both drafts rejected each time
        state.begin_step(batch_of([0], [3], [2]))
        state.end_step(sampled_of([token, -1, -1]), drafter(NEURAL))
        seen.append(sources(state)[0])
        truth = state.reconcile()
        assert truth.draft_source is not None
        verified += truth.draft_source.tolist()
        assert truth.num_valid_drafts.tolist() == [2]
    assert (verified, seen) == ([1, 2, 2], [2, 2, 2])


@pytest.mark.parametrize("counts", [[0], [1], [2], [-1], [9]])
def test_ragged_drafts(counts: list[int]) -> None:
    state = started(merge=MergeConfig(min_match_len=9))
    num_tokens = torch.tensor(counts, dtype=torch.int32)
    outputs = state.end_step(sampled_of([3, -1, -1]), drafter(NEURAL, num_tokens=num_tokens))
    given = min(max(counts[0], 0), 2)
    if given == 0:
        assert outputs.draft_token_ids.tolist() == [[1, 2]]
        assert sources(state) == [2]
    else:
        assert outputs.draft_token_ids.tolist() == [(NEURAL[:given] + [-1, -1])[:2]]
        assert outputs.num_draft_tokens.tolist() == [given]


def test_neural_ids_of_64_bits_and_their_continuation() -> None:
    state = started(merge=MergeConfig(min_match_len=9, extend=True))
    drafts = NeuralDrafts(torch.tensor([[1]]))
    outputs = state.end_step(sampled_of([3, -1, -1]), lambda outputs: drafts)
    assert outputs.draft_token_ids.dtype == torch.int32
    assert outputs.draft_token_ids.tolist() == [[1, 2]]
    assert sources(state) == [3]


@pytest.mark.parametrize("match_costs", [None, [255] * 16])
def test_costs_by_the_length_of_a_match(match_costs: list[int] | None) -> None:
    """A match of three tokens is worth more than a neural drafter of one token that never hits;
    at the price of nothing found it is not."""
    state = started(merge=MergeConfig(match_costs=match_costs))
    drafts = NeuralDrafts(torch.tensor([[7]]))
    state.end_step(sampled_of([3, -1, -1]), lambda outputs: drafts)
    for token in (1, 2):
        state.reconcile()
        state.begin_step(batch_of([0], [2], [1]))
        state.end_step(sampled_of([token, -1, -1]), lambda outputs: drafts)
    assert sources(state) == [2 if match_costs is None else 1]


def test_a_ladder_gives_the_costs() -> None:
    table = np.full((16, 32), 16, np.uint8)
    ladder = NgramConfig(sizes="ladder", k=2, min_draft_probability=0.2, costs=table)
    state = started(ngram=ladder, merge=MergeConfig(min_accepted=0.7))
    costs = torch.tensor([[16, 32]], dtype=torch.uint8)  # promises less than half and a quarter
    outputs = state.end_step(sampled_of([3, -1, -1]), drafter(NEURAL, costs=costs))
    assert outputs.draft_costs is not None
    assert outputs.draft_costs.tolist() == [[16, 16]]
    assert outputs.draft_token_ids.tolist() == [[1, 2]]
    assert sources(state) == [2]


def test_a_readmitted_request_begins_anew() -> None:
    state = started()
    state.end_step(sampled_of([3, -1, -1]), drafter(NEURAL))
    state.reconcile()
    acceptance = state._truth.upload.acceptance
    assert acceptance[state._mirrors.slot_of[0]].tolist() == [2 * 65536, 3]
    begin(state, removed=ints(0))
    assert not acceptance.any()


@pytest.mark.parametrize(
    ("config", "draft", "message"),
    [
        ({"merge": None}, drafter(NEURAL), "draft: expected None without AsyncConfig.merge"),
        ({}, None, "draft: expected a neural drafter, got None"),
        ({}, NEURAL, "draft: expected a callable, got list"),
    ],
)
def test_a_drafter_that_does_not_fit(config: Any, draft: Any, message: str) -> None:
    state = started(**config)
    with pytest.raises(ValueError, match=f"end_step: {message}"):
        state.end_step(sampled_of([3, -1, -1]), draft)
    right = drafter(NEURAL) if state.config.merge is not None else None
    state.end_step(sampled_of([3, -1, -1]), right)  # nothing had changed
    assert state.reconcile().num_sampled.tolist() == [1]


def _failing(outputs: Any) -> NeuralDrafts:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (drafter(NEURAL, NEURAL), ValueError, "merge_drafts_: ngram_draft_token_ids: .*[2, 2]"),
        (drafter([7, 8, 9]), ValueError, "merge_drafts_: neural_draft_token_ids: .*got 3"),
        (lambda outputs: NEURAL, ValueError, "draft: expected NeuralDrafts, got list"),
        (_failing, MemoryError, "no room"),
    ],
)
def test_wrong_drafts_break_the_step(draft: Any, error: Any, message: str) -> None:
    """They come too late for the step to be undone; the state can be rebuilt."""
    state = started()
    with pytest.raises(error, match=message):
        state.end_step(sampled_of([3, -1, -1]), draft)
    with pytest.raises(RuntimeError, match="call rebuild"):
        state.reconcile()
    state.rebuild([admit(0, token_ids=PROMPT, block_ids=(ints(0, 1, 2),))])
    state.begin_step(batch_of([0], [5], [0]))
    outputs = state.end_step(sampled_of([3, -1, -1]), drafter(NEURAL))
    assert outputs.draft_token_ids.tolist() == [NEURAL]


@pytest.mark.parametrize(
    "merge",
    [
        {"min_match_len": -1},
        {"min_match_len": 1.5},
        {"min_accepted": -0.1},
        {"min_accepted": float("nan")},
        {"min_accepted": 32768},
        {"match_costs": [0] * 15},
        {"match_costs": [256] * 16},
        {"match_costs": [-1] * 16},
        {"match_costs": [0.5] * 16},
    ],
    ids=str,
)
def test_wrong_options(merge: Any) -> None:
    with pytest.raises(ValueError, match=f"MergeConfig: {next(iter(merge))}"):
        MergeConfig(**merge)
