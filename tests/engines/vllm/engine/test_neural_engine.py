"""Tests the V2 runner with a neural drafter and n-gram drafts: the text equals that without
speculation, and each row's draft is the one that the reference chooses."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import toy_drafters
import v2_runs
from engines import Method, start_engine
from ngram_npu.engines.vllm.neural import NeuralDrafterWrapper
from ngram_npu.engines.vllm.patching import class_mismatch
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

if TYPE_CHECKING:
    from conftest import Runs

# Slow, so only in `make prove`: draft-async and eagle-sync together cover the same code.
# draft-store and eagle-sync cover that of eagle-store.
DRAFT_SYNC, EAGLE_ASYNC, EAGLE_STORE = (
    pytest.param(method, marks=pytest.mark.prove)
    for method in ("draft-sync", "eagle-async", "eagle-store")
)
COMPARED_METHODS = ["draft-async", DRAFT_SYNC, EAGLE_ASYNC, "eagle-sync", "successors"]
STORE_METHODS = ["draft-store", EAGLE_STORE]


@pytest.mark.parametrize("method", [*COMPARED_METHODS, *STORE_METHODS, "adaptive", "candidates"])
def test_text_with_drafts_equals_text_without_speculation(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.find_different(runs("none")) == []
    assert run.state_changes == run.waits_in_propose == 0


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_drafts_equal_choice_of_reference(runs: Runs, method: str) -> None:
    """Also checks that the runs contain preemptions and rejections."""
    run = runs(method)
    assert run.mismatches == []
    assert run.num_replaced >= 15
    assert run.num_kept >= 40
    assert run.preemptions >= 3
    assert run.prefilling >= 10
    assert run.partly_accepted >= 5
    assert run.num_accepted >= 100


@pytest.mark.parametrize("method", STORE_METHODS)
def test_store_with_neural_drafter_receives_and_drafts_text(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.num_replaced >= 15
    assert run.preemptions >= 3
    assert run.num_store_drafts >= 10
    assert run.store is not None
    assert run.store.tokens_held >= sum(map(len, run.get_token_ids())) / 2


def test_steps_without_drafts_do_not_change_text(runs: Runs) -> None:
    """vLLM requests drafts only in steps with one request."""
    run = runs("eagle-small-batches")
    assert run.outputs == runs("none").outputs[: len(run.outputs)]
    assert min(run.steps_without_drafts, run.steps - run.steps_without_drafts) >= 10
    assert run.num_accepted >= 20


def test_acceptance_estimator_receives_neural_drafts_only(runs: Runs) -> None:
    run = runs("adaptive")
    assert run.num_replaced >= 15
    assert run.neural_results >= 20
    assert run.ngram_results == 0
    assert run.not_verified >= 20


def test_text_with_mtp_drafter_equals_text_without_speculation(model: Path, tmp_path: Path) -> None:
    target = toy_drafters.write_target_with_mtp(model, tmp_path)
    expected = v2_runs.Run()
    with start_engine(target, Method(asynchronous=True), load_format="dummy") as engine:
        engine.serve(v2_runs.make_requests(target)[:8], expected)
    run = v2_runs.run_method(target, "mtp")
    assert run.find_different(expected) == []
    assert run.mismatches == []
    assert min(run.num_replaced, run.num_kept) >= 15
    assert run.num_accepted >= 50


def test_every_neural_speculator_of_vllm_has_the_expected_methods() -> None:
    """No toy drafter uses most of them, so this tests only their signatures."""
    pending, names = [DraftModelSpeculator], []
    for module in pkgutil.walk_packages(spec_decode.__path__, f"{spec_decode.__name__}."):
        importlib.import_module(module.name)
    while pending:
        speculator = pending.pop()
        pending += speculator.__subclasses__()
        names.append(speculator.__name__)
        methods = "propose", "observe_verification"
        assert class_mismatch(names[-1], speculator, NeuralDrafterWrapper, *methods) == ""
    assert {"EagleSpeculator", "DFlashSpeculator", "MultiModuleMTPSpeculator"} <= {*names}
