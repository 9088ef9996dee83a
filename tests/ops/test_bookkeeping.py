"""Tests that the bookkeeping operators agree with each other and with results computed by hand.

test_parity.py compares kernels with references. The tests here detect errors that a kernel and its
reference have in common.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend


@pytest.fixture(params=FRONT_ENDS, ids=lambda b: b.name)
def front_end(request: pytest.FixtureRequest) -> Backend:
    return request.param


LAYOUTS = [(4, 1, 1, 1), (4, 1, 2, 1), (4, 1, 3, 2), (4, 1, 2, 4), (3, 4, 2, 6), (2, 6, 4, 3)]
"""block_size, blocks_per_kv_block, cp_world, cp_interleave"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_position_has_single_slot_over_all_ranks(
    front_end: Backend, layout: tuple[int, int, int, int]
) -> None:
    """Each position is stored once over all ranks, and each rank fills the blocks of its table in
    order and without gaps."""
    block_size, per_kv, world, interleave = layout
    blocks = 3 * per_kv
    tokens = blocks * block_size * world
    table = np.arange(blocks, dtype=np.int32)[None] + 5
    positions = np.arange(tokens, dtype=np.int64)
    start = np.array([0, tokens], np.int32)
    num_slots = np.zeros(tokens, int)  # of each position, over all ranks
    for rank in range(world):
        slots = np.full(tokens, -9, np.int64)
        args = (start, positions, table, slots, None)
        front_end.call(
            "compute_slot_mapping_", (*args, block_size, per_kv, world, rank, interleave, -1)
        )
        num_slots += slots >= 0
        used_slots = slots[slots >= 0] - 5 * block_size
        assert used_slots.tolist() == list(range(blocks * block_size))
    assert num_slots.tolist() == [1] * tokens


def test_padded_and_unpadded_inputs_select_same_tokens(front_end: Backend) -> None:
    """The last token that prepare_inputs keeps is the one that prepare_inputs_padded selects."""
    rng = np.random.default_rng(4)
    drafts = rng.integers(0, 6, 30).astype(np.int32)
    sampled = rng.integers(1, drafts + 2).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(drafts + 1)]).astype(np.int32)
    cu_num_draft_tokens = np.cumsum(drafts, dtype=np.int32)
    to_sample, rejected = front_end.call(
        "prepare_inputs_padded", (cu_num_draft_tokens, sampled, start)
    )
    total = int(start[-1])
    new_start, _, kept = front_end.call("prepare_inputs", (start, start[1:], rejected, total))
    assert kept[new_start[1:] - 1].tolist() == to_sample.tolist()
    assert (new_start[1:] - new_start[:-1]).tolist() == np.where(drafts > 0, sampled, 1).tolist()


def test_counts_move_with_requests(front_end: Backend) -> None:
    """Three requests change their batch positions, and each is corrected by its own count."""
    computed, accepted = np.array([100, 200, 300], np.int32), np.ones(3, np.int32)
    previous = np.array([1, 2, 0])
    sampled, drafted = np.array([1, 2, 3], np.int32), np.array([5, 5, 5], np.int32)
    host_counts = np.full(3, -1, np.int32)
    args = (computed, accepted, previous, sampled, drafted, host_counts)
    front_end.call("correct_num_computed_tokens_", args)
    assert computed.tolist() == [202, 303, 101]
    assert accepted.tolist() == [2, 3, 1]


def test_draft_count_above_number_of_tokens_changes_only_own_request(front_end: Backend) -> None:
    ids = np.array([1, 2, 3, 4, 5, 6], np.int32)
    start = np.array([0, 3, 6], np.int32)
    args = (
        ids,
        start,
        np.array([-1, 0]),
        np.array([70], np.int32),
        np.array([[7, 8, 9, 10]], np.int32),
        np.array([0, 4], np.int32),  # the request has three tokens
        0,
    )
    front_end.call("prepare_input_ids_", args)
    assert ids.tolist() == [1, 2, 3, 8, 9, 10]
