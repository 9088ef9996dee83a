"""Tests the rotary positions of models with three position dimensions (M-RoPE)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ngram_npu.async_state import AsyncSpecState

from async_state import admit_row, make_batch, make_small_state, to_ints

PROMPT_POSITIONS = to_ints([0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 2, 1])
DELTA = -1


def make_state() -> AsyncSpecState:
    return make_small_state(position_dims=3)


def test_state_with_one_dimension_has_no_rotary_positions() -> None:
    state = make_small_state()
    assert state.begin_step(make_batch([], [], [])).rope_positions is None
    for changes in ({"rope_positions": PROMPT_POSITIONS}, {"rope_delta": 1}):
        batch = make_batch([0], [4], [0], new=[admit_row(0, **changes)])
        state = make_small_state()
        with pytest.raises(ValueError, match="rope_delta: expected None and 0 with position_dims"):
            state.begin_step(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_positions": PROMPT_POSITIONS[:2]},
            r"rope_positions: expected \[3, .* got \[2",
        ),
        ({"rope_positions": np.zeros((3, 5), np.int32)}, r"rope_positions: .* got \[3, 5\]"),
        ({"rope_positions": to_ints(0, 1, 2)}, r"rope_positions: .* got \[3\]"),
        ({"rope_positions": PROMPT_POSITIONS * 0.5}, "rope_positions: expected integers"),
        ({"rope_delta": 0.5}, "rope_delta: expected 32 bits, got 0.5"),
        ({"rope_delta": 2**31}, "rope_delta: expected 32 bits"),
    ],
    ids=str,
)
def test_invalid_rotary_positions_raise_without_change(changes: Any, message: str) -> None:
    state = make_state()
    with pytest.raises(ValueError, match=f"begin_step: new/resumed: {message}"):
        state.begin_step(make_batch([0], [4], [0], new=[admit_row(0, **changes)]))
    state.begin_step(make_batch([0], [4], [0], new=[admit_row(0)]))
