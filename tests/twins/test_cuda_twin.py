"""On the twin of CUDA: blocks that share a row run concurrently, and the results do not depend on
their order. tests/repo/verify/test_device_faults.py shows that no sample has races, reads unwritten
shared memory or leaves the tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from backends import TWIN_BACKENDS, Backend
from core.store.device_steps import Requests, run_step
from cuda_hooks import HOOKS, check_changed_lengths, check_failed_launch_is_reported
from ngram_npu.store.device_store import DeviceStore
from ops.parity import Case, check_case, sample_cases
from ops.specs import OPSPECS, OpSpec

FAST, RESIDENT = (
    next(b for b in TWIN_BACKENDS if b.name == f"cuda_{mode}") for mode in ("fast", "resident")
)
JOINING = [OPSPECS[op] for op in ("ngram_propose_", "ngram_step_", "correct_spec_state_")]
LOOKUPS = JOINING[:2]
SEEDS = (1, 2, 3)
RANK_STEPS = int(os.environ.get("NGRAM_NPU_RANK_STEPS", "2000"))
"""`make prove` runs more steps."""


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


def _compare_ranks(num_steps: int) -> None:
    """Runs the same steps on two ranks whose threads and blocks run in different orders."""
    sizes = {"num_slots": 6, "token_capacity": 2048, "max_batch": 6}
    stores, requests = [DeviceStore(**sizes) for _ in range(2)], [Requests(11) for _ in range(2)]
    for number in range(num_steps):
        drafts = []
        for rank in range(2):
            seed = ctypes.c_uint64(number << 8 | rank << 4 | 1)
            _library(RESIDENT).ngram_npu_cuda_twin_seed(seed)
            step = requests[rank].next_step()
            drafts.append(run_step(stores[rank], requests[rank], step))
        for name, tensor in drafts[0].items():
            assert torch.equal(tensor, drafts[1][name]), f"step {number}: {name}"
    for name in ("slots", "text", "blocks", "table", "allocator"):
        assert torch.equal(getattr(stores[0], name), getattr(stores[1], name)), name
    stores[0].check_integrity()


@pytest.mark.usefixtures("seed_restored")
@pytest.mark.parametrize("num_steps", [100, pytest.param(RANK_STEPS, marks=pytest.mark.slow)])
def test_ranks_with_other_schedules_have_equal_device_stores(num_steps: int) -> None:
    with RESIDENT.select():
        _compare_ranks(num_steps)
