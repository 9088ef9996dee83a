"""Tests that the CUDA kernels of a step's corrections, captured once on their twin, give the inputs
of every later step when they are launched again with the captured arguments."""

from __future__ import annotations

import ctypes

import pytest
from async_state.test_graphs import MAX_ROWS, make_state, run_steps
from backends import TWIN_BACKENDS, Backend

CUDA_BACKENDS = [b for b in TWIN_BACKENDS if b.name.startswith("cuda_")]


@pytest.mark.parametrize("backend", CUDA_BACKENDS, ids=lambda b: b.name)
def test_replayed_corrections_equal_launched_corrections(backend: Backend) -> None:
    assert backend.twin is not None
    twin = ctypes.CDLL(str(backend.twin.path))
    expected = run_steps(make_state())
    with backend.select():
        state = make_state()
        twin.ngram_npu_cuda_twin_begin_capture()
        state.correct_inputs(MAX_ROWS)
        assert twin.ngram_npu_cuda_twin_end_capture() >= 2

        def replay() -> None:
            assert twin.ngram_npu_cuda_twin_replay() == 0

        assert run_steps(state, replay) == expected
