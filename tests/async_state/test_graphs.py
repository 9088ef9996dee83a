"""Tests that a device graph can contain the corrections of a step: their arguments keep their
addresses. ``test_simulation.py`` replays such graphs, also for more requests than a step has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_state import admit_row, make_batch, make_samples, make_small_state

MAX_ROWS = 3
_INPUTS = (
    *("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"),
    *("num_accepted_tokens", "discard", "slot_indices", "num_scheduled_drafts"),
)


def test_inputs_and_results_of_steps_keep_their_addresses() -> None:
    state = make_small_state()
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
        make_small_state().correct_inputs(count)
