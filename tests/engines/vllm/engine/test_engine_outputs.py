"""The real engine, token by token: drafts must never change the output."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import prometheus_client
import pytest
from engine_runs import MAX_MODEL_LEN, K

if TYPE_CHECKING:
    from conftest import Runs
    from engine_runs import Run

SPECULATING = ["ngram", "custom_class", "plugin"]
OURS = ["custom_class", "plugin"]
SETS = ["greedy", "sampled", "structured", "logprobs"]


def _all(run: Run) -> list[list[int]]:
    return [draft for steps in run.drafts.values() for draft in steps.values()]


@pytest.mark.parametrize("method", SPECULATING)
def test_greedy_equals_no_speculation(runs: Runs, method: str) -> None:
    assert runs(method, "greedy").differing(runs("none", "greedy")) == []


@pytest.mark.parametrize("method", ["none", *SPECULATING])
def test_the_greedy_set_meets_what_it_is_for(runs: Runs, method: str) -> None:
    """Without these the comparison above would prove little."""
    run = runs(method, "greedy")
    assert len(run.outputs) >= 40
    assert run.preemptions >= 5
    ends = [output[0].finish_reason for output in run.outputs]
    assert ends.count("stop") >= 6
    assert ends.count("length") >= 20
    assert len({tuple(output[0].token_ids) for output in run.outputs}) >= 40
    if method != "none":
        assert run.accepted >= 300
        assert run.discarded_rows >= 40
        assert max(max(steps) for steps in run.drafts.values()) >= MAX_MODEL_LEN - K


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", SETS)
def test_drafts_equal_the_stock_class_on_the_same_rows(
    runs: Runs, method: str, requests: str
) -> None:
    run = runs(method, requests)
    assert run.mismatches == []
    assert sum(map(bool, _all(run))) >= 50


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", SETS)
def test_drafts_and_outputs_equal_the_stock_run_request_by_request(
    runs: Runs, method: str, requests: str
) -> None:
    run, stock = runs(method, requests), runs("ngram", requests)
    assert run.differing(stock) == []
    if requests != "structured":
        assert run.drafts == stock.drafts
        assert run.accepted == stock.accepted
        return
    # The time at which a grammar is ready varies. It decides which requests share a step and how
    # much room a draft has, so steps do not occur at all the same lengths.
    assert run.drafts.keys() == stock.drafts.keys()
    for request, steps in run.drafts.items():
        common = steps.keys() & stock.drafts[request].keys()
        assert len(common) > len(steps) / 2
        assert all(steps[length] == stock.drafts[request][length] for length in common)


@pytest.mark.parametrize("method", SPECULATING)
def test_structured_output_equals_no_speculation(runs: Runs, method: str) -> None:
    assert runs(method, "structured").differing(runs("none", "structured")) == []


@pytest.mark.parametrize("method", SPECULATING)
@pytest.mark.parametrize("against", ["none", "ngram"])
def test_logprobs_within_rounding(runs: Runs, method: str, against: str) -> None:
    run, other = runs(method, "logprobs"), runs(against, "logprobs")
    assert run.differing(other) == []
    for ours, theirs in zip(run.outputs, other.outputs, strict=True):
        assert ours[0].logprobs is not None
        assert theirs[0].logprobs is not None
        for step, expected in zip(ours[0].logprobs, theirs[0].logprobs, strict=True):
            assert step == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("method", OURS)
def test_no_draft_passes_max_model_len(runs: Runs, method: str) -> None:
    for steps in runs(method, "greedy").drafts.values():
        assert all(length + len(draft) <= MAX_MODEL_LEN for length, draft in steps.items())


def test_metrics_are_in_vllms_registry(runs: Runs) -> None:
    run = runs("custom_class", "greedy")  # of this process: no other file has it
    found: defaultdict[str, float] = defaultdict(float)  # over all models that engines served
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("ngram_npu_"):
                found[sample.name] += sample.value
    drafted = sum(len(draft) for steps in run.drafts.values() for draft in steps.values())
    assert found["ngram_npu_draft_tokens_total"] >= drafted > 0
    assert found["ngram_npu_rows_total"] > found["ngram_npu_drafts_total"] > 0
    assert found["ngram_npu_proposals_total"] > 0
    assert found["ngram_npu_propose_seconds_total"] > 0
