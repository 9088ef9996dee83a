"""Tests that an engine of either runner with our drafter generates the same text as without
speculation, drafts as vLLM's own class does, and stores the text that it generates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import RUNNER, K, contains_up_to, start_engine
from ngram_npu.engines.vllm import scheduler as scheduler_module
from ngram_npu.store import SHARED_SCOPE, scope_of_request
from runs import METHODS, METRICS, PRIVATE_STORE, Run, knows_salts, make_requests

if TYPE_CHECKING:
    from conftest import Runs

# V2's synchronous and asynchronous steps call the same function, and "store-sync" runs the former.
COMPARED_METHODS = ["async", pytest.param("sync", marks=[pytest.mark.prove] * (RUNNER == "v2"))]
STORE_METHODS = ["store", "store-sync"]
PERIOD = 7
"""Number of steps after which drafting is switched."""


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_text_and_drafts_equal_those_of_vllm(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.find_different(runs("none")) == []
    assert run.mismatches == []


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_runs_contain_preemptions_rejections_and_stops(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.preemptions >= 3
    assert run.num_in_prefill >= 10
    assert 50 <= run.num_accepted < 0.9 * K * run.num_drafts
    finish_reasons = [output.finish_reason for output in run.outputs]
    assert finish_reasons.count("stop") >= 2
    assert finish_reasons.count("length") >= 8
    assert len(set(map(tuple, run.get_token_ids()))) >= 14


def test_drafts_are_counted_without_padding(runs: Runs) -> None:
    """All drafts have the same length because of the padding."""
    run = runs("async")
    assert 30 < run.num_counted_drafts < run.num_drafts


@pytest.mark.parametrize("method", STORE_METHODS)
def test_store_contains_generated_text_of_its_scope_and_provides_drafts(
    runs: Runs, method: str
) -> None:
    """Prompts are not stored. Tokens that the last step of a request verified after the stop may
    be. With the scope "private", only requests with a salt share text."""
    run = runs(method)
    assert run.find_different(runs("none")) == []
    assert run.preemptions >= 3
    assert run.num_store_drafts >= 10
    outputs = run.get_token_ids()
    scopes = {scope_of_request("tenant")} if knows_salts(METHODS[method]) else set()
    if METHODS[method].options == PRIVATE_STORE | METRICS:
        outputs = outputs[2::4] + outputs[3::4]
    else:
        scopes.add(SHARED_SCOPE)
    assert {scope for scope, _ in run.stored_texts} == scopes
    for _, text in run.stored_texts:
        assert any(contains_up_to(output, text, K) for output in outputs), text
    num_generated = sum(map(len, outputs))
    assert num_generated / 2 < sum(len(text) for _, text in run.stored_texts) < 1.1 * num_generated


def test_switch_keeps_text_and_stops_drafts(model: Path, runs: Runs) -> None:
    scheduler_module.install()
    steps, result = list[tuple[bool, int]](), Run()
    # A preempted request, or one with a prefix hit, may begin with a step that vLLM pads.
    options: dict[str, Any] = {"enable_prefix_caching": False, "num_gpu_blocks_override": 100}
    with start_engine(model, METHODS["store"], **options) as engine:
        scheduler = engine.find_scheduler()
        stock_schedule = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            enabled = len(steps) // PERIOD % 2 == 0
            if len(steps) % PERIOD == 0:
                engine.llm.collective_rpc(scheduler_module.METHOD, args=(enabled,))
            output = stock_schedule(*args, **kwargs)
            num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            # The first step after a switch still has the drafts of the step before.
            steps.append((enabled or len(steps) % PERIOD == 0, num_drafts))
            return output

        scheduler.schedule = schedule
        engine.serve(make_requests(model)[:10], result)
    assert result.find_different(runs("none")) == []
    assert sum(num_drafts for is_on, num_drafts in steps if not is_on) == 0
    assert sum(num_drafts for is_on, num_drafts in steps if is_on) > 50
    assert result.num_accepted > 10
