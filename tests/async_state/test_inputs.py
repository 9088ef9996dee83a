"""Tests the inputs of a step: fixed addresses for device graphs, and rotary positions (M-RoPE).
test_simulation.py also tests graphs and M-RoPE in scenarios."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_state import admit_row, make_batch, make_samples, make_small_state, to_ints

MAX_ROWS = 3
_INPUTS = (
    *("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"),
    *("num_accepted_tokens", "discard", "slot_indices", "num_scheduled_drafts"),
)
PROMPT_POSITIONS = to_ints([0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 2, 1])


def test_inputs_and_results_of_steps_keep_their_addresses() -> None:
    state = make_small_state(max_rows=MAX_ROWS)
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
        make_small_state(max_rows=MAX_ROWS).correct_inputs(count)


def test_state_with_one_dimension_has_no_rotary_positions() -> None:
    state = make_small_state()
    assert state.begin_step(make_batch([], [], [])).rope_positions is None
    for changes in ({"rope_positions": PROMPT_POSITIONS}, {"rope_delta": 1}):
        batch = make_batch([0], [4], [0], new=[admit_row(0, **changes)])
        with pytest.raises(ValueError, match="rope_delta: expected None and 0 with position_dims"):
            make_small_state().begin_step(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_positions": PROMPT_POSITIONS[:2]}, r"rope_positions: expected \[3, .* got \[2"),
        ({"rope_positions": np.zeros((3, 5), np.int32)}, r"rope_positions: .* got \[3, 5\]"),
        ({"rope_positions": to_ints(0, 1, 2)}, r"rope_positions: .* got \[3\]"),
        ({"rope_positions": PROMPT_POSITIONS * 0.5}, "rope_positions: expected integers"),
        ({"rope_delta": 0.5}, "rope_delta: expected 32 bits, got 0.5"),
        ({"rope_delta": 2**31}, "rope_delta: expected 32 bits"),
    ],
    ids=str,
)
def test_invalid_rotary_positions_raise_without_change(changes: Any, message: str) -> None:
    state = make_small_state(position_dims=3)
    with pytest.raises(ValueError, match=f"begin_step: new/resumed: {message}"):
        state.begin_step(make_batch([0], [4], [0], new=[admit_row(0, **changes)]))
    state.begin_step(make_batch([0], [4], [0], new=[admit_row(0)]))
