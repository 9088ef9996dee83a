"""Tests that a request receives only text of its scope from a store, and no text of prompts.

`isolation.py` contains the random steps, and the ledger, which records all texts and checks drafts
and stores. They use no kernel code. A mark is a token that only one request has generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.store.isolation import RandomAsyncSteps
from ngram_npu.async_state import device_state
from ngram_npu.config import STORES
from ngram_npu.drafting import Drafting

ERROR_MESSAGES = r"was drafted|not a text of|after its end|a draft for padding"
NAMES = [f"{draft_on} {visibility}" for draft_on in ("device", "host") for visibility in STORES]


def run_random_steps(name: str, seed: int, num_row_steps: int) -> RandomAsyncSteps:
    draft_on, visibility = name.split()
    steps = RandomAsyncSteps(seed, visibility, draft_on)
    steps.run(num_row_steps)
    steps.check()
    ledger = steps.ledger
    assert ledger.num_drafts > num_row_steps // 5
    assert ledger.num_foreign_drafts > num_row_steps // 20, "drafts from other requests' text"
    assert ledger.num_stored > num_row_steps
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_store_in_random_steps_mixes_no_texts(name: str) -> None:
    run_random_steps(name, 0, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_store_in_many_random_steps_mixes_no_texts(name: str) -> None:
    num_row_steps = sum(run_random_steps(name, seed, 5_000).num_row_steps for seed in range(1, 6))
    assert num_row_steps >= 25_000


FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    "scopes are not passed": lambda rows, scopes: (rows, None),
    "scopes are permuted": lambda rows, scopes: (rows, scopes.flip(0)),
    "rows are too long": lambda rows, scopes: ((rows[0], rows[1] + 1, rows[2]), scopes),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_random_steps_detect_wrong_arguments(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update_store = Drafting._update_store

    def update_with_fault(
        self: Any, rows: Any, drafts: Any, costs: Any, i: Any, slots: Any, scopes: Any, *others: Any
    ) -> None:
        rows, scopes = FAULTS[fault](rows, scopes)
        update_store(self, rows, drafts, costs, i, slots, scopes, *others)

    monkeypatch.setattr(Drafting, "_update_store", update_with_fault)
    with pytest.raises(AssertionError, match=ERROR_MESSAGES):
        run_random_steps("device live", 0, 3000)


def test_random_steps_detect_text_stored_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "LAG", 0)
    with pytest.raises(AssertionError, match=ERROR_MESSAGES):
        run_random_steps("host live", 0, 3000)
