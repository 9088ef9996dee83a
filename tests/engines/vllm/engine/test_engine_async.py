"""The real engine under asynchronous scheduling, on V1's runner, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import request_sets
import vllm
from engine_runs import METHODS, Engine, engine
from transformers import AutoTokenizer
from wrong_proposers import WrongAsyncProposer

if TYPE_CHECKING:
    from conftest import Runs

OURS = ["padded", "trimmed", "padded_scan"]
SETS = ["greedy", "sampled", "logprobs"]
EXACT = ["greedy", "logprobs"]
"""Sets whose drafts use no random numbers; sampled requests would get other ones."""


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", EXACT)
def test_the_text_is_that_of_no_speculation(runs: Runs, method: str, requests: str) -> None:
    assert runs(method, requests).differing(runs("none", requests)) == []


@pytest.mark.parametrize("method", ["padded", "padded_scan"])
def test_padded_drafts_go_with_grammars(runs: Runs, method: str) -> None:
    assert runs(method, "structured").differing(runs("none", "structured")) == []


def test_trimmed_drafts_do_not(runs: Runs) -> None:
    """A fault of vLLM's, mended in 0.33."""
    expected = runs("none", "structured")
    wrong = runs("async_stock", "structured").differing(expected)
    assert len(wrong) >= 5 if vllm.__version__.startswith("0.32.") else wrong == []
    assert runs("trimmed", "structured").differing(expected) == wrong


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", [*SETS, "structured"])
def test_drafts_equal_the_stock_class_on_the_same_rows(
    runs: Runs, method: str, requests: str
) -> None:
    run = runs(method, requests)
    assert run.mismatches == []
    assert sum(bool(draft) for steps in run.drafts.values() for draft in steps.values()) >= 20


@pytest.mark.parametrize("requests", SETS)
def test_trimmed_drafts_are_the_stock_runs(runs: Runs, requests: str) -> None:
    run, stock = runs("trimmed", requests), runs("async_stock", requests)
    assert run.differing(stock) == []
    assert run.drafts == stock.drafts
    assert run.accepted == stock.accepted
    assert run.steps == stock.steps


@pytest.mark.parametrize("method", OURS)
def test_the_greedy_set_meets_what_it_is_for(runs: Runs, method: str) -> None:
    run = runs(method, "greedy")
    assert run.preemptions >= 5
    assert run.accepted >= 300
    assert run.discarded_rows >= 40
    drafted = sum(len(draft) for steps in run.drafts.values() for draft in steps.values())
    assert run.accepted < 0.95 * drafted


def test_a_padded_step_waits_for_no_number_of_drafts(runs: Runs) -> None:
    stock = runs("async_stock", "greedy")
    assert stock.waits >= stock.steps
    assert runs("trimmed", "greedy").waits == stock.waits
    assert [runs("padded", requests).waits for requests in SETS] == [0, 0, 0]


@pytest.mark.parametrize("method", ["kept", "trimmed_kept"])
def test_drafting_that_is_kept_up(runs: Runs, method: str) -> None:
    """As for models whose layers keep a state, which this one has not."""
    run = runs(method, "greedy")
    assert run.differing(runs("none", "greedy")) == []
    drafts = [draft for steps in run.drafts.values() for draft in steps.values()]
    assert all(drafts)
    assert run.mismatches  # the stock class has none there


@pytest.fixture(scope="module")
def wrong(model: Path, runs: Runs) -> Iterator[Engine]:
    for method in ("none", *OURS, "async_stock"):  # first: a process can have one engine at a time
        for requests in SETS:
            runs(method, requests)
    with engine(model, METHODS["padded"], WrongAsyncProposer) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(model: Path) -> request_sets.Prompts:
    return request_sets.Prompts(AutoTokenizer.from_pretrained(model))


@pytest.mark.parametrize(
    ("fault", "least"), [("wrong_next_token", 10), ("wrong_count", 5), ("not_padded", 0)]
)
def test_a_wrong_proposer_is_found(
    runs: Runs,
    wrong: Engine,
    prompts: request_sets.Prompts,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    least: int,
) -> None:
    monkeypatch.setattr(WrongAsyncProposer, "fault", fault)
    run = wrong.run(request_sets.greedy(prompts))
    assert len(run.differing(runs("none", "greedy"))) >= least
    assert run.mismatches or least


def test_random_drafts_show_in_the_drafts_alone(
    runs: Runs, wrong: Engine, prompts: request_sets.Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongAsyncProposer, "fault", "random_draft")
    run = wrong.run(request_sets.greedy(prompts))
    assert run.differing(runs("none", "greedy")) == []
    assert run.mismatches
