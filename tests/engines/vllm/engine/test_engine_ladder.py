"""Drafts of a length chosen by cost, and a store that requests share, in the real engine on V1's
runner, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engine_runs import K
from ngram_npu.engines.vllm.sharing import SharedStore

if TYPE_CHECKING:
    from conftest import Runs

LADDERS = ["ladder", "ladder_padded"]


@pytest.mark.parametrize("method", LADDERS)
@pytest.mark.parametrize("requests", ["greedy", "structured"])
def test_the_text_is_that_of_no_speculation(runs: Runs, method: str, requests: str) -> None:
    assert runs(method, requests).differing(runs("none", requests)) == []


@pytest.mark.parametrize("method", LADDERS)
def test_the_requests_meet_what_they_are_for(runs: Runs, method: str) -> None:
    run = runs(method, "greedy")
    assert run.mismatches  # the stock class has other drafts
    assert run.preemptions >= 5
    assert run.discarded_rows >= 40
    assert run.accepted >= 300


def test_drafts_have_all_lengths(runs: Runs) -> None:
    drafts = [d for steps in runs("ladder", "greedy").drafts.values() for d in steps.values()]
    counts = [sum(len(draft) == length for draft in drafts) for length in range(K + 1)]
    assert min(counts) >= 20


def test_nobody_waits_for_padded_drafts(runs: Runs) -> None:
    assert runs("ladder_padded", "greedy").waits == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SharedStore]:
    """The stores of the engines that are started in the test."""
    stores: list[SharedStore] = []
    announce = SharedStore.announce

    def noted(self: SharedStore, *arguments: Any, **keywords: Any) -> None:
        stores.append(self)
        announce(self, *arguments, **keywords)

    monkeypatch.setattr(SharedStore, "announce", noted)
    return stores


@pytest.mark.parametrize("method", ["store", "store_padded"])
def test_a_store_leaves_the_text_and_is_drafted_from(
    runs: Runs, method: str, made: list[SharedStore]
) -> None:
    run = runs(method, "greedy")
    assert run.differing(runs("none", "greedy")) == []
    assert run.preemptions >= 5
    assert run.accepted >= 300
    held = made[0].contents
    held.check_integrity()
    found = held.statistics
    assert found.drafts >= 20, "the store matters"
    assert found.calls_busy == 0
    # One engine generated all of these; tokens sampled after a stop are entered too.
    done = [runs(method, name) for name in ("greedy", "structured", "logprobs")]
    generated = sum(len(o.token_ids) for each in done for samples in each.outputs for o in samples)
    assert 0.5 * generated < found.tokens_entered < 1.1 * generated
