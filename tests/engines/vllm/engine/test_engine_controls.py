"""The comparisons can fail: they find deliberate faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import request_sets
from engine_runs import ENGINE, LOOKUP, METHODS, Engine, custom_class, engine
from ngram_npu import _C
from transformers import AutoTokenizer
from wrong_proposers import WrongProposer

if TYPE_CHECKING:
    from conftest import Runs


@pytest.fixture(scope="module")
def prompts(model: Path) -> request_sets.Prompts:
    return request_sets.Prompts(AutoTokenizer.from_pretrained(model))


@pytest.fixture
def wrong(model: Path, runs: Runs) -> Iterator[Engine]:
    for method in ("none", "ngram"):  # first: a process can have one engine at a time
        runs(method, "greedy")
    with engine(model, custom_class("wrong_proposers.WrongProposer")) as running:
        yield running


@pytest.mark.parametrize("fault", ["wrong_next_token", "wrong_context", "wrong_count"])
def test_a_wrong_proposer_is_found(
    runs: Runs,
    wrong: Engine,
    prompts: request_sets.Prompts,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(WrongProposer, "fault", fault)
    run = wrong.run(request_sets.greedy(prompts))
    assert len(run.differing(runs("none", "greedy"))) >= 10


def test_random_drafts_do_not_show(
    runs: Runs, wrong: Engine, prompts: request_sets.Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongProposer, "fault", "random_draft")
    run = wrong.run(request_sets.greedy(prompts))
    assert run.differing(runs("none", "greedy")) == []
    assert run.drafts != runs("ngram", "greedy").drafts
    assert run.accepted < runs("ngram", "greedy").accepted


def test_requests_that_are_mixed_up_cost_drafts_at_most(
    model: Path, runs: Runs, prompts: request_sets.Prompts
) -> None:
    """An index that describes another request's tokens does not change the text."""
    expected = runs("none", "greedy")
    with engine(model, custom_class("wrong_proposers.MixedUpProposer")) as running:
        run = running.run(request_sets.greedy(prompts))
        index = running.drafter.engine.index
        index.check_integrity()
    statistics = index.statistics
    assert run.differing(expected) == []
    cached = ENGINE["block_size"] * ENGINE["num_gpu_blocks_override"]
    assert statistics.num_pages == _C.index_pages(cached, index.num_slots, *LOOKUP.values(), False)
    assert statistics.rebuilds_shorter + statistics.rebuilds_rewritten > 100  # mixed up indeed
    assert run.accepted > 0


def test_another_policy_shows_in_the_drafts_alone(
    model: Path, runs: Runs, prompts: request_sets.Prompts
) -> None:
    expected, stock = runs("none", "greedy"), runs("ngram", "greedy")
    latest = {"ngram_npu": {**LOOKUP, "match_policy": "latest"}}
    method = replace(METHODS["custom_class"], additional_config=latest)
    with engine(model, method) as running:
        run = running.run(request_sets.greedy(prompts))
    assert run.differing(expected) == []
    assert run.mismatches
    assert run.drafts != stock.drafts
