"""Tests that the V2 runner with our speculator generates the same text as without speculation, and
the same drafts as vLLM's own speculator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import v2_runs
from engines import make_params, start_engine
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE
from v2_runs import METHODS, Run
from vllm import SamplingParams
from vllm.v1.worker.gpu import warmup

if TYPE_CHECKING:
    from conftest import Runs

# Slow, so only in `make prove`: sync-scan and async-index together cover the same code.
SYNC_INDEX = pytest.param("sync-index", marks=pytest.mark.prove)
COMPARED_METHODS = ["async-scan", "async-index", "sync-scan", SYNC_INDEX, "late-index"]
LADDER_METHODS = ["ladder", "ladder-adaptive"]
STORE_METHODS = ["store", "store-finish", "late-store"]
ALL_METHODS = ["stock", *COMPARED_METHODS, *LADDER_METHODS, *STORE_METHODS]


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


@pytest.mark.parametrize("method", ["async-index", "sync-scan"])
def test_accepted_tokens_are_counted_without_padding(runs: Runs, method: str) -> None:
    """vLLM's own count includes accepted padding."""
    run = runs(method)
    num_verified, num_accepted = run.draft_counts.sum(1)
    assert num_verified > num_accepted
    assert run.num_accepted >= num_accepted > run.num_accepted / 2


@pytest.mark.parametrize("method", LADDER_METHODS)
def test_ladder_shortens_drafts_only_if_verification_is_adaptive(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.mismatches
    assert run.state_changes == run.waits_in_propose == 0
    num_verified, num_accepted = run.draft_counts
    assert num_verified.sum() > num_accepted.sum() >= 50
    assert (num_verified[-1] < num_verified[0]) == METHODS[method].is_adaptive


def test_adaptive_verification_does_not_verify_unlikely_drafts(runs: Runs) -> None:
    assert runs("ladder").not_verified == 0
    run = runs("ladder-adaptive")
    assert run.not_verified >= 100
    assert run.partly_accepted >= 5


@pytest.mark.parametrize("method", STORE_METHODS)
def test_store_receives_generated_tokens_and_provides_drafts(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.preemptions >= 3
    assert run.state_changes == run.waits_in_propose == 0
    assert run.store is not None
    assert run.store.drafts >= 20
    assert run.store.calls_skipped == 0
    assert run.grammars >= 10
    assert run.scopes == 2
    num_generated = sum(map(len, run.get_token_ids()))
    # Tokens after a stop must not be stored.
    assert num_generated / 2 < run.store.tokens_inserted <= num_generated


def test_delayed_jobs_return_same_drafts_as_immediate_jobs(runs: Runs) -> None:
    """Some requests have a grammar or a scope, and some rows are reused while jobs wait."""
    delayed, immediate = runs("late-store"), runs("store")
    assert delayed.drafts == immediate.drafts
    assert delayed.num_accepted == immediate.num_accepted
    assert delayed.changes_while_pending >= 20


def test_jobs_that_run_before_their_copies_return_wrong_drafts(model: Path, runs: Runs) -> None:
    run = v2_runs.run_method(model, "late-index", 4, v2_runs.UnorderedStream)
    assert len(run.mismatches) >= 10
    assert run.outputs == runs("none").outputs[:4]


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
                statistics = engine.drafter.shared_store.contents.statistics
        assert max_model_len < 2000
        assert {output[0].finish_reason for output in result.outputs} == {"length"}
    assert result.num_accepted > 0
    token_ids = result.get_token_ids()
    for tokens, expected in zip(token_ids, results["none"].get_token_ids(), strict=True):
        assert tokens == expected[: len(tokens)]
    num_generated = sum(map(len, token_ids))
    assert num_generated / 2 < statistics.tokens_inserted <= num_generated


@pytest.mark.parametrize("method", ["store", "draft-store"])
def test_warm_up_requests_leave_store_index_and_metrics_empty(
    model: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with start_engine(model, METHODS[method].with_options(metrics=True)) as engine:
        lookup = getattr(engine.drafter, LOOKUP_ATTRIBUTE, engine.drafter)
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
        store, counts = lookup.shared_store.contents, lookup._stats._sums
        statistics = store.statistics
        assert statistics.lookups == statistics.tokens_inserted == statistics.open_slots == 0
        assert set(counts.values()) == {0}
        assert lookup.index.statistics.rows_indexed == 0
        engine.serve(v2_runs.make_requests(model)[:4], Run())
        assert store.statistics.tokens_inserted > 50
        assert lookup._stats._sums["rows"] > 30
        del lookup, propose, warmup_args, store, counts
