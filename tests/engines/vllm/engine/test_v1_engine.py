"""V1's runner, token by token: drafts never change the output, and equal the stock drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import MAX_MODEL_LEN, K

if TYPE_CHECKING:
    from conftest import Runs

OURS = ["custom_class", "plugin"]
SPECULATING = ["ngram", *OURS]
LADDERS = ["ladder", "ladder_padded"]
STORES = ["store", "store_padded"]


@pytest.mark.parametrize("method", [*SPECULATING, *LADDERS, *STORES])
@pytest.mark.parametrize("requests", ["greedy", "structured"])
def test_text_equals_no_speculation(runs: Runs, method: str, requests: str) -> None:
    assert runs(method, requests).find_different(runs("none", requests)) == []


@pytest.mark.parametrize("method", [*SPECULATING, *LADDERS, *STORES])
def test_greedy_requests_have_all_endings_preemptions_and_rejections(
    runs: Runs, method: str
) -> None:
    run = runs(method, "greedy")
    ends = [output[0].finish_reason for output in run.outputs]
    assert ends.count("stop") >= 6
    assert ends.count("length") >= 20
    assert len(set(map(tuple, run.get_token_ids()))) >= 40
    assert run.preemptions >= 5
    assert run.accepted >= 300
    assert run.prefilling_rows >= 40
    if method in SPECULATING:
        assert max(max(steps) for steps in run.steps_of_requests.values()) >= MAX_MODEL_LEN - K


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", ["greedy", "sampled", "structured"])
def test_drafts_equal_stock_class(runs: Runs, method: str, requests: str) -> None:
    """Compares drafts with the stock class on the same rows, and all outputs with its own run."""
    run, stock = runs(method, requests), runs("ngram", requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 50
    assert run.find_different(stock) == []
    # The time at which a grammar is ready varies. It decides which requests share a step and how
    # long a draft can be.
    if requests != "structured":
        assert run.steps_of_requests == stock.steps_of_requests
        assert run.accepted == stock.accepted


@pytest.mark.parametrize("method", SPECULATING)
def test_logprobs_equal_no_speculation_within_rounding(runs: Runs, method: str) -> None:
    num_compared = 0
    for ours, theirs in zip(
        runs(method, "greedy").outputs, runs("none", "greedy").outputs, strict=True
    ):
        for step, expected in zip(ours[0].logprobs or [], theirs[0].logprobs or [], strict=True):
            assert step == pytest.approx(expected, abs=1e-3)
            num_compared += 1
    assert num_compared > 100


def test_ladder_drafts_have_all_lengths(runs: Runs) -> None:
    lengths = [len(draft) for draft in runs("ladder", "greedy").drafts]
    assert min(lengths.count(length) for length in range(K + 1)) >= 20
    for method in LADDERS:
        assert runs(method, "greedy").mismatches, "the stock class drafts differently"
    assert runs("ladder_padded", "greedy").waits == 0


@pytest.mark.parametrize("method", STORES)
def test_store_contains_generated_tokens_and_drafts(runs: Runs, method: str) -> None:
    store = runs(method, "structured").store
    assert store.drafts >= 20
    assert store.calls_busy == 0
    # One engine generated all of these; tokens sampled after a stop are stored, too.
    generated = sum(
        len(tokens)
        for requests in ("greedy", "structured")
        for tokens in runs(method, requests).get_token_ids()
    )
    assert 0.5 * generated < store.tokens_entered < 1.1 * generated
