"""Costs fitted on recorded conversations, and the simulator of drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ngram_npu import Costs, NgramConfig, NgramProposer
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.draft_costs import logits_to_costs
from ngram_npu.errors import InputError
from ngram_npu_cli.learn.fit_draft_costs import compare, fit
from ngram_npu_cli.replay import TokenRequest, TokenTurn, simulate
from ngram_npu_cli.replay.walks import Counts, candidates, outcomes, walks
from ops.reference import ladder

TOKENIZER = "0123456789abcdef" * 2


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


def rows() -> list[list[int]]:
    rng = random.Random(16)
    kinds = [rng.choice((1, 2, 3, 30)) for _ in range(60)]
    return [[rng.randrange(kind) for _ in range(rng.randrange(70))] for kind in kinds]


@pytest.mark.parametrize("tokens", rows())
def test_candidates_and_bytes(tokens: list[int]) -> None:
    row = np.array(tokens, np.int64)
    q, m = candidates(row)
    expected = [ladder.candidate(tokens[:x]) for x in range(len(tokens))]
    assert list(zip(q.tolist(), m.tolist(), strict=True)) == expected
    assert outcomes(row, q, m).tolist() == ladder.outcome_bytes(tokens)


def test_simulator_counts_equal_replayed_drafts() -> None:
    rng, requests = np.random.default_rng(3), new_conversations(3)
    row, store = (rng.integers(-200, 300, (16, columns)) for columns in (32, 56))
    costs = Costs(row, store, rng.integers(-128, 128, (4096, 2)))
    turns = [TokenTurn(part[:20], part[20:]) for part in requests[0].tokens()[:120].reshape(3, 40)]
    single = TokenTurn(turns[0].prompt, turns[0].completion[:1])
    requests = [TokenRequest("none", ()), *requests, TokenRequest("turns", (single, *turns))]
    observed = walks(requests)
    for limit in (10, 40, 90):
        config = NgramConfig(sizes="ladder", min_draft_probability=2 ** (-limit / 16), costs=costs)
        figures = simulate("", requests, NgramProposer(config), k=8, batch_size=2)
        counts = Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
        assert observed.replay(observed.lengths(costs.row_token_costs, limit, 8)) == counts


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
    comparison = compare(requests, limit=12)
    assert comparison.wins
    assert comparison.gain > 1.05
    assert comparison.conversations == 20


def test_costs_that_do_not_win_are_not_recommended() -> None:
    """The predictable tokens of the fitted half are unpredictable in the other half."""
    pairs = zip(new_conversations(40), new_conversations(40, parity=1), strict=True)
    assert not compare([request for pair in pairs for request in pair], limit=30).wins
    with pytest.raises(InputError, match="expected at least 2 conversations"):
        compare(new_conversations(1))
