"""Tests the CUDA kernels on their twin: blocks that share a row run concurrently, and the
results do not depend on the order of blocks and threads. tests/repo/verify/test_device_faults.py
tests that no sample causes races, reads of unwritten shared memory or accesses outside the
tensors."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from backends import TWIN_BACKENDS, Backend
from cuda_hooks import check_changed_lengths, check_failed_launch_is_reported
from ngram_npu import NgramStore
from ops.parity import Case, check_cases, make_sample_cases
from ops.reference.store import BLOCK
from ops.specs import OPSPECS, OpSpec
from store_steps import assert_equal_stores, check_ranks

# "fast" runs one block after the other; "resident" interleaves several blocks.
FAST, RESIDENT = (
    next(b for b in TWIN_BACKENDS if b.name == f"cuda_{mode}") for mode in ("fast", "resident")
)
ROW_SHARING_SPECS = [OPSPECS[op] for op in ("ngram_propose_", "ngram_step_", "correct_spec_state_")]
LOOKUP_SPECS = ROW_SHARING_SPECS[:2]
MAP_NORESERVE = 0x4000
"""Linux's flag for memory that need not exist, which Python's module mmap does not define."""
RANK_STEPS = int(os.environ.get("NGRAM_NPU_RANK_STEPS", "2000"))
"""Number of steps of the slow test with two ranks; `make prove` runs more steps."""


def _load_library(backend: Backend) -> ctypes.CDLL:
    assert backend.twin is not None
    return ctypes.CDLL(str(backend.twin.path))


def _set_seed(seed: int) -> None:
    _load_library(RESIDENT).ngram_npu_cuda_twin_set_seed(ctypes.c_uint64(seed))


@pytest.fixture
def restore_seed() -> Iterator[None]:
    yield
    _set_seed(1)


def _find_cases_with_shared_rows(op: str) -> list[Case]:
    """Returns the cases in which several blocks share a row."""
    labels = ("few-long", "one-request", "batch-2049")
    return [
        case
        for case in make_sample_cases(op)
        if case.sample.label.startswith(labels) and case.sample.checks_results
    ]


@pytest.mark.usefixtures("restore_seed")
@pytest.mark.parametrize("spec", ROW_SHARING_SPECS, ids=lambda s: s.name)
def test_overlapping_blocks_give_same_result_in_any_order(spec: OpSpec) -> None:
    _set_seed(1)
    for _ in range(4):  # each launch increments the seed
        check_cases(spec, RESIDENT, _find_cases_with_shared_rows(spec.name))


@pytest.mark.parametrize("spec", LOOKUP_SPECS, ids=lambda s: s.name)
def test_lengths_changed_during_lookup_cause_no_invalid_access(spec: OpSpec) -> None:
    assert check_changed_lengths(spec, FAST) == ""


def test_largest_capacity_needs_no_more_blocks_than_a_grid_may_have() -> None:
    capacity = 2**31 - 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    rows = torch.frombuffer(mmap.mmap(-1, 4 * capacity, flags), dtype=torch.int32)[None]
    rows[0, :5] = torch.tensor([1, 2, 3, 1, 2])
    with FAST.select():
        drafts, num_drafts, _ = torch.ops.ngram_npu.ngram_propose(
            rows, torch.tensor([5], dtype=torch.int32), min_n=2, max_n=4, k=2
        )
    assert drafts.tolist() == [[3, 1]]
    assert num_drafts.tolist() == [2]


@pytest.mark.parametrize("spec", OPSPECS.values(), ids=lambda s: s.name)
def test_failed_launch_is_reported(spec: OpSpec) -> None:
    assert check_failed_launch_is_reported(spec, RESIDENT) == ""


@pytest.mark.usefixtures("restore_seed")
@pytest.mark.parametrize("num_steps", [100, pytest.param(RANK_STEPS, marks=pytest.mark.slow)])
def test_ranks_with_different_schedules_have_equal_stores(num_steps: int) -> None:
    """Threads and blocks run in different orders on the two ranks."""

    @contextmanager
    def select_rank(rank: int, step: int) -> Iterator[None]:
        _set_seed(step << 8 | rank << 4 | 1)
        yield

    with RESIDENT.select():
        check_ranks(select_rank, num_steps)


@pytest.mark.usefixtures("restore_seed")
def test_backends_agree_after_texts_were_added_in_slices() -> None:
    """Loading, warming and merging add texts in slices of a block, in text order."""
    rng = np.random.default_rng(5)
    phrases = rng.integers(0, 60, (6, 90))
    texts = [np.concatenate(rng.permutation(phrases))[:length] for length in (540, 3, 256, 257, 1)]
    stores = []
    for backend, seed in ((None, 1), (FAST, 1), (RESIDENT, 5), (RESIDENT, 77)):
        store = NgramStore(9 * BLOCK, num_slots=1)
        with nullcontext() if backend is None else backend.select():
            if backend is RESIDENT:
                _set_seed(seed)
            for i, text in enumerate(texts):
                store.begin_requests(0)
                for begin in range(0, len(text), BLOCK):
                    end = min(begin + BLOCK, len(text))
                    store.append(
                        torch.tensor(text[None], dtype=torch.int32),
                        torch.tensor([end], dtype=torch.int32),
                        torch.tensor([end - begin], dtype=torch.int32),
                        scopes=torch.tensor([i % 2]),
                        max_new=BLOCK,
                        hold_back=False,
                    )
        stores.append(store)
    assert (stores[0].table[:, 1::2] > 0).sum() > 200
    for store in stores[1:]:
        assert_equal_stores(stores[0], store)
