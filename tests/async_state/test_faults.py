"""The harness notices every deliberate fault, and any operator that is missing from the loop."""

from __future__ import annotations

import random

import pytest

from async_state.engine import Engine, run
from async_state.mutants import MUTANTS, OPERATORS
from async_state.scenario import Scenario
from tools.verify.async_proof import caught_by, scenario


@pytest.mark.parametrize("name", MUTANTS)
def test_fault_is_noticed(name: str) -> None:
    found = caught_by(name)
    assert found is not None
    run(scenario(found[0]))  # by the fault, not by something else in the scenario


def test_the_loop_uses_the_operators_listed() -> None:
    launched: set[str] = set()
    for seed in range(20):
        engine = Engine(Scenario(random.Random(seed), "eager"))
        engine.run()
        launched |= set(engine.device.launches)
    assert launched == set(OPERATORS)
