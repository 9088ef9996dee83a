"""Drafts of a length chosen by cost, in the real engine on V1's runner, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_runs import K

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
