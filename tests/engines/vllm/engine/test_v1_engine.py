"""V1's runner, token by token: drafts never change the output, and equal the stock drafts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from engines import MAX_MODEL_LEN, K, start_engine
from v1_runs import METHODS, Recorder, make_requests

if TYPE_CHECKING:
    from conftest import Runs

SYNCHRONOUS = ["custom_class", "plugin"]
SPECULATING = ["ngram", *SYNCHRONOUS]
ASYNCHRONOUS = ["padded", "padded_scan", "trimmed"]
LADDERS = ["ladder", "ladder_padded"]
STORES = ["store", "store_padded"]
ALL = [*SPECULATING, *ASYNCHRONOUS, *LADDERS, *STORES]


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("requests", ["greedy", "structured"])
def test_text_with_drafts_equals_text_without_speculation(
    runs: Runs, method: str, requests: str
) -> None:
    """Sampled requests would consume other random numbers."""
    expected = runs("none", requests)
    different = runs(method, requests).find_different(expected)
    if (method, requests) == ("trimmed", "structured"):  # vLLM's text was wrong before 0.33
        stock = runs("async_stock", requests).find_different(expected)
        assert len(stock) >= 5 if vllm.__version__.startswith("0.32.") else stock == []
        assert different == stock
    else:
        assert different == []


@pytest.mark.parametrize("method", ALL)
def test_greedy_requests_have_all_endings_preemptions_and_rejections(
    runs: Runs, method: str
) -> None:
    run = runs(method, "greedy")
    ends = [output[0].finish_reason for output in run.outputs]
    assert ends.count("stop") >= 6
    assert ends.count("length") >= 20
    assert len(set(map(tuple, run.get_token_ids()))) >= 40
    assert run.preemptions >= 5
    assert 300 <= run.accepted < 0.95 * sum(map(len, run.drafts))
    assert run.prefilling_rows >= 40
    if method in SPECULATING:
        assert max(max(steps) for steps in run.steps_of_requests.values()) >= MAX_MODEL_LEN - K


@pytest.mark.parametrize("method", SYNCHRONOUS)
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


@pytest.mark.parametrize("method", ASYNCHRONOUS)
@pytest.mark.parametrize("requests", ["greedy", "sampled", "structured"])
def test_asynchronous_drafts_equal_stock_class(runs: Runs, method: str, requests: str) -> None:
    run = runs(method, requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 20


@pytest.mark.parametrize("requests", ["greedy", "sampled"])
def test_trimmed_run_equals_stock_run(runs: Runs, requests: str) -> None:
    run, stock = runs("trimmed", requests), runs("async_stock", requests)
    assert run.find_different(stock) == []
    assert run.steps_of_requests == stock.steps_of_requests
    assert (run.accepted, run.steps) == (stock.accepted, stock.steps)


@pytest.mark.parametrize("method", SPECULATING)
def test_logprobs_equal_no_speculation_within_rounding(runs: Runs, method: str) -> None:
    num_compared = 0
    pairs = zip(runs(method).outputs, runs("none").outputs, strict=True)
    for (output, *_), (other, *_) in pairs:
        for step, expected in zip(output.logprobs or [], other.logprobs or [], strict=True):
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
def test_store_receives_generated_tokens_and_provides_drafts(runs: Runs, method: str) -> None:
    store = runs(method, "structured").store
    assert store.drafts >= 20
    assert store.calls_skipped == 0
    # One engine generated all of these; tokens sampled after a stop are stored, too.
    generated = sum(
        len(tokens)
        for requests in ("greedy", "structured")
        for tokens in runs(method, requests).get_token_ids()
    )
    assert 0.5 * generated < store.tokens_inserted < 1.1 * generated


def test_padded_step_does_not_wait_for_number_of_drafts(runs: Runs) -> None:
    stock = runs("async_stock", "greedy")
    assert stock.waits >= stock.steps
    assert runs("trimmed", "greedy").waits == stock.waits
    assert [runs("padded", requests).waits for requests in ("greedy", "sampled")] == [0, 0]


@pytest.mark.parametrize("method", ["keep_drafting", "trimmed_keep_drafting"])
def test_keep_drafting_drafts_in_every_step(runs: Runs, method: str) -> None:
    """Needed by models with recurrent layers; this model has none."""
    run = runs(method, "greedy")
    assert run.find_different(runs("none", "greedy")) == []
    assert all(run.drafts)
    assert run.mismatches, "the stock class has empty drafts"


def test_random_drafts_do_not_change_text(model: Path, runs: Runs) -> None:
    """The comparison with the stock class detects the wrong drafts."""
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


@pytest.mark.parametrize("method", ["padded", "trimmed"])
def test_prompt_embeddings_with_ngram_gpu_raise(model: Path, method: str) -> None:
    message = "ngram_npu: enable_prompt_embeds: expected false, got true"
    with (
        pytest.raises(ValueError, match=message),
        start_engine(model, METHODS[method], enable_prompt_embeds=True),
    ):
        pass
