"""On the twin of CUDA: blocks that share a row run concurrently, and the results do not depend on
their order. tests/repo/verify/test_device_faults.py shows that no sample has races, reads unwritten
shared memory or leaves the tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from backends import TWIN_BACKENDS, Backend
from cuda_hooks import HOOKS, check_changed_lengths, check_failed_launch_is_reported
from ops.parity import Case, check_case, sample_cases
from ops.specs import OPSPECS, OpSpec

FAST, RESIDENT = (
    next(b for b in TWIN_BACKENDS if b.name == f"cuda_{mode}") for mode in ("fast", "resident")
)
JOINING = [OPSPECS[op] for op in ("ngram_propose_", "ngram_step_", "correct_spec_state_")]
LOOKUPS = JOINING[:2]
SEEDS = (1, 2, 3)


def _library(backend: Backend) -> ctypes.CDLL:
    assert backend.twin is not None
    return ctypes.CDLL(str(backend.twin.path))


@pytest.fixture
def seed_restored() -> Iterator[None]:
    yield
    _library(RESIDENT).ngram_npu_cuda_twin_seed(ctypes.c_uint64(1))


def _count_overlaps() -> tuple[int, int]:
    """Returns the fields of ``BlockOverlapCounts`` (grid.h)."""
    counts = ctypes.c_int64(), ctypes.c_int64()
    _library(RESIDENT).ngram_npu_cuda_twin_block_overlaps(*map(ctypes.byref, counts))
    return counts[0].value, counts[1].value


def _find_shared_rows(op: str) -> list[Case]:
    """Returns the samples in which several blocks share a request."""
    labels = ("few-long", "tile-edges", "workspace", "batch-2049")
    return [
        case
        for case in sample_cases(op)
        if case.sample.label.startswith(labels) and case.sample.compare
    ]


@pytest.mark.usefixtures("seed_restored")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", JOINING, ids=lambda s: s.name)
def test_overlapping_blocks_give_same_result_in_any_order(spec: OpSpec, seed: int) -> None:
    """The twin shows a fault between blocks only if they really run concurrently."""
    _library(RESIDENT).ngram_npu_cuda_twin_seed(ctypes.c_uint64(seed << 32))
    before = _count_overlaps()
    for case in _find_shared_rows(spec.name):
        for _ in range(3):
            check_case(spec, RESIDENT, case)
    sharing, overlapping = np.subtract(_count_overlaps(), before)
    assert sharing >= 4
    assert overlapping > sharing / 2


@pytest.mark.parametrize("spec", LOOKUPS, ids=lambda s: s.name)
def test_lengths_changed_during_lookup_cause_no_invalid_access(spec: OpSpec) -> None:
    assert check_changed_lengths(spec, FAST) == ""


SPECS = [spec for spec in OPSPECS.values() if HOOKS.device not in spec.no_kernel]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_failed_launch_is_reported(spec: OpSpec) -> None:
    assert check_failed_launch_is_reported(spec, RESIDENT) == ""
