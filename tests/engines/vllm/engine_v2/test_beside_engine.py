"""The V2 runner with n-gram drafts beside a neural drafter: the text is that without speculation,
and the rule chooses each row's draft from the two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import beside_runs
import pytest
import torch
import toy_drafters
import v2_runs
from ngram_npu.engines.vllm.v2 import unsupported_reason
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.states import RequestState

if TYPE_CHECKING:
    from conftest import Runs

# Each drafter, way of scheduling and engine of the lookup is in the other two.
DRAFT_SYNC, EAGLE_ASYNC = (
    pytest.param(method, marks=pytest.mark.prove) for method in ("draft-sync", "eagle-async")
)
COMPARED = ["draft-async", DRAFT_SYNC, EAGLE_ASYNC, "eagle-sync"]
STORES = ["draft-store", "eagle-store"]


@pytest.mark.parametrize("method", [*COMPARED, *STORES, "adaptive"])
def test_text_equals_no_speculation(runs: Runs, method: str) -> None:
    assert runs.beside(method).differing(runs("none")) == []


@pytest.mark.parametrize("method", COMPARED)
def test_every_draft_is_the_one_that_the_rule_chooses(runs: Runs, method: str) -> None:
    run = runs.beside(method)
    assert run.mismatches == []
    assert run.replaced >= 15
    assert run.kept >= 40


@pytest.mark.parametrize("method", [*COMPARED, *STORES, "adaptive"])
def test_the_runners_state_stays_and_nothing_waits(runs: Runs, method: str) -> None:
    run = runs.beside(method)
    assert run.state_changes == run.waits_in_propose == 0


@pytest.mark.parametrize("method", COMPARED)
def test_the_requests_meet_what_they_are_for(runs: Runs, method: str) -> None:
    """Without these the comparisons above would prove little."""
    run = runs.beside(method)
    assert run.preemptions >= 3
    assert run.prefilling >= 10
    assert run.partly_accepted >= 5
    assert run.accepted >= 100
    assert run.batch_queue_size == (2 if method.endswith("async") else 1)


@pytest.mark.parametrize("method", STORES)
def test_a_store_beside_a_drafter(runs: Runs, method: str) -> None:
    run = runs.beside(method)
    assert run.replaced >= 15
    assert run.preemptions >= 3
    assert run.store is not None
    assert run.store.calls_busy == 0
    assert run.store.drafts >= 10
    assert run.store.tokens_entered >= sum(len(tokens) for tokens, _ in run.outputs) / 2


@pytest.mark.parametrize("method", ["draft-async", EAGLE_ASYNC])
def test_what_was_accepted_is_counted(runs: Runs, method: str) -> None:
    run = runs.beside(method)
    verified, accepted = run.counted.sum(1)
    assert verified > accepted
    # These counts include the step that still runs when a request has ended.
    assert 0.5 < accepted / run.accepted < 1.5


def test_steps_without_drafts_lie_between_others(runs: Runs) -> None:
    """A batch may be too large for drafts."""
    run = runs.beside("eagle-at-times")
    assert run.outputs == runs("none").outputs[: len(run.outputs)]
    assert min(run.without, run.steps - run.without) >= 10
    assert run.accepted >= 20


def test_drafts_of_wrong_rows_leave_the_text_and_are_noticed(runs: Runs) -> None:
    wrong, right = runs.beside("wrong-rows"), runs.beside("eagle-sync")
    assert wrong.outputs == runs("none").outputs[: len(wrong.outputs)]
    assert len(wrong.mismatches) >= 10
    assert wrong.accepted / wrong.rows < right.accepted / right.rows


def test_the_estimator_sees_its_own_drafts_alone(runs: Runs) -> None:
    run = runs.beside("adaptive")
    neural, ngram = run.estimated
    assert run.replaced >= 15
    assert neural >= 20
    assert ngram == 0
    assert run.left_out >= 20


def test_an_estimator_that_sees_the_others_is_noticed(runs: Runs) -> None:
    run = runs.beside("not-isolated")
    assert run.estimated[1] >= 5
    assert run.outputs == runs("none").outputs[: len(run.outputs)], "the text does not depend on it"


def test_beside_mtp(model: Path, tmp_path: Path) -> None:
    target = toy_drafters.target_with_mtp(model, tmp_path)
    alone, method = v2_runs.Run(), beside_runs.METHODS["mtp"]
    arguments = {**v2_runs.ENGINE, "load_format": "dummy"}
    with v2_runs.engine(target, arguments, alone) as (llm, runner):
        v2_runs.serve(llm, v2_runs.requests(llm.get_tokenizer())[: method.first], alone)
        del llm, runner
    run = beside_runs.run(target, method)
    assert run.differing(alone) == []
    assert run.mismatches == []
    assert min(run.replaced, run.kept) >= 15
    assert run.accepted >= 50


def test_eagle3_for_which_there_is_no_toy_is_known() -> None:
    """The part of vLLM's own class that is read."""
    made = EagleSpeculator.__new__(EagleSpeculator)
    made.draft_logits = None
    given = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle3"))
    state = RequestState(2, 64, 64, 4, 1000, torch.device("cpu"))
    assert unsupported_reason(given, None, torch.device("cpu"), state, made) == ""
