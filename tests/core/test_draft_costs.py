"""Tests the costs of draft tokens against their definition in docs/design/store.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.draft_costs import NO_TOKEN, DraftCosts, load_table

BINS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 5, 8: 6, 9: 6, 10: 7, 11: 7, 12: 7, 13: 8, 14: 8}
K = 8


def compute_cost(match_len: int, agreement: int, j: int) -> int:
    row, store = load_table()
    context_bin = BINS.get(match_len + j, 9)
    if agreement == -2:
        return int(row[context_bin])
    column = 0 if agreement == -1 else 1 if j < agreement else 2 if j == agreement else 3
    return int(store[context_bin, column])


def make_drafts() -> dict[str, np.ndarray]:
    """Returns drafts with each match length, agreement and number of tokens."""
    cells = [
        (m, a, n) for m in (*range(1, 20), 64) for n in range(1, K + 1) for a in range(-2, n + 1)
    ]
    match_len, agreement, counts = np.array([(0, -2, 0), *cells], np.int32).T.copy()
    tokens = np.arange(len(counts) * K, dtype=np.int32).reshape(-1, K)
    tokens[np.arange(K) >= counts[:, None]] = -1
    return {
        "draft_token_ids": tokens,
        "num_draft_tokens": counts,
        "match_len": match_len,
        "agreement": agreement,
    }


def convert(drafts: dict[str, np.ndarray], kind: str) -> dict[str, Any]:
    make: Any = torch.from_numpy if kind == "torch" else np.asarray
    return {name: make(array.copy()) for name, array in drafts.items()}


EACH_KIND = pytest.mark.parametrize("kind", ["numpy", "torch"])


@EACH_KIND
def test_costs_are_those_of_the_table(kind: str) -> None:
    drafts = make_drafts()
    arguments = convert(drafts, kind)
    del arguments["draft_token_ids"]
    costs = DraftCosts(NgramConfig(k=K)).compute_costs(**arguments)
    probabilities = DraftCosts(NgramConfig(k=K)).compute_probabilities(**arguments)
    cells = zip(*(drafts[name].tolist() for name in list(drafts)[1:]), strict=True)
    expected = [
        [compute_cost(m, a, j) if j < count else NO_TOKEN for j in range(K)]
        for count, m, a in cells
    ]
    assert str(costs.dtype).endswith("uint8")
    assert costs.tolist() == expected
    assert np.allclose(probabilities, 2.0 ** (np.array(expected) / -16))


@EACH_KIND
@pytest.mark.parametrize("probability", [1.0, 0.6, 0.3, 0.12, 0.01])
def test_draft_ends_before_its_cost_exceeds_the_limit(kind: str, probability: float) -> None:
    drafts = make_drafts()
    ended = convert(drafts, kind)
    DraftCosts(NgramConfig(k=K, min_draft_probability=probability)).end_drafts(**ended)
    limit = round(-16 * math.log2(probability))
    cells = zip(*(array.tolist() for array in drafts.values()), strict=True)
    num_ended = 0
    for i, (tokens, count, match_len, agreement) in enumerate(cells):
        costs = [compute_cost(match_len, agreement, j) for j in range(count)]
        length = next((n for n in range(count) if sum(costs[: n + 1]) > limit), count)
        num_ended += length < count
        assert ended["num_draft_tokens"][i] == length
        assert ended["draft_token_ids"][i].tolist() == tokens[:length] + [-1] * (K - length)
    assert num_ended > 0


@EACH_KIND
def test_drafts_without_a_store_have_the_costs_of_the_row(kind: str) -> None:
    drafts = {name: array[:9] for name, array in make_drafts().items()}
    drafts["agreement"][:] = -2
    costs = DraftCosts(NgramConfig(k=K, min_draft_probability=0.3))
    arguments = convert(drafts, kind)
    without_agreement = {
        name: a for name, a in convert(drafts, kind).items() if name != "agreement"
    }
    costs.end_drafts(**arguments)
    costs.end_drafts(**without_agreement)
    for name, array in without_agreement.items():
        assert array.tolist() == arguments[name].tolist()


def test_draft_is_unchanged_without_a_probability() -> None:
    drafts = make_drafts()
    ended = convert(drafts, "numpy")
    DraftCosts(NgramConfig(k=K)).end_drafts(**ended)
    assert all(np.array_equal(ended[name], drafts[name]) for name in drafts)


def test_fewer_tokens_than_k_are_ended_by_the_same_costs() -> None:
    drafts, narrow = make_drafts(), make_drafts()
    narrow["draft_token_ids"] = narrow["draft_token_ids"][:, :3].copy()
    np.minimum(narrow["num_draft_tokens"], 3, out=narrow["num_draft_tokens"])
    costs = DraftCosts(NgramConfig(k=K, min_draft_probability=0.3))
    costs.end_drafts(**drafts)
    costs.end_drafts(**narrow)
    assert np.array_equal(narrow["num_draft_tokens"], np.minimum(drafts["num_draft_tokens"], 3))
    assert np.array_equal(narrow["draft_token_ids"], drafts["draft_token_ids"][:, :3])


def test_costs_decrease_with_the_context_and_with_agreement() -> None:
    row, store = load_table()
    assert (row.shape, store.shape) == ((10,), (10, 4))
    assert row[0] > row[4] > row[-1]
    assert (store[:, 1] <= store[:, 2]).all(), "agreement is better than disagreement"
