"""Tests that the V2 runner with our speculator generates the same text as without speculation, and
the same drafts as vLLM's own speculator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import v2_runs
from engines import K, contains_up_to, make_params, start_engine
from v2_runs import METHODS, Run
from vllm import SamplingParams
from vllm.v1.worker.gpu import warmup

if TYPE_CHECKING:
    from conftest import Runs

COMPARED_METHODS = ["async", "sync"]
AUTO_METHODS = ["auto", "auto-adaptive"]
STORE_METHODS = ["store", "store-sync"]
ALL_METHODS = ["stock", *COMPARED_METHODS, *AUTO_METHODS, *STORE_METHODS]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_text_with_drafts_equals_text_without_speculation(runs: Runs, method: str) -> None:
    assert runs(method).find_different(runs("none")) == []


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_drafts_equal_stock_speculator_in_every_row(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.mismatches == []
    assert run.state_changes == 0


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_runs_contain_preemptions_rejections_and_grammars(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.preemptions >= 3
    assert run.prefilling >= 10
    assert run.partly_accepted >= 5
    assert run.num_accepted >= 100
    assert run.grammars >= 10
    finish_reasons = [output[0].finish_reason for output in run.outputs]
    assert finish_reasons.count("stop") >= 1
    assert finish_reasons.count("length") >= 12
    assert len(set(map(tuple, run.get_token_ids()))) >= 18


def test_drafts_are_counted_without_padding(runs: Runs) -> None:
    """All drafts have the same length because of the padding."""
    run = runs("async")
    assert 100 < run.num_counted_drafts < len(run.drafts)


@pytest.mark.parametrize("method", AUTO_METHODS)
def test_default_lookup_has_other_drafts_than_vllm(runs: Runs, method: str) -> None:
    run = runs(method)
    assert len(run.mismatches) > 20
    assert run.state_changes == run.waits_in_propose == 0


def test_adaptive_verification_does_not_verify_unlikely_drafts(runs: Runs) -> None:
    assert runs("auto").not_verified == 0
    run = runs("auto-adaptive")
    assert run.not_verified >= 100
    assert run.partly_accepted >= 5


@pytest.mark.parametrize("method", STORE_METHODS)
def test_store_contains_generated_text_only_and_provides_drafts(runs: Runs, method: str) -> None:
    """Prompts, and tokens of steps that ran after the end of a request, are not stored. With
    asynchronous scheduling, tokens that the last step verified after the stop are."""
    run = runs(method)
    assert run.preemptions >= 3
    assert run.state_changes == run.waits_in_propose == 0
    assert run.num_store_drafts >= 20
    assert run.grammars >= 10
    assert run.scopes == 2
    outputs = run.get_token_ids()
    max_excess = K if METHODS[method].asynchronous else 0
    for _, text in run.stored_texts:
        assert any(contains_up_to(output, text, max_excess) for output in outputs), text
    assert run.store is not None
    assert run.store.tokens_held == sum(len(text) for _, text in run.stored_texts)
    assert run.store.tokens_held > sum(map(len, outputs)) / 2
    assert len(run.mismatches) > 20
    assert run.num_accepted > runs("stock").num_accepted


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_step_waits_as_often_as_with_stock_speculator(runs: Runs, method: str) -> None:
    """A step waits only for its sampled tokens, and for the drafts of requests with a grammar."""
    run, stock = runs(method), runs("stock")
    assert run.waits_in_propose == 0
    assert run.waits > 0
    if METHODS[method].asynchronous:  # both runs have the same steps
        assert (run.waits, run.steps) == (stock.waits, stock.steps)
    else:
        assert run.waits == run.steps + run.grammars


def test_drafts_and_store_end_at_fitted_max_model_len(model: Path) -> None:
    """vLLM reduces max_model_len to fit its KV cache only after it has created the speculator."""
    results = {}
    for method in ("none", "store"):
        results[method] = result = Run()
        with start_engine(model, METHODS[method], max_model_len=-1) as engine:
            max_model_len: int = engine.runner.req_states.max_model_len
            prompts = [prompt for prompt, _ in v2_runs.make_requests(model)[:5]]
            engine.serve([(prompt, make_params(2000)) for prompt in prompts], result)
            if method == "store":
                num_stored = engine.store.statistics.tokens_held
        assert max_model_len < 2000
        assert {output[0].finish_reason for output in result.outputs} == {"length"}
    assert result.num_accepted > 0
    token_ids = result.get_token_ids()
    for tokens, expected in zip(token_ids, results["none"].get_token_ids(), strict=True):
        assert tokens == expected[: len(tokens)]
    num_generated = sum(map(len, token_ids))
    assert num_generated / 2 < num_stored <= num_generated


@pytest.mark.parametrize("method", ["async", "store", "draft-store"])
def test_warm_up_requests_get_drafts_like_others(
    model: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """vLLM's worker makes up requests to warm up its kernels, which later requests must not see."""
    with start_engine(model, METHODS[method]) as engine:
        recorder = Run()
        if method == "async":
            v2_runs.record_drafts(engine, recorder)
        engine.drafter.propose = propose = Mock(wraps=engine.drafter.propose)
        warmup_args = engine.runner, engine.worker.execute_model, engine.worker.sample_tokens
        monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)  # needs a GPU
        # Triton's interpreter cannot run the kernel for top_k and top_p.
        monkeypatch.setattr(
            SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)
        )
        warmup.warmup_kernels(*warmup_args)
        assert warmup.run_mixed_prefill_decode_warmup(*warmup_args, 8)
        assert sum(not call.kwargs.get("dummy_run") for call in propose.call_args_list) > 5
        result = Run()
        engine.serve(v2_runs.make_requests(model)[:4], result)
        if method == "async":
            assert recorder.steps > 10
        else:
            engine.store.check_integrity()
            assert engine.store.statistics.tokens_held > 50
        del propose, warmup_args
    assert recorder.mismatches == []
    assert result.outputs == runs("none").outputs[:4]
