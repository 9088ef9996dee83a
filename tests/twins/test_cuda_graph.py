"""Tests that the CUDA kernels of a step's corrections, captured once on their twin, give the inputs
of every later step when they are launched again with the captured arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from async_state import admit_row, make_batch, make_small_state
from backends import TWIN_BACKENDS, Backend
from ngram_npu.async_state import AsyncSpecState, KVGroup

CUDA_BACKENDS = [b for b in TWIN_BACKENDS if b.name.startswith("cuda_")]


MAX_ROWS = 3
_INPUTS = (
    *("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"),
    *("num_accepted_tokens", "discard", "slot_indices", "num_scheduled_drafts"),
)


def make_state() -> AsyncSpecState:
    return make_small_state(row_capacity=24, kv_groups=(KVGroup(8, 3),))


def run_steps(
    state: AsyncSpecState, launch_corrections: Callable[[], object] | None = None
) -> list[dict[str, list[int]]]:
    """Runs steps with random sampler results, and returns their inputs.

    Three batches of new requests run for five steps each. From the second step on, each request
    has a draft, and the requests change their order.

    Args:
        launch_corrections: Launches the corrections of a step; None: begin_step launches them.
    """
    rng = np.random.default_rng(0)
    all_inputs, num_before = [], 0
    for count in (2, 2, 1):
        rows = np.arange(count)
        new = [admit_row(row) for row in range(count)]
        first = make_batch(rows, 0 * rows + 4, 0 * rows, new=new, removed=np.arange(num_before))
        orders = [rng.permutation(count) for _ in range(4)]
        for batch in (first, *(make_batch(order, 0 * rows + 2, 0 * rows + 1) for order in orders)):
            inputs = state.begin_step(batch, correct=launch_corrections is None)
            if launch_corrections is not None:
                launch_corrections()
            values = {name: getattr(inputs, name).tolist() for name in _INPUTS}
            values["slot_mapping"] = inputs.slot_mappings[0].tolist()
            for name in ("input_ids", "positions"):
                del values[name][inputs.num_step_tokens :]
            all_inputs.append(values)
            counts = rng.integers(1, 2 + batch.num_scheduled_drafts)
            sampled = rng.integers(0, 5, (count, 3), dtype=np.int32)
            sampled[np.arange(3) >= counts[:, None]] = -1
            state.end_step(torch.from_numpy(sampled))
            state.reconcile()
        num_before = count
    return all_inputs


@pytest.mark.parametrize("backend", CUDA_BACKENDS, ids=lambda b: b.name)
def test_replayed_corrections_equal_launched_corrections(backend: Backend) -> None:
    assert backend.twin is not None
    twin = ctypes.CDLL(str(backend.twin.path))
    expected = run_steps(make_state())
    assert sum(max(step["num_accepted_tokens"]) > 1 for step in expected) > 3
    with backend.select():
        state = make_state()
        twin.ngram_npu_cuda_twin_begin_capture()
        state.correct_inputs(MAX_ROWS)
        assert twin.ngram_npu_cuda_twin_end_capture() >= 2

        def replay() -> None:
            assert twin.ngram_npu_cuda_twin_replay() == 0

        assert run_steps(state, replay) == expected
