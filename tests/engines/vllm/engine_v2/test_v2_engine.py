"""The V2 runner with our speculator: the text of no speculation, the stock class's drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import v2_runs
from v2_runs import METHODS

if TYPE_CHECKING:
    from conftest import Runs

# Each way of scheduling and each engine are among the others.
SYNC_INDEX = pytest.param("sync-index", marks=pytest.mark.prove)
OURS = ["async-scan", "async-index", "sync-scan", SYNC_INDEX, "late-index"]
LADDERS = ["ladder", "ladder-adaptive"]
STORES = ["store", "store-finish", "late-store"]
SPECULATING = ["stock", *OURS, "other-options", *LADDERS, *STORES]


@pytest.mark.parametrize("method", SPECULATING)
def test_text_equals_no_speculation(runs: Runs, method: str) -> None:
    assert runs(method).differing(runs("none")) == []


@pytest.mark.parametrize("method", OURS)
def test_drafts_equal_the_stock_speculator_in_every_row(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.mismatches == []
    assert run.state_changes == 0
    assert run.found >= 50


@pytest.mark.parametrize("method", OURS)
def test_the_requests_meet_what_they_are_for(runs: Runs, method: str) -> None:
    """Without these the comparisons above would prove little."""
    run = runs(method)
    assert run.preemptions >= 3
    assert run.prefilling >= 10
    assert run.partly_accepted >= 5
    assert run.accepted >= 100
    assert run.grammars >= 10
    ends = [reason for _, reason in run.outputs]
    assert ends.count("stop") >= 1
    assert ends.count("length") >= 12
    assert len({tuple(tokens) for tokens, _ in run.outputs}) >= 18


@pytest.mark.parametrize("method", ["async-index", "sync-scan"])
def test_found_tokens_that_were_accepted_are_counted(runs: Runs, method: str) -> None:
    """vLLM also counts tokens that fill up a draft."""
    run = runs(method)
    verified, accepted = run.counted.sum(1)
    assert verified > accepted
    assert run.accepted >= accepted > run.accepted / 2


@pytest.mark.parametrize("method", ["none", *SPECULATING])
def test_asynchronous_where_asked_for(runs: Runs, method: str) -> None:
    assert runs(method).batch_queue_size == (2 if METHODS[method].asynchronous else 1)


def test_other_options_show_in_the_drafts_alone(runs: Runs) -> None:
    assert runs("other-options").mismatches
    assert runs("other-options").state_changes == 0


@pytest.mark.parametrize("method", LADDERS)
def test_a_ladders_drafts_end_early_only_where_that_saves_work(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.mismatches
    assert run.state_changes == run.waits_in_propose == 0
    verified, accepted = run.counted
    assert verified.sum() > accepted.sum() >= 50
    assert (verified[-1] < verified[0]) == METHODS[method].adaptive


def test_what_is_unlikely_is_not_verified_where_vllm_may_choose(runs: Runs) -> None:
    assert runs("ladder").left_out == 0
    run = runs("ladder-adaptive")
    assert run.left_out >= 100
    assert run.partly_accepted >= 5


@pytest.mark.parametrize("method", STORES)
def test_requests_draft_from_what_others_said(runs: Runs, method: str) -> None:
    run = runs(method)
    assert run.preemptions >= 3
    assert run.state_changes == run.waits_in_propose == 0
    assert run.store is not None
    assert run.store.drafts >= 20
    assert run.store.calls_busy == 0
    assert run.grammars >= 10
    assert run.scopes == 2
    generated = sum(len(tokens) for tokens, _ in run.outputs)
    assert generated / 2 < run.store.tokens_entered <= generated, "nothing behind an end is stored"


def test_late_jobs_draft_what_they_would_at_once(runs: Runs) -> None:
    """Also for requests with a grammar or a scope, and where rows are given away meanwhile."""
    late, at_once = runs("late-store"), runs("store")
    assert late.drafts == at_once.drafts
    assert late.accepted == at_once.accepted
    assert late.announced >= 20


def test_jobs_before_their_copies_are_noticed(model: Path, runs: Runs) -> None:
    hasty = replace(METHODS["late-index"], stream=v2_runs.HastyStream)
    run = v2_runs.run(model, hasty, first=4)
    assert len(run.mismatches) >= 10
    assert run.outputs == runs("none").outputs[:4], "the text does not depend on it"


@pytest.mark.parametrize("method", OURS)
def test_nothing_waits_for_the_device_that_did_not(runs: Runs, method: str) -> None:
    """A step waits only for its sampled tokens, and for the drafts of requests with a grammar, with
    the stock speculator and with ours."""
    run, stock = runs(method), runs("stock")
    assert run.waits_in_propose == 0
    assert run.waits > 0
    if METHODS[method].asynchronous:  # then both have the same steps
        assert (run.waits, run.steps) == (stock.waits, stock.steps)
    else:
        assert run.waits == run.steps + run.grammars
