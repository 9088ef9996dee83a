"""The bookkeeping operators agree with each other and with results computed by hand.

tests/ops/test_parity.py compares them with the references; these tests would notice a reference
that is wrong in the same way as the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend, as_arrays, to_torch
from hypothesis import given
from hypothesis import strategies as st
from ngram_npu import ops
from ops.parity import check_parity
from ops.specs import OPSPECS, Args, Sample, clone_args, owner

FUSED = OPSPECS["correct_spec_state_"]
NAMES = [name for name, _ in FUSED.arguments]


@pytest.fixture(params=FRONT_ENDS, ids=lambda b: b.name)
def front_end(request: pytest.FixtureRequest) -> Backend:
    return request.param


def _parts(call: Callable[[str, Args], Any], args: Args) -> None:
    """correct_spec_state_ as its parts, with numpy between the two operators."""
    a = dict(zip(NAMES, args, strict=True))
    names = [name for name, _ in OPSPECS["correct_num_computed_tokens_"].arguments]
    call("correct_num_computed_tokens_", tuple(a[name] for name in names))
    batch = len(a["prev_positions"])
    start = a["query_start_loc"].astype(np.int64)
    computed = a["num_computed_tokens"][:batch].astype(np.int64)
    token = np.arange(len(a["positions"]))
    for i in range(batch):
        own = (token >= start[i]) & (token < start[i + 1])
        a["positions"][own] = computed[i] + token[own] - start[i]
    a["seq_lens"][:batch] = (computed + start[1:] - start[:-1]).astype(np.int32)
    a["seq_lens"][batch:] = 0
    if a["discard"] is not None:
        rows = np.arange(batch) if a["row_indices"] is None else a["row_indices"]
        known = a["num_tokens"]
        for i, row in enumerate(rows):
            a["discard"][i] = not 0 <= row < len(known) or a["seq_lens"][i] < known[row]
    names = [name for name, _ in OPSPECS["compute_slot_mapping_"].arguments]
    call("compute_slot_mapping_", tuple(a[name] for name in names))


def _check_fused(front_end: Backend, args: Args) -> None:
    fused, parts = clone_args(args), clone_args(args)
    front_end.call(FUSED.name, fused)
    _parts(front_end.call, parts)
    for name, mine, theirs in zip(NAMES, fused, parts, strict=True):
        if isinstance(mine, np.ndarray):
            assert np.array_equal(owner(mine), owner(theirs)), name


def test_the_fused_operator_equals_its_parts(front_end: Backend) -> None:
    for sample in FUSED.samples(np.random.default_rng(11)):
        _check_fused(front_end, sample.args)


@given(FUSED.strategy, st.sampled_from(FRONT_ENDS))
def test_the_fused_operator_equals_its_parts_on_anything(args: Args, front_end: Backend) -> None:
    _check_fused(front_end, args)


LAYOUTS = [(4, 1, 1, 1), (4, 1, 2, 1), (4, 1, 3, 2), (4, 1, 2, 4), (3, 4, 2, 6), (2, 6, 4, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_has_one_slot_of_its_own(
    front_end: Backend, layout: tuple[int, int, int, int]
) -> None:
    """Over all ranks together each position of a context is stored once, and a rank fills the
    blocks of its table from the first on without a hole."""
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
        mine = slots[slots >= 0] - 5 * block_size
        assert mine.tolist() == list(range(blocks * block_size))
    assert stored.tolist() == [1] * tokens


def test_padded_and_unpadded_speculation_agree(front_end: Backend) -> None:
    """The last token that one operator keeps is the one whose logits the other selects."""
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


def test_counts_follow_requests_that_move(front_end: Backend) -> None:
    """Three requests rotate while each is corrected by its own count."""
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
def test_counts_wrap(front_end: Backend, old: int, sampled: int, expected: int) -> None:
    one = np.ones(1, np.int32)
    computed = np.array([old], np.int32)
    drafts = np.array([HIGH], np.int32)
    args = (computed, one.copy(), np.zeros(1, np.int64), np.array([sampled], np.int32), drafts, one)
    front_end.call("correct_num_computed_tokens_", args)
    assert computed.tolist() == [expected]


def test_a_bad_draft_count_does_not_reach_the_neighbour(front_end: Backend) -> None:
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


@pytest.mark.parametrize("spec", OPSPECS.values(), ids=lambda s: s.name)
def test_the_wrapper_passes_its_arguments_on(spec: Any) -> None:
    """By name, so that two arguments of one type cannot be swapped unseen."""
    names = [name for name, _ in spec.arguments]

    def call(_: str, args: Args) -> tuple[Any, ...]:
        return as_arrays(getattr(ops, spec.name)(**dict(zip(names, to_torch(args), strict=True))))

    for label in {"", spec.sample_with(spec.tensor_names[-1]).label}:
        sample = spec.sample(label)
        check_parity(spec, Backend("wrapper", call, "auto"), Sample("", sample.args))
