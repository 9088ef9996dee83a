"""Tests that the store of the AscendC kernels does not depend on the number of cores. The parity
suite runs the kernels' samples on machines of 1 to 48 cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from backends import TWIN_BACKENDS
from ngram_npu import NgramStore
from ops.reference.store import BLOCK
from store_steps import (
    assert_equal_drafts,
    assert_equal_stores,
    check_ranks,
    generate_steps,
    run_step,
)

TWIN = next(b for b in TWIN_BACKENDS if b.name == "ascendc_twin")
RANK_STEPS = int(os.environ.get("NGRAM_NPU_RANK_STEPS", "3000"))
"""Number of steps of the slow test with two ranks; `make prove` runs more steps."""


@contextmanager
def run_on_cores(num_cores: int) -> Iterator[None]:
    """Runs the operators on the twin of an NPU with this number of cores."""
    assert TWIN.twin is not None
    with TWIN.select(), TWIN.twin.use_cores(num_cores):
        yield


@pytest.mark.parametrize("num_cores", [1, 2, 7, 40, 48])
def test_store_on_any_number_of_cores_equals_store_of_cpu(num_cores: int) -> None:
    store, expected_store = (NgramStore(8 * BLOCK, num_slots=6) for _ in range(2))
    for step, rows in zip(range(100), generate_steps(num_cores), strict=False):
        expected = run_step(expected_store, rows)
        with run_on_cores(num_cores):
            drafts = run_step(store, rows, torch.from_numpy)
        assert_equal_drafts(drafts, expected, step)
    assert_equal_stores(store, expected_store)


@pytest.mark.parametrize("num_steps", [100, pytest.param(RANK_STEPS, marks=pytest.mark.slow)])
def test_ranks_with_different_numbers_of_cores_have_equal_stores(num_steps: int) -> None:
    check_ranks(lambda rank, _: run_on_cores((7, 48)[rank]), num_steps)
