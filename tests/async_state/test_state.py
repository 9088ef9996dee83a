"""AsyncSpecState by itself: the order of calls, wrong batches, what is readable when."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu.async_state import AsyncSpecState, Batch, KVGroup, NewBlocks

from async_state.small import admit as _admit
from async_state.small import batch_of as _batch
from async_state.small import ints as _ints
from async_state.small import sampled_of as _sampled
from async_state.small import small_state as _state


def _upper(state: AsyncSpecState, of: str = "tokens") -> list[int]:
    bound = getattr(state, f"upper_num_{of}")
    assert bound is not None
    found: list[int] = bound.tolist()
    return found


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
    assert _upper(state) == [5, 4, 0]
    assert _upper(state, "computed_tokens") == [4, 2, 0]
    state.begin_step(_batch([1, 0], [2, 3], [0, 2]))
    assert _upper(state) == [8, 5, 0]
    state.end_step(_sampled([9, -1, -1], [7, -1, -1]))
    assert state.reconcile().num_sampled.tolist() == [1, 0]
    assert state.num_tokens is None
    assert _upper(state) == [8, 5, 0]
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


_wrong = partial(_batch, [0], [1], [0])


def _joins(*length: int, **changes: Any) -> Batch:
    return _wrong(new=[_admit(2, *length, **changes)])


def _grows(rows: Any, block_ids: Any) -> Batch:
    return _wrong(new_blocks=(NewBlocks(rows, block_ids),))


WRONG: dict[str, tuple[Any, str]] = {
    "row out of range": (_batch([3], [1], [0]), "rows: expected 0 to 2"),
    "negative row": (_batch([0, -1], [1, 1], [0, 0]), "rows: expected 0 to 2, got [ 0 -1]"),
    "admitted to a negative row": (_wrong(new=[_admit(-1)]), "expected a free row, got -1"),
    "removed a negative row": (_wrong(removed=_ints(-1)), "removed: expected 0 to 2"),
    "moved from a negative row": (_wrong(moves=_ints([-1, 2])), "moves: expected 0 to 2"),
    "free row": (_batch([2], [1], [0]), "live rows, got 2"),
    "row twice": (_batch([0, 0], [1, 1], [0, 0]), "each row once"),
    "lengths differ": (_batch([0, 1], [1], [0, 0]), "equal lengths"),
    "nothing scheduled": (_batch([0], [0], [0]), "num_scheduled_tokens: expected 1 to 1"),
    "more than is known": (_batch([1], [3], [0]), "num_scheduled_tokens: expected 1 to 2"),
    "too many drafts": (_batch([0], [4], [3]), "num_scheduled_drafts: expected 0 to 2"),
    "negative drafts": (_batch([0], [1], [-1]), "num_scheduled_drafts"),
    "drafts inside a prompt": (_batch([1], [3], [1]), "unless it sampled"),
    "admitted to a live row": (_wrong(new=[_admit(1)]), "expected a free row, got 1"),
    "admitted twice": (_wrong(new=[_admit(2), _admit(2)]), "a free row"),
    "no tokens": (_joins(0), "1 to 12 tokens, got 0"),
    "too many tokens": (_joins(13), "got 13"),
    "all computed": (
        _wrong(resumed=[_admit(2, num_computed_tokens=4)]),
        "num_computed_tokens: expected 0 to 3",
    ),
    "removed twice": (_wrong(removed=_ints(1, 1)), "removed"),
    "removed a free row": (_wrong(removed=_ints(2)), "removed"),
    "moved from a free row": (_wrong(moves=_ints([2, 1])), "moves"),
    "moved to a live row": (_wrong(moves=_ints([0, 1])), "free rows"),
    "moved out of range": (_wrong(moves=_ints([1, 3])), "moves"),
    "blocks for a free row": (_grows(_ints(2), _ints(0)), "new_blocks"),
    "blocks for a row out of range": (_grows(_ints(-1), _ints(0)), "new_blocks: expected 0 to 2"),
    "more rows than blocks": (_grows(_ints(0, 0), _ints(0)), "expected 2 block_ids"),
    "new blocks of too many groups": (
        _wrong(new_blocks=(NewBlocks(), NewBlocks())),
        "expected 1, one for each KV group",
    ),
    "admitted with blocks of no group": (
        _joins(block_ids=()),
        "block_ids: expected 1 arrays, one for each KV group, got ()",
    ),
    "admitted without blocks": (
        _joins(block_ids=None),
        "block_ids: expected 1 arrays, one for each KV group, got None",
    ),
    "admitted with a negative block": (
        _joins(block_ids=(_ints(1, -1),)),
        "new/resumed: block_ids: expected ids >= 0, got -1",
    ),
    "a negative new block": (
        _grows(_ints(0), _ints(-2)),
        "new_blocks: block_ids: expected ids >= 0, got -2",
    ),
    "no batch": (None, "batch: expected a Batch, got NoneType"),
    "new of nothing": (_wrong(new=None), "new: expected a sequence of Adm"),
    "resumed that is none": (
        _wrong(resumed=[(2, _ints(1), ())]),
        "resumed: expected a sequence of Admission, got tuple",
    ),
    "new blocks of nothing": (
        _wrong(new_blocks=None),
        "new_blocks: expected a sequence of NewBlocks, got NoneType",
    ),
    "removed nothing": (_wrong(removed=None), "removed: expected one dim"),
    "moves of nothing": (_wrong(moves=None), "moves: expected [N,2]"),
    "too many blocks": (_grows(_ints(0, 0), _ints(5, 6)), "at most 3 blocks a row, got 4"),
    "too wide an admission": (_joins(block_ids=(_ints(1, 2, 3, 4),)), "at most 3 blocks a row"),
    "too few blocks for an admission": (
        _batch([2], [5], [0], new=[_admit(2, 5, block_ids=(_ints(9),))]),
        "KV group 0 for up to 5 tokens at batch position 0 (block_size 4, cp_world 1), got 1",
    ),
    "no blocks": (
        _batch([0, 2], [1, 1], [0, 0], new=[_admit(2, block_ids=([],))]),
        "KV group 0 for up to 1 tokens at batch position 1 (block_size 4, cp_world 1), got 0",
    ),
    "rows of floats": (Batch(np.zeros(1), _ints(1), _ints(0)), "rows: expected integers"),
    "rows of booleans": (
        Batch(np.zeros(1, np.bool_), _ints(1), _ints(0)),
        "rows: expected integers",
    ),
    "rows in two dimensions": (
        Batch(_ints([0]), _ints(1), _ints(0)),
        "rows: expected one dimension",
    ),
    "rows beyond 32 bits": (Batch(np.array([2**32]), _ints(1), _ints(0)), "rows: expected 32 bits"),
    "scheduled floats": (
        Batch(_ints(0), np.ones(1), _ints(0)),
        "num_scheduled_tokens: expected integers",
    ),
    "draft counts of floats": (
        Batch(_ints(0), _ints(1), np.zeros(1)),
        "num_scheduled_drafts: expected integers",
    ),
    "removed floats": (_wrong(removed=np.ones(1)), "removed: expected int"),
    "moves of floats": (_wrong(moves=np.array([[1.0, 2.0]])), "moves: expected integers"),
    "moves that are no pairs": (_wrong(moves=_ints(1, 2)), "moves: expected"),
    "tokens of floats": (_joins(token_ids=np.zeros(4)), "token_ids: expected integers"),
    "tokens in two dimensions": (
        _wrong(new=[_admit(2, token_ids=_ints([1, 2], [3, 4]))]),
        "token_ids: expected one dimension",
    ),
    "tokens beyond 32 bits": (
        _wrong(resumed=[_admit(2, token_ids=np.array([1, 2**31]))]),
        "token_ids: expected 32 bits",
    ),
    "a row that is a bool": (_wrong(new=[_admit(True)]), "a free row, got T"),
    "computed tokens that are a bool": (
        _joins(num_computed_tokens=True),
        "num_computed_tokens: expected 0 to 3, got True",
    ),
    "a row that is a float": (_wrong(new=[_admit(2.0)]), "a free row"),
    "half a computed token": (
        _joins(num_computed_tokens=0.5),
        "num_computed_tokens: expected 0 to 3",
    ),
    "admitted with blocks of floats": (
        _joins(block_ids=(np.zeros(1),)),
        "block_ids: expected integers",
    ),
    "new blocks of floats": (_grows(_ints(0), np.zeros(1)), "block_ids: expected integers"),
    "new blocks for rows of floats": (_grows(np.zeros(1), _ints(5)), "rows: expected integers"),
}


def _all_of(state: AsyncSpecState) -> list[Any]:
    """The state that a rejected batch must not change."""
    return [
        _upper(state),
        _upper(state, "computed_tokens"),
        state._mirrors.slot_of.tolist(),
        state._mirrors.token_ids.tolist(),
        state.token_ids.tolist(),
        state.num_tokens_on_device.tolist(),
        [table.tolist() for table in state.block_tables],
    ]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_batches_change_nothing(wrong: str) -> None:
    batch, message = WRONG[wrong]
    state = _started()
    before = _all_of(state)
    with pytest.raises(ValueError, match="begin_step") as error:
        state.begin_step(batch)
    assert message in str(error.value)
    assert _all_of(state) == before
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
        torch.zeros((3, 2), dtype=torch.int32).T,
        torch.zeros((2, 3), dtype=torch.int32, device="meta"),
        torch.zeros((2, 3), dtype=torch.int32).to_sparse(),
        [[1], [2]],
    ],
    ids=[
        *("rows", "columns", "no column", "int64", "rank"),
        *("transposed", "device", "sparse", "list"),
    ],
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
    assert state.block_tables[0].tolist()[0] == [4, 5, -1]


def test_unused_entries_of_a_block_table() -> None:
    state = _state(kv_groups=(KVGroup(4, 3), KVGroup(2, 2)))
    assert [table.unique().tolist() for table in state.block_tables] == [[-1], [-1]]
    blocks = (_ints(7), _ints(8, 9))
    state.begin_step(_batch([0], [4], [0], new=[_admit(0, block_ids=blocks)]))
    first, second = (
        [row for row in table.tolist() if max(row) >= 0] for table in state.block_tables
    )
    assert (first, second) == ([[7, -1, -1]], [[8, 9]])


def test_a_decoding_request_needs_blocks_for_all_its_drafts() -> None:
    state = _state(kv_groups=(KVGroup(2, 8), KVGroup(4, 3)))
    blocks = (_ints(0, 1, 2, 3), _ints(0))
    state.begin_step(_batch([0], [4], [0], new=[_admit(0, block_ids=blocks)]))
    state.end_step(_sampled([5, -1, -1]))
    before = _all_of(state)
    with pytest.raises(ValueError, match="KV group 1 for up to 7 tokens"):
        state.begin_step(_batch([0], [3], [2]))
    assert _all_of(state) == before
    grown = (NewBlocks(), NewBlocks(_ints(0), _ints(1)))
    state.begin_step(_batch([0], [3], [2], new_blocks=grown))


def test_blocks_for_all_but_the_last_draft_are_one_too_few() -> None:
    state = _state(kv_groups=(KVGroup(3, 3),))
    state.begin_step(_batch([0], [4], [0], new=[_admit(0)]))
    state.end_step(_sampled([5, -1, -1]))
    with pytest.raises(ValueError, match="KV group 0 for up to 7 tokens"):
        state.begin_step(_batch([0], [3], [2]))
    state.begin_step(_batch([0], [2], [1]))


@pytest.mark.parametrize(
    ("block_size", "per_kv_block", "interleave"), [(2, 1, 1), (2, 2, 4), (4, 1, 2)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_needs_blocks_for_its_own_tokens(
    block_size: int, per_kv_block: int, interleave: int, rank: int
) -> None:
    """As many as compute_slot_mapping_ needs for the rank's tokens, and no more."""
    for length in range(1, 13):
        stored = None
        for count in range(6, -1, -1):
            state = _state(
                kv_groups=(KVGroup(block_size, 6, per_kv_block),),
                cp_world=2,
                cp_rank=rank,
                cp_interleave=interleave,
                row_capacity=16,
            )
            admission = _admit(0, length, block_ids=(np.arange(count),))
            batch = _batch([0], [length], [0], new=[admission])
            if stored is None:
                mapping = state.begin_step(batch).slot_mappings[0][:length]
                stored = int((mapping >= 0).sum())
                continue
            if stored > count * block_size:
                with pytest.raises(ValueError, match="KV group 0"):
                    state.begin_step(batch)
            else:
                mapping = state.begin_step(batch).slot_mappings[0][:length]
                assert int((mapping >= 0).sum()) == stored


@pytest.mark.parametrize(("row", "message"), [(-1, "0 to 2"), (3, "0 to 2"), (2, "live row")])
def test_known_tokens_of_no_request(row: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"known_token_ids: row: expected .*{message}"):
        _started().known_token_ids(row)
