"""Tests that a request receives only text of its scope from a store, and no text of prompts.

`isolation.py` contains the random steps, and the ledger, which records all texts and checks drafts
and stores. They use no kernel code. A mark is a token that only one request has generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.store.isolation import RandomAsyncSteps, RandomSteps, RandomSynchronousSteps
from ngram_npu import NgramStore

ERROR_MESSAGES = r"was drafted|not a text of|after its end|was stored twice"
RUNNERS = {"synchronous": RandomSynchronousSteps, "asynchronous": RandomAsyncSteps}
EACH_RUNNER = pytest.mark.parametrize("name", RUNNERS)


def run_random_steps(name: str, seed: int, num_row_steps: int, *sizes: int) -> RandomSteps:
    steps = RUNNERS[name](seed, *sizes)
    steps.run(num_row_steps)
    ledger = steps.ledger
    assert ledger.num_drafts > num_row_steps // 10
    assert ledger.num_foreign_drafts > num_row_steps // 50, "drafts from other requests' text"
    assert ledger.num_stored > num_row_steps // 2
    return steps


@EACH_RUNNER
@pytest.mark.parametrize("num_blocks", [8, 512])
def test_store_in_random_steps_mixes_no_texts(name: str, num_blocks: int) -> None:
    run_random_steps(name, 0, 1000, num_blocks)


@pytest.mark.slow
@EACH_RUNNER
@pytest.mark.parametrize("num_blocks", [8, 512])
def test_store_in_many_random_steps_mixes_no_texts(name: str, num_blocks: int) -> None:
    steps = [run_random_steps(name, seed, 5_000, num_blocks) for seed in range(1, 11)]
    assert sum(each.num_row_steps for each in steps) >= 50_000


FAULTS: dict[str, Callable[[Any, Any], None]] = {
    "scopes are not passed": lambda rows, arguments: arguments.update(scopes=None),
    "scopes are permuted": lambda rows, arguments: arguments.update(
        scopes=arguments["scopes"].flip(0)
    ),
    "text is not held back": lambda rows, arguments: (
        arguments.update(hold_back=False) if "hold_back" in arguments else None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_random_steps_detect_wrong_arguments(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("append", "propose"):
        call = getattr(NgramStore, method)

        def call_with_fault(self: Any, *rows: Any, _call: Any = call, **arguments: Any) -> None:
            FAULTS[fault](rows, arguments)
            _call(self, *rows, **arguments)

        monkeypatch.setattr(NgramStore, method, call_with_fault)
    with pytest.raises(AssertionError, match=ERROR_MESSAGES):
        run_random_steps("asynchronous", 0, 3000)
