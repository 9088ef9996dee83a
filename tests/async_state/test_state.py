"""Tests AsyncSpecState alone: options, order of calls, invalid batches, and counts on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramStore, _library
from ngram_npu.async_state import AsyncSpecState, Batch, CpuDevice, KVGroup, NewBlocks

from async_state import admit_row, make_batch, make_samples, make_small_state, to_ints

# Configuration.


@pytest.mark.parametrize(
    "changes",
    [
        {"ngram": {"k": 3}},
        {"max_rows": 0},
        {"max_rows": 1.5},
        {"row_capacity": 0},
        {"max_step_tokens": 0},
        {"kv_groups": ()},
        {"kv_groups": (KVGroup(0, 1),)},
        {"kv_groups": (KVGroup(4, 1.5),)},  # type: ignore[arg-type]
        {"kv_groups": (KVGroup(2**16, 1, 2**15),)},
        {"kv_groups": (KVGroup(4, 3), KVGroup(2**20, 1)), "cp_world": 2**11},
        {"slot_dtype": "int16"},
        {"cp_world": 0},
        {"cp_rank": 1},
        {"cp_rank": -1},
        {"cp_rank": 2, "cp_world": 2},
        {"cp_interleave": 0},
        {"cp_interleave": 3, "cp_world": 2},
        {"cp_interleave": 2**30, "cp_world": 2, "kv_groups": (KVGroup(2**30, 1),)},
        {"pad_slot": 2**31, "slot_dtype": "int32"},
        {"pad_slot": -(2**63) - 1},
        {"pad_slot": 0.5},
        {"pad_token": 2**31},
    ],
    ids=str,
)
def test_config_with_invalid_value_raises(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"AsyncConfig: {next(iter(changes))}"):
        make_small_state(**changes)


def test_largest_block_size_and_slot_are_supported() -> None:
    state = make_small_state(
        kv_groups=(KVGroup(2**30, 1), KVGroup(4, 3)), cp_interleave=3, pad_slot=2**40, max_rows=1
    )
    blocks = (to_ints(1), to_ints(0))
    inputs = state.begin_step(make_batch([0], [4], [0], new=[admit_row(0, block_ids=blocks)]))
    assert inputs.slot_mappings[0][:5].tolist() == [*range(2**30, 2**30 + 4), 2**40]


def test_invalid_device_or_store_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "backends", lambda: {"cuda": _library.Backend("cuda", 0, "why")})
    store = NgramStore(512)
    store._device = torch.device("cuda", 0)
    invalid_arguments: list[tuple[dict[str, Any], str]] = [
        ({"device": "foo"}, "device: expected cpu, cuda or npu, got foo"),
        ({"device": torch.device("meta")}, "device: expected cpu, cuda or npu, got meta"),
        ({"device": "cuda:0"}, "device: expected a device with a usable backend, got cuda:0: why"),
        ({"store": True}, "store: expected an NgramStore, got bool"),
        ({"store": store}, "store: expected a store on cpu, got one on cuda:0"),
    ]
    for arguments, message in invalid_arguments:
        runtime = None if "device" in arguments else CpuDevice()
        with pytest.raises(ValueError, match=f"AsyncSpecState: {message}"):
            AsyncSpecState(make_small_state(CpuDevice()).config, runtime=runtime, **arguments)
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    with pytest.raises(ValueError, match=r"NgramStore: device: expected .*, got cuda: why"):
        NgramStore(512, device="cuda")


# Steps.


def _read_upper_bounds(state: AsyncSpecState, counts: str = "tokens") -> list[int]:
    bounds = getattr(state, f"upper_num_{counts}")
    assert bounds is not None
    return [*map(int, bounds)]


def _start_requests() -> AsyncSpecState:
    """Returns a state after a step with rows 0 and 1. Row 0 has sampled a token. In row 1, the step
    has computed only a part of the prompt."""
    state = make_small_state()
    state.begin_step(make_batch([0, 1], [4, 2], [0, 0], new=[admit_row(0), admit_row(1)]))
    state.end_step(make_samples(5, 5))
    return state


def test_host_does_not_know_counts_and_tokens_until_reconciled() -> None:
    state = _start_requests()
    assert state.num_tokens is state.num_computed_tokens is state.known_token_ids(0) is None
    state.reconcile()
    known_tokens = state.known_token_ids(0)
    assert known_tokens is not None
    assert known_tokens.tolist() == [0, 1, 2, 3, 5]


def test_drafts_are_downloaded_and_padding_is_not_counted_as_valid() -> None:
    state = make_small_state()
    new = [admit_row(0, token_ids=to_ints(1, 2, 3, 1)), admit_row(1)]
    state.begin_step(make_batch([0, 1], [4, 4], [0, 0], new=new))
    state.end_step(make_samples(2, 9))
    drafts = state.wait_drafts()
    assert drafts.draft_token_ids.tolist() == [[3, 1], [-1, -1]]
    assert drafts.num_draft_tokens.tolist() == [2, 0]
    flat, starts = drafts.ragged()
    assert (flat.tolist(), starts.tolist()) == ([3, 1], [0, 2, 2])
    state.begin_step(make_batch([0, 1], [3, 3], [2, 2]))
    state.end_step(make_samples([3, 1, 2], 4))
    state.reconcile()
    result = state.reconcile()
    assert result.num_scheduled_drafts.tolist() == [2, 2]
    assert result.num_valid_drafts.tolist() == [2, 0]
    assert result.num_accepted_drafts.tolist() == [2, 0]


def test_calls_in_wrong_order_raise() -> None:
    state = make_small_state()
    with pytest.raises(RuntimeError, match="no step has begun"):
        state.end_step(make_samples([1]))
    with pytest.raises(RuntimeError, match="already reconciled"):
        state.reconcile()
    with pytest.raises(RuntimeError, match="wait_drafts"):
        state.wait_drafts()
    state = _start_requests()
    state.begin_step(make_batch([0], [1], [0]))
    with pytest.raises(RuntimeError, match="end_step has not been called"):
        state.begin_step(make_batch([0], [1], [0]))
    state.reconcile()
    with pytest.raises(RuntimeError, match="reconcile: step 1 has not ended; call end_step first"):
        state.reconcile()
    with pytest.raises(RuntimeError, match="wait_drafts"):
        state.wait_drafts()
    state.end_step(make_samples([1]))
    state.begin_step(make_batch([0], [1], [0]))
    state.end_step(make_samples([1]))
    with pytest.raises(RuntimeError, match="step 1 must be reconciled"):
        state.begin_step(make_batch([0], [1], [0]))


@pytest.mark.parametrize(("row", "message"), [(-1, "0 to 2"), (3, "0 to 2"), (2, "live row")])
def test_known_token_ids_of_free_row_raises(row: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"known_token_ids: row: expected .*{message}"):
        _start_requests().known_token_ids(row)


# Invalid batches.

_edit_batch = partial(make_batch, [0], [1], [0])


def _admit_to_row_2(*length: int, **changes: Any) -> Batch:
    return _edit_batch(new=[admit_row(2, *length, **changes)])


def _append_blocks(rows: Any, block_ids: Any) -> Batch:
    return _edit_batch(new_blocks=(NewBlocks(rows, block_ids),))


INVALID_BATCHES: dict[str, tuple[Any, str]] = {
    # Rows.
    "row out of range": (make_batch([3], [1], [0]), "rows: expected 0 to 2"),
    "negative row": (make_batch([0, -1], [1, 1], [0, 0]), "rows: expected 0 to 2, got [ 0 -1]"),
    "free row": (make_batch([2], [1], [0]), "live rows, got 2"),
    "duplicate row": (make_batch([0, 0], [1, 1], [0, 0]), "each row once"),
    "lengths differ": (make_batch([0, 1], [1], [0, 0]), "equal lengths"),
    # Scheduled tokens and drafts.
    "no tokens scheduled": (make_batch([0], [0], [0]), "num_scheduled_tokens: expected 1 to 1"),
    "more than known": (
        make_batch([1], [3], [0]),
        "num_scheduled_tokens: expected 1 to 2 (known tokens that are not computed), got 3",
    ),
    "too many drafts": (make_batch([0], [4], [3]), "num_scheduled_drafts: expected 0 to 2, got 3"),
    "negative drafts": (make_batch([0], [1], [-1]), "num_scheduled_drafts: expected 0 to 2"),
    "drafts in a prompt": (
        make_batch([1], [3], [1]),
        "expected 0, got 1 at batch position 0: the request did not sample in the last step",
    ),
    "drafts not in the number of tokens": (
        make_batch([0], [1], [2]),
        "num_scheduled_tokens: expected 3 (the uncomputed token and 2 drafts), got 1",
    ),
    # Removals and moves.
    "removed twice": (_edit_batch(removed=to_ints(1, 1)), "removed: expected each row once"),
    "removed free row": (_edit_batch(removed=to_ints(2)), "removed: expected live rows"),
    "moved from free row": (_edit_batch(moves=to_ints([2, 1])), "moves: expected live rows"),
    "moved to live row": (_edit_batch(moves=to_ints([0, 1])), "free target rows"),
    "moved to row out of range": (_edit_batch(moves=to_ints([1, 3])), "moves: expected 0 to 2"),
    "moves that are not pairs": (_edit_batch(moves=to_ints(1, 2)), "moves: expected [N,2]"),
    # Admissions.
    "admitted to negative row": (_edit_batch(new=[admit_row(-1)]), "expected a free row, got -1"),
    "admitted to fractional row": (_edit_batch(new=[admit_row(1.5)]), "a free row, got 1.5"),  # type: ignore[arg-type]
    "admitted twice": (_edit_batch(new=[admit_row(2), admit_row(2)]), "a free row"),
    "admitted without tokens": (_admit_to_row_2(0), "1 to 12 tokens, got 0"),
    "admitted with too many tokens": (_admit_to_row_2(13), "got 13"),
    "all tokens computed": (
        _edit_batch(resumed=[admit_row(2, num_computed_tokens=4)]),
        "num_computed_tokens: expected 0 to 3",
    ),
    "negative scope": (_admit_to_row_2(scope=-2), "scope: expected -1 to 2**63 - 1, got -2"),
    # Blocks.
    "blocks for free row": (_append_blocks(to_ints(2), to_ints(0)), "new_blocks: expected live"),
    "more rows than blocks": (_append_blocks(to_ints(0, 0), to_ints(0)), "expected 2 block_ids"),
    "too many KV groups": (
        _edit_batch(new_blocks=(NewBlocks(), NewBlocks())),
        "expected 1, one per KV group",
    ),
    "admitted without KV groups": (
        _admit_to_row_2(block_ids=()),
        "block_ids: expected 1 arrays, one per KV group, got ()",
    ),
    "admitted with negative block": (
        _admit_to_row_2(block_ids=(to_ints(1, -1),)),
        "new/resumed: block_ids: expected ids >= 0, got -1",
    ),
    "negative new block": (
        _append_blocks(to_ints(0), to_ints(-2)),
        "new_blocks: block_ids: expected ids >= 0, got -2",
    ),
    "too many blocks": (
        _append_blocks(to_ints(0, 0), to_ints(5, 6)),
        "at most 3 blocks in row 0 (KVGroup.max_blocks of KV group 0), got 4",
    ),
    "admitted with too many blocks": (
        _admit_to_row_2(block_ids=(to_ints(1, 2, 3, 4),)),
        "at most 3 blocks in row 2 (KVGroup.max_blocks of KV group 0), got 4",
    ),
    "admitted with too few blocks": (
        make_batch([2], [5], [0], new=[admit_row(2, 5, block_ids=(to_ints(9),))]),
        "2 blocks of KV group 0 in row 2 for 5 tokens (block_size 4, cp_world 1), got 1",
    ),
    "admitted with empty blocks": (
        make_batch([0, 2], [1, 1], [0, 0], new=[admit_row(2, block_ids=([],))]),
        "1 blocks of KV group 0 in row 2 for 1 tokens (block_size 4, cp_world 1), got 0",
    ),
    # Types.
    "no batch": (None, "batch: expected a Batch, got NoneType"),
    "new is None": (_edit_batch(new=None), "new: expected a sequence of Admission, got NoneType"),
    "resumed contains a tuple": (
        _edit_batch(resumed=[(2, to_ints(1), ())]),
        "resumed: expected a sequence of Admission, got tuple",
    ),
    "new_blocks is None": (
        _edit_batch(new_blocks=None),
        "new_blocks: expected a sequence of NewBlocks",
    ),
    "rows of floats": (Batch(np.zeros(1), to_ints(1), to_ints(0)), "rows: expected integers"),
    "rows of rank 2": (Batch(to_ints([0]), to_ints(1), to_ints(0)), "rows: expected one dimension"),
    "rows of 33 bits": (Batch(np.array([2**32]), to_ints(1), to_ints(0)), "rows: expected 32 bits"),
    "tokens of floats": (_admit_to_row_2(token_ids=np.zeros(4)), "token_ids: expected integers"),
    "new blocks of floats": (
        _append_blocks(to_ints(0), np.zeros(1)),
        "new_blocks: block_ids: expected integers",
    ),
}


def _copy_contents(state: AsyncSpecState) -> list[Any]:
    """Returns the contents of the state that an invalid batch must not change."""
    return [
        _read_upper_bounds(state),
        _read_upper_bounds(state, "computed_tokens"),
        state._host_state.slot_of.tolist(),
        state._host_state.token_ids.tolist(),
        state.token_ids.tolist(),
        state.num_tokens_on_device.tolist(),
        [table.tolist() for table in state.block_tables],
        [table._num_blocks.tolist() for table in state._block_tables],
    ]


@pytest.mark.parametrize("name", INVALID_BATCHES)
def test_begin_step_with_invalid_batch_raises_without_change(name: str) -> None:
    batch, message = INVALID_BATCHES[name]
    state = _start_requests()
    contents = _copy_contents(state)
    with pytest.raises(ValueError, match="begin_step") as error:
        state.begin_step(batch)
    assert message in str(error.value)
    assert _copy_contents(state) == contents
    state.begin_step(make_batch([0, 1], [3, 2], [2, 0]))
    state.end_step(make_samples(6, 7))
    state.reconcile()
    assert state.reconcile().num_tokens.tolist() == [6, 5]


def test_step_beyond_max_step_tokens_or_row_capacity_raises() -> None:
    state = make_small_state(max_step_tokens=5)
    with pytest.raises(ValueError, match="at most 5 together, got 8"):
        state.begin_step(make_batch([0, 1], [4, 4], [0, 0], new=[admit_row(0), admit_row(1)]))
    with pytest.raises(ValueError, match=r"at most 11 computed tokens .*, got 12"):
        make_small_state().begin_step(make_batch([0], [12], [0], new=[admit_row(0, 12)]))


@pytest.mark.parametrize(
    "sampled_tensor",
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
def test_end_step_with_invalid_tensor_raises(sampled_tensor: torch.Tensor) -> None:
    state = _start_requests()
    state.begin_step(make_batch([0, 1], [1, 2], [0, 0]))
    with pytest.raises(ValueError, match="sampled_token_ids: expected int32"):
        state.end_step(sampled_tensor)
    state.end_step(make_samples([1], [2]))


# Block tables.


def test_step_without_a_block_for_its_last_draft_raises_without_change() -> None:
    state = make_small_state(kv_groups=(KVGroup(4, 3), KVGroup(3, 3)))
    blocks = (to_ints(0, 1), to_ints(0, 1))
    state.begin_step(make_batch([0], [4], [0], new=[admit_row(0, block_ids=blocks)]))
    state.end_step(make_samples(5))
    contents = _copy_contents(state)
    with pytest.raises(ValueError, match="3 blocks of KV group 1 in row 0 for 7 tokens"):
        state.begin_step(make_batch([0], [3], [2]))
    assert _copy_contents(state) == contents
    state.begin_step(make_batch([0], [2], [1]))


@pytest.mark.parametrize(
    ("block_size", "per_kv_block", "interleave"), [(2, 1, 1), (2, 2, 4), (4, 1, 2)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_rank_needs_blocks_only_for_tokens_that_it_stores(
    block_size: int, per_kv_block: int, interleave: int, rank: int
) -> None:
    """begin_step requires exactly the blocks that compute_slot_mapping_ uses for these tokens."""
    for length in range(1, 13):
        num_stored = None
        for count in range(6, -1, -1):
            state = make_small_state(
                kv_groups=(KVGroup(block_size, 6, per_kv_block),),
                cp_world=2,
                cp_rank=rank,
                cp_interleave=interleave,
                row_capacity=16,
            )
            new = [admit_row(0, length, block_ids=(np.arange(count),))]
            batch = make_batch([0], [length], [0], new=new)
            if num_stored is not None and num_stored > count * block_size:
                with pytest.raises(ValueError, match="KV group 0"):
                    state.begin_step(batch)
                continue
            mapping = state.begin_step(batch).slot_mappings[0][:length]
            stored = int((mapping >= 0).sum())
            assert num_stored in (None, stored)
            num_stored = stored
