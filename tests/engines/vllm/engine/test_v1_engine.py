"""V1's runner, token by token: drafts never change the output, and equal the stock drafts."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import prometheus_client
import pytest
import v1_runs
from engines import LOOKUP, K
from ngram_npu import _C
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.engines.vllm.sharing import SharedStore
from v1_runs import MAX_MODEL_LEN, METHODS, OPTIONS, class_method, start_engine

if TYPE_CHECKING:
    from conftest import Runs

OURS = ["custom_class", "plugin"]
SPECULATING = ["ngram", *OURS]
LADDERS = ["ladder", "ladder_padded"]
SETS = ["greedy", "sampled", "structured", "logprobs"]


@pytest.mark.parametrize("method", [*SPECULATING, *LADDERS])
@pytest.mark.parametrize("requests", ["greedy", "structured"])
def test_text_equals_no_speculation(runs: Runs, method: str, requests: str) -> None:
    assert runs(method, requests).find_different(runs("none", requests)) == []


@pytest.mark.parametrize("method", ["none", *SPECULATING])
def test_greedy_requests_have_all_endings(runs: Runs, method: str) -> None:
    run = runs(method, "greedy")
    assert len(run.outputs) >= 40
    ends = [output[0].finish_reason for output in run.outputs]
    assert ends.count("stop") >= 6
    assert ends.count("length") >= 20
    assert len({tuple(output[0].token_ids) for output in run.outputs}) >= 40
    assert run.preemptions >= 5


@pytest.mark.parametrize("method", [*SPECULATING, *LADDERS])
def test_greedy_requests_accept_drafts_and_prefill_in_chunks(runs: Runs, method: str) -> None:
    run = runs(method, "greedy")
    assert run.preemptions >= 5
    assert run.accepted >= 300
    assert run.prefilling_rows >= 40
    if method in SPECULATING:
        assert max(max(steps) for steps in run.steps_of_requests.values()) >= MAX_MODEL_LEN - K


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", SETS)
def test_drafts_equal_stock_class(runs: Runs, method: str, requests: str) -> None:
    """Compares drafts with the stock class on the same rows, and all outputs with its own run."""
    run, stock = runs(method, requests), runs("ngram", requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 50
    assert run.find_different(stock) == []
    if requests != "structured":
        assert run.steps_of_requests == stock.steps_of_requests
        assert run.accepted == stock.accepted
        return
    # The time at which a grammar is ready varies. It decides which requests share a step and how
    # long a draft can be, so steps do not all occur at the same lengths.
    assert run.steps_of_requests.keys() == stock.steps_of_requests.keys()
    for request, steps in run.steps_of_requests.items():
        common = steps.keys() & stock.steps_of_requests[request].keys()
        assert len(common) > len(steps) / 2
        assert all(steps[n] == stock.steps_of_requests[request][n] for n in common)


@pytest.mark.parametrize("method", SPECULATING)
@pytest.mark.parametrize("reference", ["none", "ngram"])
def test_logprobs_equal_within_rounding(runs: Runs, method: str, reference: str) -> None:
    run, other = runs(method, "logprobs"), runs(reference, "logprobs")
    assert run.find_different(other) == []
    for ours, theirs in zip(run.outputs, other.outputs, strict=True):
        for step, expected in zip(ours[0].logprobs, theirs[0].logprobs, strict=True):
            assert step == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("method", OURS)
def test_drafts_end_at_max_model_len(runs: Runs, method: str) -> None:
    for steps in runs(method, "greedy").steps_of_requests.values():
        assert all(length + len(draft) <= MAX_MODEL_LEN for length, draft in steps.items())


def test_metrics_are_in_vllms_registry(runs: Runs) -> None:
    run = runs("custom_class", "greedy")  # runs in this process: no other file uses it
    sums: defaultdict[str, float] = defaultdict(float)  # over all models that engines served
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("ngram_npu_"):
                sums[sample.name] += sample.value
    assert sums["ngram_npu_draft_tokens_total"] >= sum(map(len, run.drafts)) > 0
    assert sums["ngram_npu_rows_total"] > sums["ngram_npu_drafts_total"] > 0
    assert sums["ngram_npu_proposals_total"] > 0
    assert sums["ngram_npu_propose_seconds_total"] > 0


def test_ladder_drafts_have_all_lengths(runs: Runs) -> None:
    lengths = [len(draft) for draft in runs("ladder", "greedy").drafts]
    assert min(lengths.count(length) for length in range(K + 1)) >= 20
    for method in LADDERS:
        assert runs(method, "greedy").mismatches, "the stock class drafts differently"
    assert runs("ladder_padded", "greedy").waits == 0


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[SharedStore]:
    """The stores of the engines that start during the test."""
    stores: list[SharedStore] = []
    start_saving = SharedStore.start_saving

    def start_and_record(self: SharedStore, owner: object) -> None:
        stores.append(self)
        start_saving(self, owner)

    monkeypatch.setattr(SharedStore, "start_saving", start_and_record)
    return stores


@pytest.mark.parametrize("method", ["store", "store_padded"])
def test_store_contains_generated_tokens_and_drafts(
    runs: Runs, method: str, stores: list[SharedStore]
) -> None:
    for requests in ("greedy", "structured"):
        assert runs(method, requests).find_different(runs("none", requests)) == []
    assert runs(method, "greedy").preemptions >= 5
    assert runs(method, "greedy").accepted >= 300
    store = stores[0].contents
    store.check_integrity()
    assert store.statistics.drafts >= 20
    assert store.statistics.calls_busy == 0
    # One engine generated all of these; tokens sampled after a stop are stored, too.
    generated = runs.count_output_tokens(method, "greedy", "structured", "logprobs")
    assert 0.5 * generated < store.statistics.tokens_entered < 1.1 * generated


class RandomProposer(NgramProposer):
    """Replaces some drafts by random tokens."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        chooser = random.Random(int(num_tokens_no_spec.sum()))
        for draft in drafts:
            if chooser.random() < 0.1:
                draft[:] = [chooser.randrange(1000) for _ in draft]
        return drafts


