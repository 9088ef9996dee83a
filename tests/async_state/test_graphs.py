"""Tests that a device graph can contain the corrections of a step: their arguments keep their
addresses, and a graph for more requests than the step has gives the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu.async_state import AsyncSpecState, KVGroup

from async_state import admit_row, make_batch, make_samples, make_small_state

MAX_ROWS = 3
_INPUTS = (
    *("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"),
    *("num_accepted_tokens", "discard", "slot_indices", "num_scheduled_drafts"),
)


def make_state() -> AsyncSpecState:
    return make_small_state(None, row_capacity=24, kv_groups=(KVGroup(8, 3),))


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


def test_corrections_of_all_rows_equal_those_of_the_batch() -> None:
    state = make_state()
    inputs = run_steps(state, lambda: state.correct_inputs(MAX_ROWS))
    assert inputs == run_steps(make_state())
    assert sum(max(step["num_accepted_tokens"]) > 1 for step in inputs) > 3


def test_inputs_and_results_of_steps_keep_their_addresses() -> None:
    state = make_state()
    addresses = set()
    for count, num_before in ((3, 0), (1, 3), (2, 1)):
        new = [admit_row(row) for row in range(count)]
        removed = np.arange(num_before)
        batch = make_batch(range(count), [4] * count, [0] * count, new=new, removed=removed)
        inputs = state.begin_step(batch)
        outputs = state.end_step(make_samples(*range(count)))
        state.reconcile()
        results = outputs.next_token_ids, outputs.num_sampled, outputs.draft_token_ids
        tensors = *results, *inputs.slot_mappings, *(getattr(inputs, name) for name in _INPUTS)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


@pytest.mark.parametrize("count", [-1, MAX_ROWS + 1, 1.0])
def test_correct_inputs_with_invalid_count_raises(count: Any) -> None:
    with pytest.raises(ValueError, match=f"correct_inputs: num_requests: .* 0 to 3, got {count}"):
        make_state().correct_inputs(count)
