"""Costs fitted on recorded conversations, and the simulator of drafts."""

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


def logits_to_costs(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    costs = [ladder.cost_of(logit, NO_TOKEN_LOGITS, 0, 0) for logit in range(-1024, 1024)]
    return np.array(costs)[logits + 1024]


def new_conversations(number: int, parity: int = 0) -> list[TokenRequest]:
    """Returns random ids of 0 to 119. id + 500 follows each even id, or odd one if parity is 1."""
    rng = np.random.default_rng(number)
    requests = []
    for i in range(number):
        ids = rng.integers(0, 120, 150)
        text = np.stack([ids, np.where(ids % 2 == parity, ids + 500, -1)], axis=1).reshape(-1)
        text = text[text >= 0].astype(np.int32)
        requests.append(TokenRequest(str(i), (TokenTurn(text[:40], text[40:]),)))
    return requests


def make_rows() -> list[list[int]]:
    rng = random.Random(16)
    kinds = [rng.choice((1, 2, 3, 30)) for _ in range(60)]
    return [[rng.randrange(kind) for _ in range(rng.randrange(70))] for kind in kinds]


@pytest.mark.parametrize("tokens", make_rows())
def test_candidates_and_outcomes_equal_the_reference(tokens: list[int]) -> None:
    row = np.array(tokens, np.int64)
    q, m = find_candidates(row)
    expected = [ladder.candidate(tokens[:x]) for x in range(len(tokens))]
    assert list(zip(q.tolist(), m.tolist(), strict=True)) == expected
    assert compute_outcomes(row, q, m).tolist() == ladder.outcome_bytes(tokens)


def replay_walks(drafts: PositionDrafts, costs: Costs, limit: int, k: int) -> Counts:
    """Counts a replay with drafts of at most `k` tokens whose cost does not exceed the limit."""
    logits = costs.row[drafts.match, drafts.column].astype(int)
    logits += costs.tokens[drafts.token % 4096, 0].astype(int)
    logits += costs.tokens[drafts.previous_token % 4096, 1].astype(int)
    is_cheap = np.cumsum(logits_to_costs(logits), axis=1) <= limit
    lengths = np.minimum(is_cheap[:, :k].sum(axis=1), drafts.length)
    yielded = np.minimum(np.minimum(drafts.num_right, lengths) + 1, drafts.num_remaining)
    steps = [0]
    while steps[-1] < len(yielded):
        steps.append(steps[-1] + yielded[steps[-1]])
    return Counts(len(yielded), len(steps) - 1, int(lengths[steps[:-1]].sum()))


def test_simulator_counts_equal_replayed_drafts() -> None:
    rng, requests = np.random.default_rng(3), new_conversations(3)
    row, store = (rng.integers(-200, 300, (16, columns)) for columns in (32, 56))
    costs = Costs(row, store, rng.integers(-128, 128, (4096, 2)))
    turns = [TokenTurn(part[:20], part[20:]) for part in requests[0].tokens()[:120].reshape(3, 40)]
    single = TokenTurn(turns[0].prompt, turns[0].completion[:1])
    requests = [TokenRequest("none", ()), *requests, TokenRequest("turns", (single, *turns))]
    observed = simulate_ladder(requests)
    for limit in (10, 40, 90):
        config = NgramConfig(sizes="ladder", min_draft_probability=2 ** (-limit / 16), costs=costs)
        figures = simulate("", requests, NgramProposer(config), k=8, batch_size=2)
        counts = Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
        assert replay_walks(observed, costs, limit, 8) == counts


def test_fit_without_conversations_returns_default_costs() -> None:
    costs = fit([], TOKENIZER)
    assert not costs.tokens.any()
    assert costs.tokenizer == TOKENIZER
    assert np.array_equal(logits_to_costs(costs.row), default_costs())
    assert np.array_equal(logits_to_costs(costs.store), default_store_costs())


def test_fit_learns_predictable_tokens() -> None:
    requests = new_conversations(40)
    costs = fit(requests)
    assert costs == fit(requests)
    before = costs.tokens[:, 1].astype(int)
    assert before[0:120:2].min() > before[1:120:2].max()
    assert not before[700:].any(), "tokens that do not occur keep logit 0"


def test_fit_maximizes_the_likelihood() -> None:
    """At the maximum, the residuals of an entry and the pull of its prior cancel."""
    requests = new_conversations(40)
    costs = fit(requests)
    (cells, tokens, before), right = observe_drafts(requests)
    defaults = default_costs(), default_store_costs()
    shipped = costs_to_logits(np.concatenate([table.ravel() for table in defaults]))
    fitted = np.concatenate([costs.row.ravel(), costs.store.ravel()]) / UNITS_PER_NAT
    token_logits, before_logits = costs.tokens.T / UNITS_PER_NAT
    rate = 1 / (1 + np.exp(-fitted[cells] - token_logits[tokens] - before_logits[before]))
    for entries, table, prior in (
        (cells, fitted, shipped),
        (tokens, token_logits, 0.0),
        (before, before_logits, 0.0),
    ):
        pull = np.bincount(entries, right - rate, len(table)) - PRIOR_WEIGHT * (table - prior)
        curvature = np.bincount(entries, rate * (1 - rate), len(table)) + PRIOR_WEIGHT
        assert abs(pull / curvature).max() < 0.1, "a step of Newton's method is still long"
