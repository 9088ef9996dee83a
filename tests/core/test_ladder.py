"""Drafts by cost through the public API."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramIndex, NgramProposer
from ngram_npu.config import default_costs
from ops.reference.ladder import draft

LADDER = NgramConfig(sizes="ladder", min_draft_probability=0.177)
TABLE = np.full((16, 32), 7, np.int64)


def test_what_a_ladder_implies() -> None:
    config = LADDER
    assert (config.min_n, config.max_n, config.k, config.match_policy) == (1, 16, 8, "latest")
    assert config.overlap
    assert config.fits_index
    assert config.cost_limit == 40
    assert np.array_equal(config.cost_table, default_costs())  # type: ignore[arg-type]
    assert NgramConfig(sizes="ladder").cost_table is None
    assert not NgramConfig(sizes="ladder", overlap=False).overlap
    assert NgramConfig(sizes="ladder", min_draft_probability=1).cost_limit == 0


def test_the_fitted_costs_are_costs() -> None:
    costs = default_costs()
    assert costs.shape == (16, 32)
    assert costs.dtype == np.uint8
    assert not costs.flags.writeable
    # Tokens cost less after right drafts than after wrong ones, and less after a longer match.
    assert costs[1, 3] < costs[1, 2]
    assert costs[15, 31] < costs[1, 3]


def test_ones_own_costs() -> None:
    config = NgramConfig(sizes="ladder", min_draft_probability=0.5, costs=TABLE)
    assert np.array_equal(config.cost_table, TABLE)  # type: ignore[arg-type]
    assert config == NgramConfig(sizes="ladder", min_draft_probability=0.5, costs=TABLE.tolist())
    assert hash(config) != hash(LADDER)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "steps"}, "sizes: expected 'consecutive' or 'ladder', got 'steps'"),
        ({"sizes": "ladder", "min_n": 2}, "min_n: expected 1 with sizes='ladder', got 2"),
        ({"sizes": "ladder", "max_n": 5}, "max_n: expected 16 with sizes='ladder', got 5"),
        ({"sizes": "ladder", "match_policy": "earliest"}, "match_policy: expected 'latest' with"),
        ({"min_draft_probability": 0.2, "store": "live"}, "store: expected None without sizes="),
        ({"costs": TABLE}, "costs: expected None with sizes='consecutive'"),
        ({"sizes": "ladder", "costs": TABLE}, "costs: expected None without min_draft_prob"),
        ({"sizes": "ladder", "min_draft_probability": 0}, "expected above 0, at most 1, got 0"),
        ({"sizes": "ladder", "min_draft_probability": 1.5}, "at most 1, got 1.5"),
        ({"sizes": "ladder", "costs": TABLE[1:]}, r"16 rows of 32 integers .*\[15, 32\]"),
        ({"sizes": "ladder", "costs": TABLE + 250}, "integers of 0 to 255"),
        ({"sizes": "ladder", "costs": TABLE * 0.5}, "integers of 0 to 255, got float64"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^NgramConfig: .*{message}"):
        NgramConfig(**options)


def test_a_probability_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="min_draft_probability: expected float, got True"):
        NgramConfig(sizes="ladder", min_draft_probability=True)


def test_who_cannot_serve_it() -> None:
    with pytest.raises(ValueError, match="engine: expected 'index' or 'auto' with sizes='ladder'"):
        NgramProposer(LADDER, "scan")
    with pytest.raises(ValueError, match="min_n, max_n: expected 1, 16 with sizes='ladder'"):
        NgramIndex(1, 10, min_n=2, max_n=5, sizes="ladder")
    with pytest.raises(ValueError, match="outcomes: expected False without sizes='ladder'"):
        NgramIndex(1, 10, min_n=2, max_n=5, outcomes=True)
    with pytest.raises(ValueError, match="sizes: expected 'consecutive' or 'ladder', got 'x'"):
        NgramIndex(1, 10, min_n=2, max_n=5, sizes="x")  # type: ignore[arg-type]


def test_costs_that_nobody_makes() -> None:
    tokens, lengths = np.zeros((1, 9), np.int32), np.array([5], np.int32)
    for config in (NgramConfig(), NgramConfig(sizes="ladder")):
        proposer = NgramProposer(config)
        with pytest.raises(ValueError, match="draft_costs: expected None"):
            proposer.propose(tokens, lengths, draft_costs=np.zeros((1, config.k), np.uint8))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_proposer(kind: str) -> None:
    """Repetitive text, appended and drafted from step by step; also after a copy."""
    rng = np.random.default_rng(7)
    text = np.resize(rng.integers(0, 9, 40), 200).astype(np.int32)
    text[rng.integers(0, 200, 20)] = 11
    proposer = NgramProposer(LADDER, num_slots=1)
    rows: Any = text[None].copy()
    lengths: Any = np.array([60], np.int32)
    costs: Any = np.zeros((1, LADDER.k), np.uint8)
    if kind == "torch":
        rows, lengths, costs = map(torch.from_numpy, (rows, lengths, costs))
    proposer.append(rows, lengths)
    table = default_costs().tolist()
    drafted = 0
    for length in range(61, 200):
        sampled: Any = text[None, length - 1 : length].copy()
        sampled = torch.from_numpy(sampled) if kind == "torch" else sampled
        found = proposer.step(rows, lengths, sampled, draft_costs=costs)
        ids, paid, match = draft(text[:length].tolist(), LADDER.k, table, 40, True, 2**63 - 1)
        assert found.draft_token_ids[0].tolist() == ids + [-1] * (LADDER.k - len(ids))
        assert costs[0].tolist() == paid + [255] * (LADDER.k - len(ids))
        assert int(found.match_len[0]) == (match if ids else 0)
        again = proposer.propose(rows, lengths)
        assert again.draft_token_ids.tolist() == found.draft_token_ids.tolist()
        drafted += len(ids)
    assert drafted > 100
    copy = pickle.loads(pickle.dumps(proposer))
    assert copy.propose(rows, lengths).draft_token_ids.tolist() == again.draft_token_ids.tolist()


def test_an_index_made_for_a_ladder_is_large_enough() -> None:
    rng = np.random.default_rng(3)
    rows = rng.zipf(1.3, (4, 5000)).clip(0, 30_000).astype(np.int32)
    index = NgramIndex(4, rows.size, min_n=1, max_n=16, sizes="ladder", outcomes=True)
    index.append(rows, np.full(4, 5000, np.int32))
    assert index.statistics.slots_given_up == 0
