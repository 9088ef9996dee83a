"""What is compared computes the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tools.bench.ops.spec_state import Correction, CorrectSpecState, Eager, Fused, Parts
from tools.bench.options import Options, Size


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("k", [1, 4])
def test_contestants_agree(batch: int, k: int) -> None:
    options = Options(k=k)
    workload = CorrectSpecState().workload(Size(batch, 100), options)
    contestants: list[Correction] = [
        Fused(workload, options),
        Fused(workload, replace(options, frontend="torch")),
        Parts(workload, options),
        Eager(workload, options),
    ]
    for contestant in contestants:
        for step in range(3):
            contestant.function(*contestant.arguments(step))
    first = contestants[0].arrays
    assert (first["num_computed_tokens"] > 100).all()
    assert (first["slot_mapping"] >= 0).all()
    for contestant in contestants[1:]:
        for name, array in contestant.arrays.items():
            assert np.array_equal(array, first[name]), (type(contestant).__name__, name)
