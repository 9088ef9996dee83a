"""The bookkeeping operators agree with each other and with results computed by hand.

test_parity.py compares kernels with references; these tests detect an error that both share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend
from ops.specs import OPSPECS, Args, clone_args, owner

FUSED = OPSPECS["correct_spec_state_"]
NAMES = [name for name, _ in FUSED.arguments]


@pytest.fixture(params=FRONT_ENDS, ids=lambda b: b.name)
def front_end(request: pytest.FixtureRequest) -> Backend:
    return request.param


def run_parts(call: Callable[[str, Args], Any], args: Args) -> None:
    """Runs correct_spec_state_ as two operators, with numpy between them."""
    a = dict(zip(NAMES, args, strict=True))
    names = [name for name, _ in OPSPECS["correct_num_computed_tokens_"].arguments]
    call("correct_num_computed_tokens_", tuple(a[name] for name in names))
    batch = len(a["prev_positions"])
    start = a["query_start_loc"].astype(np.int64)
    computed = a["num_computed_tokens"][:batch].astype(np.int64)
    token = np.arange(len(a["positions"]))
    for i in range(batch):
        of_request = (token >= start[i]) & (token < start[i + 1])
        a["positions"][of_request] = computed[i] + token[of_request] - start[i]
    a["seq_lens"][:batch] = (computed + start[1:] - start[:-1]).astype(np.int32)
    a["seq_lens"][batch:] = 0
    if a["discard"] is not None:
        rows = np.arange(batch) if a["row_indices"] is None else a["row_indices"]
        known = a["num_tokens"]
        for i, row in enumerate(rows):
            a["discard"][i] = not 0 <= row < len(known) or a["seq_lens"][i] < known[row]
    names = [name for name, _ in OPSPECS["compute_slot_mapping_"].arguments]
    call("compute_slot_mapping_", tuple(a[name] for name in names))


def test_fused_operator_equals_its_parts(front_end: Backend) -> None:
    for sample in FUSED.samples(np.random.default_rng(11)):
        fused, parts = clone_args(sample.args), clone_args(sample.args)
        front_end.call(FUSED.name, fused)
        run_parts(front_end.call, parts)
        for name, result, expected in zip(NAMES, fused, parts, strict=True):
            if isinstance(result, np.ndarray):
                assert np.array_equal(owner(result), owner(expected)), name


LAYOUTS = [(4, 1, 1, 1), (4, 1, 2, 1), (4, 1, 3, 2), (4, 1, 2, 4), (3, 4, 2, 6), (2, 6, 4, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_position_has_one_slot_on_one_rank(
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
    stored = np.zeros(tokens, int)
    for rank in range(world):
        slots = np.full(tokens, -9, np.int64)
        args = (start, positions, table, slots, None)
        front_end.call(
            "compute_slot_mapping_", (*args, block_size, per_kv, world, rank, interleave, -1)
        )
        stored += slots >= 0
        filled = slots[slots >= 0] - 5 * block_size
        assert filled.tolist() == list(range(blocks * block_size))
    assert stored.tolist() == [1] * tokens


def test_padded_and_unpadded_inputs_select_same_tokens(front_end: Backend) -> None:
    """The last token that prepare_inputs keeps is the one that prepare_inputs_padded selects."""
    rng = np.random.default_rng(4)
    drafts = rng.integers(0, 6, 30).astype(np.int32)
    sampled = rng.integers(1, drafts + 2).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(drafts + 1)]).astype(np.int32)
    cu = np.cumsum(drafts, dtype=np.int32)
    to_sample, rejected = front_end.call("prepare_inputs_padded", (cu, sampled, start))
    total = int(start[-1])
    new_start, _, kept = front_end.call("prepare_inputs", (start, start[1:], rejected, total))
    assert kept[new_start[1:] - 1].tolist() == to_sample.tolist()
    assert (new_start[1:] - new_start[:-1]).tolist() == np.where(drafts > 0, sampled, 1).tolist()


def test_counts_move_with_requests(front_end: Backend) -> None:
    """Three requests rotate, and each is corrected by its own count."""
    i32 = np.int32
    computed, accepted = np.array([100, 200, 300], i32), np.ones(3, i32)
    prev = np.array([1, 2, 0])
    sampled, drafted = np.array([1, 2, 3], i32), np.array([5, 5, 5], i32)
    host = np.full(3, -1, i32)
    args = (computed, accepted, prev, sampled, drafted, host)
    front_end.call("correct_num_computed_tokens_", args)
    assert computed.tolist() == [202, 303, 101]
    assert accepted.tolist() == [2, 3, 1]


LOW, HIGH = -(2**31), 2**31 - 1


@pytest.mark.parametrize(
    ("old", "sampled", "expected"),
    [(HIGH, 1, LOW), (LOW, -1, HIGH), (HIGH, HIGH, -2), (LOW, LOW, 0)],
)
def test_counts_wrap_at_32_bits(front_end: Backend, old: int, sampled: int, expected: int) -> None:
    one = np.ones(1, np.int32)
    computed = np.array([old], np.int32)
    drafts = np.array([HIGH], np.int32)
    args = (computed, one.copy(), np.zeros(1, np.int64), np.array([sampled], np.int32), drafts, one)
    front_end.call("correct_num_computed_tokens_", args)
    assert computed.tolist() == [expected]


def test_too_high_draft_count_does_not_change_next_request(front_end: Backend) -> None:
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
