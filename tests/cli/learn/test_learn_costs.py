"""Tests costs fitted on recorded conversations, and counts of replays with these costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ngram_npu import Costs, NgramConfig, NgramProposer
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.draft_costs import UNITS_PER_NAT, costs_to_logits
from ngram_npu_cli.learn.fit_draft_costs import PRIOR_WEIGHT, fit, observe_drafts
from ngram_npu_cli.replay import TokenRequest, TokenTurn, simulate
from ngram_npu_cli.replay.walks import (
    Counts,
    PositionDrafts,
    compute_outcomes,
    find_candidates,
    simulate_ladder,
)
from ops.reference import ladder

TOKENIZER = "0123456789abcdef" * 2
NO_TOKEN_LOGITS = np.zeros((4096, 2), int)


def convert_logits_to_costs(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    costs = [ladder.compute_cost(logit, NO_TOKEN_LOGITS, 0, 0) for logit in range(-1024, 1024)]
    return np.array(costs)[logits + 1024]


def make_conversations(count: int, parity: int = 0) -> list[TokenRequest]:
    """Returns random ids of 0 to 119; id + 500 follows even ids or, with parity 1, odd ids."""
    rng = np.random.default_rng(count)
    requests = []
    for i in range(count):
        ids = rng.integers(0, 120, 150)
        text = np.stack([ids, np.where(ids % 2 == parity, ids + 500, -1)], axis=1).reshape(-1)
        text = text[text >= 0].astype(np.int32)
        requests.append(TokenRequest(str(i), (TokenTurn(text[:40], text[40:]),)))
    return requests


def make_rows() -> list[list[int]]:
    rng = random.Random(16)
    vocabulary_sizes = [rng.choice((1, 2, 3, 30)) for _ in range(60)]
    return [[rng.randrange(size) for _ in range(rng.randrange(70))] for size in vocabulary_sizes]


@pytest.mark.parametrize("tokens", make_rows())
def test_candidates_and_outcomes_equal_the_reference(tokens: list[int]) -> None:
    row = np.array(tokens, np.int64)
    positions, lengths = find_candidates(row)
    expected = [ladder.find_candidate(tokens[:end]) for end in range(len(tokens))]
    assert list(zip(positions.tolist(), lengths.tolist(), strict=True)) == expected
    assert compute_outcomes(row, positions, lengths).tolist() == ladder.compute_outcome_bytes(
        tokens
    )


def count_replay(drafts: PositionDrafts, costs: Costs, limit: int, k: int) -> Counts:
    """Counts the steps of a replay with drafts of at most `k` tokens and a cost up to the limit."""
    logits = costs.row[drafts.match, drafts.column].astype(int)
    logits += costs.tokens[drafts.token % 4096, 0].astype(int)
    logits += costs.tokens[drafts.previous_token % 4096, 1].astype(int)
    is_cheap = np.cumsum(convert_logits_to_costs(logits), axis=1) <= limit
    lengths = np.minimum(is_cheap[:, :k].sum(axis=1), drafts.length)
    yielded = np.minimum(np.minimum(drafts.num_correct, lengths) + 1, drafts.num_tokens_to_end)
    step_positions = [0]
    while step_positions[-1] < len(yielded):
        step_positions.append(step_positions[-1] + yielded[step_positions[-1]])
    return Counts(len(yielded), len(step_positions) - 1, int(lengths[step_positions[:-1]].sum()))


def test_counts_from_precomputed_drafts_equal_simulated_replay() -> None:
    rng, requests = np.random.default_rng(3), make_conversations(3)
    row, store = (rng.integers(-200, 300, (16, columns)) for columns in (32, 56))
    costs = Costs(row, store, rng.integers(-128, 128, (4096, 2)))
    turns = [TokenTurn(part[:20], part[20:]) for part in requests[0].tokens()[:120].reshape(3, 40)]
    # A turn with one generated token has no drafts.
    turns.insert(0, TokenTurn(turns[0].prompt, turns[0].completion[:1]))
    requests = [TokenRequest("none", ()), *requests, TokenRequest("turns", tuple(turns))]
    drafts = simulate_ladder(requests)
    for limit in (10, 40, 90):
        config = NgramConfig(sizes="ladder", min_draft_probability=2 ** (-limit / 16), costs=costs)
        figures = simulate("", requests, NgramProposer(config), k=8, batch_size=2)
        counts = Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
        assert count_replay(drafts, costs, limit, 8) == counts


def test_fit_without_conversations_returns_default_costs() -> None:
    costs = fit([], TOKENIZER)
    assert not costs.tokens.any()
    assert costs.tokenizer == TOKENIZER
    assert np.array_equal(convert_logits_to_costs(costs.row), default_costs())
    assert np.array_equal(convert_logits_to_costs(costs.store), default_store_costs())


def test_fit_maximizes_the_likelihood() -> None:
    """At the maximum, the gradient is 0: the residuals of each entry and its prior cancel."""
    requests = make_conversations(40)
    costs = fit(requests)
    (cells, tokens, previous_tokens), correct = observe_drafts(requests)
    defaults = default_costs(), default_store_costs()
    default_logits = costs_to_logits(np.concatenate([table.ravel() for table in defaults]))
    fitted = np.concatenate([costs.row.ravel(), costs.store.ravel()]) / UNITS_PER_NAT
    token_logits, previous_logits = costs.tokens.T / UNITS_PER_NAT
    logits = fitted[cells] + token_logits[tokens] + previous_logits[previous_tokens]
    rate = 1 / (1 + np.exp(-logits))
    for entries, table, prior in (
        (cells, fitted, default_logits),
        (tokens, token_logits, 0.0),
        (previous_tokens, previous_logits, 0.0),
    ):
        gradient = np.bincount(entries, correct - rate, len(table)) - PRIOR_WEIGHT * (table - prior)
        curvature = np.bincount(entries, rate * (1 - rate), len(table)) + PRIOR_WEIGHT
        assert abs(gradient / curvature).max() < 0.1, "the next Newton step is not small"
