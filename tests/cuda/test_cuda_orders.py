"""Blocks that share a row run concurrently on the twin, in any order; the results do not depend on
the order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from backends import TWIN_BACKENDS, Backend
from cuda_hooks import HOOKS, dirty_workspaces, watched
from ops.parity import check_parity
from opspecs import OPSPECS, OpSpec, Sample

RESIDENT = next(b for b in TWIN_BACKENDS if b.name == "cuda_resident")
JOINING = [OPSPECS[op] for op in ("ngram_propose", "ngram_step_", "correct_spec_state_")]
LOOKUPS = JOINING[:2]
SEEDS = (1, 2, 3)


def _library(backend: Backend) -> ctypes.CDLL:
    assert backend.twin is not None
    return ctypes.CDLL(str(backend.twin.path))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    _library(RESIDENT).ngram_npu_cuda_twin_seed(ctypes.c_uint64(1))


def _meetings() -> tuple[int, int]:
    launches, met = ctypes.c_int64(), ctypes.c_int64()
    _library(RESIDENT).ngram_npu_cuda_twin_meetings(ctypes.byref(launches), ctypes.byref(met))
    return launches.value, met.value


def _shared_rows(spec: OpSpec) -> list[Sample]:
    """The samples in which several blocks share a request."""
    labels = ("few-long", "tile-edges", "workspace", "batch-2049")
    samples = spec.samples(np.random.default_rng(2026))
    return [s for s in samples if s.label.startswith(labels) and s.compare]


@pytest.mark.parametrize("spec", JOINING, ids=lambda s: s.name)
def test_blocks_that_share_work_meet(spec: OpSpec) -> None:
    """The twin shows a fault between blocks only if they really run concurrently."""
    launches, met = _meetings()
    for sample in _shared_rows(spec):
        check_parity(spec, RESIDENT, sample)
    shared, together = (now - then for now, then in zip(_meetings(), (launches, met), strict=True))
    assert shared >= 4
    assert together > shared / 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", JOINING, ids=lambda s: s.name)
def test_any_order_gives_the_same(spec: OpSpec, seed: int) -> None:
    _library(RESIDENT).ngram_npu_cuda_twin_seed(ctypes.c_uint64(seed << 32))
    for sample in _shared_rows(spec):
        for _ in range(3):
            check_parity(spec, RESIDENT, sample)


@pytest.mark.slow
@pytest.mark.parametrize("spec", LOOKUPS, ids=lambda s: s.name)
def test_a_dirty_workspace_stays_within_the_tensors(spec: OpSpec) -> None:
    backend = watched(spec, HOOKS.path)
    for sample in dirty_workspaces(spec):
        check_parity(spec, backend, sample)