class ShuffledRows:
    """A row recognizer that assigns rows to random requests in every step."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._rng = np.random.default_rng(0)

    def assign(self, *arguments: Any) -> Any:
        slots, _ = self._rows.assign(*arguments)
        return self._rng.permutation(slots), np.zeros(0, np.int64)

    def free_absent_slots(self, steps: int) -> Any:
        return self._rows.free_absent_slots(steps)


class ShuffledProposer(NgramProposer):
    """Its index receives the tokens of other requests."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        engine: Any = self.engine
        engine._rows = ShuffledRows(engine._rows)


def _run_greedy(model: Path, method: v1_runs.Method) -> tuple[v1_runs.Run, Any]:
    """Returns the results, and the index of the drafter if it has one."""
    with start_engine(model, method) as engine:
        run = engine.run(v1_runs.make_greedy(v1_runs.Prompts(model)))
        index = getattr(engine.drafter.engine, "index", None)
        if index is not None:
            index.check_integrity()
    return run, index


def test_random_drafts_do_not_change_text(model: Path, runs: Runs) -> None:
    expected, stock = runs("none", "greedy"), runs("ngram", "greedy")
    method = class_method(v1_runs.INDEX, f"{__name__}.RandomProposer")
    run, _ = _run_greedy(model, method)
    assert run.find_different(expected) == []
    assert run.steps_of_requests != stock.steps_of_requests
    assert run.accepted < stock.accepted


def test_index_with_wrong_requests_does_not_change_text(model: Path, runs: Runs) -> None:
    expected = runs("none", "greedy")
    method = class_method(v1_runs.INDEX, f"{__name__}.ShuffledProposer")
    run, index = _run_greedy(model, method)
    assert run.find_different(expected) == []
    cached = OPTIONS["block_size"] * OPTIONS["num_gpu_blocks_override"]
    pages = _C.index_pages(cached, index.num_slots, *LOOKUP.values(), False)
    assert index.statistics.num_pages == pages
    rebuilds = index.statistics.rebuilds_shorter + index.statistics.rebuilds_rewritten
    assert rebuilds > 100
    assert run.accepted > 0


def test_match_policy_changes_drafts_only(model: Path, runs: Runs) -> None:
    expected, stock = runs("none", "greedy"), runs("ngram", "greedy")
    latest = {"ngram_npu": {**LOOKUP, "match_policy": "latest"}}
    run, _ = _run_greedy(model, replace(METHODS["custom_class"], additional_config=latest))
    assert run.find_different(expected) == []
    assert run.mismatches
    assert run.steps_of_requests != stock.steps_of_requests
