"""AsyncSpecState by itself: the order of calls, wrong batches, what is readable when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import (
    Admission,
    AsyncConfig,
    AsyncSpecState,
    Batch,
    KVGroup,
    NewBlocks,
)
from ngram_npu.async_state.device import device_for


def _ints(*values: Any) -> Any:
    return np.array(values, np.int32)


def _state(**changes: Any) -> AsyncSpecState:
    sizes: dict[str, Any] = {
        "ngram": NgramConfig(min_n=1, max_n=3, k=2),
        "max_rows": 3,
        "row_capacity": 12,
        "max_step_tokens": 16,
        "kv_groups": (KVGroup(4, 3),),
    }
    return AsyncSpecState(AsyncConfig(**{**sizes, **changes}))


def _admit(row: int, length: int = 4, **changes: Any) -> Admission:
    values: dict[str, Any] = {"token_ids": np.arange(length), "block_ids": (_ints(row),)}
    return Admission(row, **{**values, **changes})


def _batch(rows: Any, scheduled: Any, drafts: Any, **changes: Any) -> Batch:
    return Batch(_ints(*rows), _ints(*scheduled), _ints(*drafts), **changes)


def _sampled(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1)


def _started() -> AsyncSpecState:
    """Rows 0 and 1 live; row 0 has sampled, row 1 is inside its prompt."""
    state = _state()
    state.begin_step(_batch([0, 1], [4, 2], [0, 0], new=[_admit(0), _admit(1)]))
    state.end_step(_sampled([5, -1, -1], [5, -1, -1]))
    return state


def test_upper_bounds_and_truth() -> None:
    state = _started()
    assert state.num_tokens is None
    assert state.num_computed_tokens is None
    assert state.known_token_ids(0) is None
    assert state.upper_num_tokens.tolist() == [5, 4, 0]
    assert state.upper_num_computed_tokens.tolist() == [4, 2, 0]
    state.begin_step(_batch([1, 0], [2, 3], [0, 2]))
    assert state.upper_num_tokens.tolist() == [8, 5, 0]
    state.end_step(_sampled([9, -1, -1], [7, -1, -1]))
    assert state.reconcile().num_sampled.tolist() == [1, 0]
    assert state.num_tokens is None
    assert state.upper_num_tokens.tolist() == [8, 5, 0]
    truth = state.reconcile()
    assert truth.num_sampled.tolist() == [1, 1]
    assert truth.rows.tolist() == [1, 0]
    assert truth.num_tokens.tolist() == [5, 6]
    assert state.num_tokens is not None
    assert state.num_tokens.tolist() == [6, 5, 0]
    known = state.known_token_ids(0)
    assert known is not None
    assert known.tolist() == [0, 1, 2, 3, 5, 7]


def test_a_swap_of_rows() -> None:
    state = _started()
    state.reconcile()
    state.begin_step(_batch([1], [1], [0], moves=_ints([0, 1], [1, 0])))
    state.end_step(_sampled([6, -1, -1]))
    state.reconcile()
    assert state.num_tokens is not None
    assert state.num_tokens.tolist() == [4, 6, 0]


def test_drafts_reach_the_host_padded_and_ragged() -> None:
    state = _state()
    tokens = _ints(1, 2, 3, 1)
    state.begin_step(_batch([0, 1], [4, 4], [0, 0], new=[_admit(0, token_ids=tokens), _admit(1)]))
    state.end_step(_sampled([2, -1, -1], [9, -1, -1]))
    drafts = state.wait_drafts()
    assert drafts.draft_token_ids.tolist() == [[3, 1], [-1, -1]]
    assert drafts.num_draft_tokens.tolist() == [2, 0]
    flat, starts = drafts.ragged()
    assert (flat.tolist(), starts.tolist()) == ([3, 1], [0, 2, 2])
    state.begin_step(_batch([0, 1], [3, 3], [2, 2]))
    state.end_step(_sampled([3, 1, 2], [4, -1, -1]))
    state.reconcile()
    truth = state.reconcile()
    assert truth.num_scheduled_drafts.tolist() == [2, 2]
    assert truth.num_valid_drafts.tolist() == [2, 0]
    assert truth.num_accepted_drafts.tolist() == [2, 0]


WRONG: dict[str, tuple[Callable[[], Batch], str]] = {
    "row out of range": (lambda: _batch([3], [1], [0]), "rows: expected 0 to 2"),
    "free row": (lambda: _batch([2], [1], [0]), "live rows, got 2"),
    "row twice": (lambda: _batch([0, 0], [1, 1], [0, 0]), "each row once"),
    "lengths differ": (lambda: _batch([0, 1], [1], [0, 0]), "equal lengths"),
    "nothing scheduled": (lambda: _batch([0], [0], [0]), "num_scheduled_tokens: expected 1 to 1"),
    "more than is known": (lambda: _batch([1], [3], [0]), "num_scheduled_tokens: expected 1 to 2"),
    "too many drafts": (lambda: _batch([0], [4], [3]), "num_scheduled_drafts: expected 0 to 2"),
    "negative drafts": (lambda: _batch([0], [1], [-1]), "num_scheduled_drafts"),
    "drafts inside a prompt": (lambda: _batch([1], [3], [1]), "unless it sampled"),
    "admitted to a live row": (
        lambda: _batch([0], [1], [0], new=[_admit(1)]),
        "expected a free row, got 1",
    ),
    "admitted twice": (lambda: _batch([0], [1], [0], new=[_admit(2), _admit(2)]), "a free row"),
    "no tokens": (lambda: _batch([0], [1], [0], new=[_admit(2, 0)]), "1 to 12 tokens, got 0"),
    "too many tokens": (lambda: _batch([0], [1], [0], new=[_admit(2, 13)]), "got 13"),
    "all computed": (
        lambda: _batch([0], [1], [0], resumed=[_admit(2, num_computed_tokens=4)]),
        "num_computed_tokens: expected 0 to 3",
    ),
    "removed twice": (lambda: _batch([0], [1], [0], removed=_ints(1, 1)), "removed"),
    "removed a free row": (lambda: _batch([0], [1], [0], removed=_ints(2)), "removed"),
    "moved from a free row": (lambda: _batch([0], [1], [0], moves=_ints([2, 1])), "moves"),
    "moved to a live row": (lambda: _batch([0], [1], [0], moves=_ints([0, 1])), "free rows"),
    "moved out of range": (lambda: _batch([0], [1], [0], moves=_ints([1, 3])), "moves"),
    "blocks for a free row": (
        lambda: _batch([0], [1], [0], new_blocks=(NewBlocks(_ints(2), _ints(0)),)),
        "new_blocks",
    ),
    "blocks for a row out of range": (
        lambda: _batch([0], [1], [0], new_blocks=(NewBlocks(_ints(-1), _ints(0)),)),
        "new_blocks: expected 0 to 2",
    ),
    "more rows than blocks": (
        lambda: _batch([0], [1], [0], new_blocks=(NewBlocks(_ints(0, 0), _ints(0)),)),
        "expected 2 block_ids",
    ),
    "new blocks of too many groups": (
        lambda: _batch([0], [1], [0], new_blocks=(NewBlocks(), NewBlocks())),
        "expected 1, one for each KV group",
    ),
    "admitted with blocks of no group": (
        lambda: _batch([0], [1], [0], new=[_admit(2, block_ids=())]),
        "expected 1, one for each KV group",
    ),
    "too many blocks": (
        lambda: _batch([0], [1], [0], new_blocks=(NewBlocks(_ints(0, 0, 0), _ints(5, 6, 7)),)),
        "at most 3 blocks a row, got 4",
    ),
    "too wide an admission": (
        lambda: _batch([0], [1], [0], new=[_admit(2, block_ids=(_ints(1, 2, 3, 4),))]),
        "at most 3 blocks a row",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_batches_change_nothing(wrong: str) -> None:
    make, message = WRONG[wrong]
    state = _started()
    before = (state.upper_num_tokens.tolist(), state.token_ids.tolist())
    with pytest.raises(ValueError, match="begin_step") as error:
        state.begin_step(make())
    assert message in str(error.value)
    assert (state.upper_num_tokens.tolist(), state.token_ids.tolist()) == before
    state.begin_step(_batch([0, 1], [3, 2], [2, 0]))
    state.end_step(_sampled([6, -1, -1], [7, -1, -1]))
    state.reconcile()
    assert state.reconcile().num_tokens.tolist() == [6, 5]


def test_more_tokens_than_a_step_or_a_row_takes() -> None:
    state = _state(max_step_tokens=5)
    with pytest.raises(ValueError, match="at most 5 together, got 8"):
        state.begin_step(_batch([0, 1], [4, 4], [0, 0], new=[_admit(0), _admit(1)]))
    with pytest.raises(ValueError, match="at most 12 tokens"):
        _state().begin_step(_batch([0], [12], [0], new=[_admit(0, 12)]))


def test_the_order_of_calls() -> None:
    state = _state()
    with pytest.raises(RuntimeError, match="no step has begun"):
        state.end_step(_sampled([1]))
    with pytest.raises(RuntimeError, match="reconciled already"):
        state.reconcile()
    with pytest.raises(RuntimeError, match="wait_drafts"):
        state.wait_drafts()
    state = _started()
    state.begin_step(_batch([0], [1], [0]))
    with pytest.raises(RuntimeError, match="end_step has not been called"):
        state.begin_step(_batch([0], [1], [0]))
    with pytest.raises(RuntimeError, match="wait_drafts"):
        state.wait_drafts()
    state.end_step(_sampled([1]))
    with pytest.raises(RuntimeError, match="step 0 must be reconciled"):
        state.begin_step(_batch([0], [1], [0]))


@pytest.mark.parametrize(
    "sampled",
    [
        torch.zeros((1, 3), dtype=torch.int32),
        torch.zeros((2, 4), dtype=torch.int32),
        torch.zeros((2, 0), dtype=torch.int32),
        torch.zeros((2, 3), dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)}",
)
def test_wrong_samples(sampled: torch.Tensor) -> None:
    state = _started()
    state.begin_step(_batch([0, 1], [1, 2], [0, 0]))
    with pytest.raises(ValueError, match="sampled_token_ids: expected int32"):
        state.end_step(sampled)
    state.end_step(_sampled([1], [2]))


def test_what_a_slot_had_before_is_wiped_from_its_block_table() -> None:
    state = _state()
    three = _admit(0, block_ids=(_ints(7, 8, 9),))
    state.begin_step(_batch([0], [4], [0], new=[three]))
    state.end_step(_sampled([1]))
    state.begin_step(_batch([2], [4], [0], removed=_ints(0), new=[_admit(2)]))
    assert state.block_tables[0].tolist()[0] == [2, -1, -1]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_rows": 0},
        {"row_capacity": 0},
        {"max_step_tokens": 0},
        {"kv_groups": ()},
        {"kv_groups": (KVGroup(0, 1),)},
        {"slot_dtype": "int16"},
        {"cp_world": 0},
    ],
    ids=str,
)
def test_wrong_sizes(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"AsyncConfig: {next(iter(changes))}"):
        _state(**changes)


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda or npu, got meta"):
        device_for("meta")
