"""Tests V1's runner: drafts do not change the output, and equal those of vLLM's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import MAX_MODEL_LEN, K, contains_up_to, start_engine
from v1_runs import METHODS, Recorder, make_requests

if TYPE_CHECKING:
    from conftest import Runs

SYNCHRONOUS_METHODS = ["custom_class", "plugin"]
SYNCHRONOUS_AND_STOCK = ["ngram", *SYNCHRONOUS_METHODS]
STORE_METHODS = ["store", "store_padded"]
AUTO_METHODS = ["auto", "auto_padded", *STORE_METHODS]
ALL_METHODS = [*SYNCHRONOUS_AND_STOCK, "padded", *AUTO_METHODS]


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("requests", ["greedy", "structured"])
def test_text_with_drafts_equals_text_without_speculation(
    runs: Runs, method: str, requests: str
) -> None:
    """Excludes sampled requests, because speculation changes which random numbers a token uses."""
    assert runs(method, requests).find_different(runs("none", requests)) == []


@pytest.mark.parametrize("method", ALL_METHODS)
def test_greedy_runs_cover_finish_reasons_preemptions_and_rejections(
    runs: Runs, method: str
) -> None:
    run = runs(method, "greedy")
    finish_reasons = [output[0].finish_reason for output in run.outputs]
    assert finish_reasons.count("stop") >= 6
    assert finish_reasons.count("length") >= 20
    assert len(set(map(tuple, run.get_token_ids()))) >= 40
    assert run.preemptions >= 5
    assert 300 <= run.num_accepted < 0.95 * sum(map(len, run.drafts))
    assert run.num_rows_in_prefill >= 40
    if method in SYNCHRONOUS_AND_STOCK:  # a request got a draft close to the maximum length
        assert max(map(max, run.drafts_by_length.values())) >= MAX_MODEL_LEN - K


@pytest.mark.parametrize("method", SYNCHRONOUS_METHODS)
@pytest.mark.parametrize("requests", ["greedy", "sampled", "structured"])
def test_synchronous_drafts_equal_stock_drafts(runs: Runs, method: str, requests: str) -> None:
    """`mismatches` lists drafts that differ from the stock class's for the same rows."""
    run, stock = runs(method, requests), runs("ngram", requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 50
    assert run.find_different(stock) == []
    # The time at which a grammar is ready varies. This time decides which requests share a step and
    # how long a draft can be.
    if requests != "structured":
        assert run.drafts_by_length == stock.drafts_by_length
        assert run.num_accepted == stock.num_accepted


@pytest.mark.parametrize("requests", ["greedy", "sampled", "structured"])
def test_asynchronous_drafts_equal_stock_drafts(runs: Runs, requests: str) -> None:
    run = runs("padded", requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 20


@pytest.mark.parametrize("method", SYNCHRONOUS_AND_STOCK)
def test_logprobs_equal_those_without_speculation_within_rounding(runs: Runs, method: str) -> None:
    num_compared = 0
    pairs = zip(runs(method).outputs, runs("none").outputs, strict=True)
    for (output, *_), (expected, *_) in pairs:
        steps = zip(output.logprobs or [], expected.logprobs or [], strict=True)
        for logprobs, expected_logprobs in steps:
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
            num_compared += 1
    assert num_compared > 100


def test_drafts_end_by_their_cost(runs: Runs) -> None:
    """After a match of one token, the cost table keeps two draft tokens."""
    lengths = [len(draft) for draft in runs("auto", "greedy").drafts]
    assert min(lengths.count(length) for length in (2, K)) >= 20
    for method in AUTO_METHODS:
        assert runs(method, "greedy").mismatches, "expected other drafts than the stock class's"


@pytest.mark.parametrize("method", STORE_METHODS)
def test_store_contains_generated_text_only_once_and_provides_drafts(
    runs: Runs, method: str
) -> None:
    """One engine ran both sets of requests. Prompts are not stored. Tokens that the last step of a
    request verified after the stop may be."""
    run = runs(method, "structured")
    assert run.num_store_drafts >= 20
    outputs = [
        tokens
        for requests in ("greedy", "structured")
        for tokens in runs(method, requests).get_token_ids()
    ]
    for _, text in run.stored_texts:
        assert any(contains_up_to(output, text, K) for output in outputs), text
    num_generated = sum(map(len, outputs))
    num_stored = sum(len(text) for _, text in run.stored_texts)
    assert 0.5 * num_generated < num_stored < 1.1 * num_generated


def test_padded_step_does_not_wait_for_its_number_of_drafts(runs: Runs) -> None:
    stock = runs("async_stock", "greedy")
    assert stock.draft_count_waits >= stock.steps
    for method in ("padded", "auto_padded", "store_padded"):
        assert runs(method, "greedy").draft_count_waits == 0


def test_random_drafts_do_not_change_text(model: Path, runs: Runs) -> None:
    """Also checks that the comparison with the stock class detects these drafts."""
    method = METHODS["padded"]
    with start_engine(model, method) as engine:
        propose = engine.drafter.propose

        def propose_random(*args: Any) -> Any:
            drafts, counts = propose(*args)
            generator = torch.Generator().manual_seed(int(drafts.sum()))
            return torch.randint(0, 1000, drafts.shape, generator=generator).int(), counts

        engine.drafter.propose = propose_random
        run = Recorder(engine, method).run(make_requests(model))
    assert run.find_different(runs("none", "greedy")) == []
    assert run.mismatches


def test_option_for_prompt_embeddings_with_ngram_gpu_raises(model: Path) -> None:
    message = "ngram_npu: enable_prompt_embeds: expected false, got true"
    with (
        pytest.raises(ValueError, match=message),
        start_engine(model, METHODS["padded"], enable_prompt_embeds=True),
    ):
        pass
