"""The comparisons behind index-identity.json and ladder-identity.json in tools/bench/results: they
pass here, and can fail; the ladder's brute-force search agrees with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ngram_npu import _C
from ngram_npu.reference import ladder

from tools.verify import identity, ladder_identity
from tools.verify.ladder_oracle import truth_of


def test_a_short_run() -> None:
    result = identity.run(cases=12, steps=80, data=None)
    assert result["identical"]
    for kind in ("random", "replayed"):
        assert result[kind]["answered_from_index"] > result[kind]["row_steps"] // 2
        assert result[kind]["drafted"] > 0


@pytest.mark.parametrize("place", range(7))
def test_one_wrong_bit_is_found(place: int) -> None:
    """In each of the five results, in a row's tokens, in its length."""
    calls = []

    def wrong(tokens: Any, lengths: Any, *arguments: Any, **keywords: Any) -> Any:
        results = _C.ngram_index_step_(tokens, lengths, *arguments, **keywords)
        calls.append(None)
        if len(calls) == 20:
            (*results, tokens, lengths)[place].reshape(-1)[-1] ^= 1
        return results

    with pytest.raises(AssertionError, match="step 19: the index differs"):
        identity.run(cases=2, steps=40, data=None, index_step=wrong)


@pytest.mark.parametrize("alphabet", [1, 2, 4, 30])
def test_the_search_is_the_references(alphabet: int) -> None:
    rng = np.random.default_rng(alphabet)
    costs = rng.integers(0, 60, (16, 32), np.uint8)
    for length in (0, 1, 2, 3, 17, 40, 70):
        tokens = rng.integers(0, alphabet, length, np.int32)
        tokens[length // 2 + length % 2 :] = tokens[: length // 2]
        truth = truth_of(tokens)
        assert truth.outcomes.tolist() == ladder.outcome_bytes(tokens.tolist())
        for part in {0, length // 3, length}:
            live = tokens[:part].tolist()
            for overlap, limit, max_len in ((False, 40, 1000), (True, 90, 1000), (True, 90, 72)):
                want = ladder.draft(live, 7, costs.tolist(), limit, overlap, max_len)
                found = truth.draft(part, 7, costs, limit, overlap, max_len)
                assert (found.ids[: found.count], found.costs[: found.count]) == want[:2]
                assert found.match_len == (want[2] if want[0] else 0)
                free = truth.draft(part, 7, None, 0, overlap, max_len)
                want = ladder.draft(live, 7, costs.tolist(), None, overlap, max_len)
                assert free.ids[: free.count] == want[0]


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_identity, "ROWS", 24)


@pytest.mark.usefixtures("few_rows")
def test_a_short_run_of_the_ladder() -> None:
    result = ladder_identity.run(cases=6, data=None)
    assert result["identical"]
    for kind in ("random", "recorded"):
        assert result[kind]["answered_from_index"] > result[kind]["drafts"] * 9 // 10 > 0
        assert result[kind]["tokens"] > result[kind]["rows"]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("place", range(4))
def test_one_wrong_bit_of_the_ladder_is_found(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of the three results, in the costs."""
    right = _C.ngram_index_propose_

    def wrong(*tensors: Any, **options: Any) -> Any:
        results = right(*tensors, **options)
        (*results, options["draft_costs"])[place].reshape(-1)[-1] ^= 1
        return results

    monkeypatch.setattr(_C, "ngram_index_propose_", wrong)
    with pytest.raises(AssertionError, match=r"case 0, .*, row 23: ngram_index_propose_ differs"):
        ladder_identity.run(cases=1, data=None)
