"""The harness notices every deliberate fault, and any operator that is missing from the loop."""

from __future__ import annotations

import random

import pytest

from async_state.async_proof import caught_by
from async_state.engine import Engine
from async_state.mutants import MUTANTS, OPERATORS
from async_state.scenario import Scenario
from async_state.test_loop import QUICK

RARE = {
    "acceptance forgotten": 23,
    "acceptance of whoever was there before": 23,
    "rebuilt without emptying the index": 25,
}
"""The first scenarios that notice them: those before need not be run."""


@pytest.mark.parametrize("name", MUTANTS)
def test_fault_is_noticed(name: str) -> None:
    found = caught_by(name, RARE.get(name, 0))
    assert found is not None
    assert found[0] < QUICK  # by the fault: without one, test_loop.py runs this scenario


def test_the_loop_uses_the_operators_listed() -> None:
    launched: set[str] = set()
    for seed in range(20):
        engine = Engine(Scenario(random.Random(seed), "eager"))
        engine.run()
        launched |= set(engine.device.launches)
    assert launched == set(OPERATORS)
