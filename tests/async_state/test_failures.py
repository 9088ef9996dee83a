"""Failures around AsyncSpecState: device calls that raise, and wrong results of a sampler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu.async_state import (
    Admission,
    AsyncSpecState,
    Batch,
    KVGroup,
    NewBlocks,
    PaddedDrafterBatch,
)

from async_state.failing import Countdown, DeviceError
from async_state.small import ints, sampled_of, small_state

_VOCAB = 100


def _admit(row: int, tokens: Any, computed: int = 0) -> Admission:
    return Admission(row, ints(*tokens), (ints(2 * row, 2 * row + 1), ints(row)), computed)


def _running() -> AsyncSpecState:
    """Rows 0, 1 and 2 live, with 5 tokens each, all reconciled."""
    state = small_state(
        ngram=NgramConfig(min_n=1, max_n=3, k=2, vocab_size=_VOCAB),
        max_rows=4,
        row_capacity=32,
        max_step_tokens=32,
        kv_groups=(KVGroup(4, 8), KVGroup(8, 4)),
        engine="index",
    )
    new = [_admit(row, (row, 1, 2, 3)) for row in range(3)]
    state.begin_step(Batch(ints(0, 1, 2), ints(4, 4, 4), ints(0, 0, 0), new=new))
    state.end_step(sampled_of(*([[7, -1, -1]] * 3)))
    state.reconcile()
    return state


def _next_batch() -> Batch:
    """Everything that leads to a device call: one leaves, one joins, one grows."""
    return Batch(
        rows=ints(0, 2, 3),
        num_scheduled_tokens=ints(3, 3, 2),
        num_scheduled_drafts=ints(2, 2, 0),
        removed=ints(1),
        new=[_admit(3, (5, 6, 5))],
        new_blocks=(NewBlocks(ints(0), ints(8)), NewBlocks()),
    )


_NEXT_SAMPLES = ([8, -1, -1], [9, -1, -1], [4, -1, -1])


def _failed(method: str) -> Iterator[tuple[AsyncSpecState, DeviceError]]:
    """A state for each device call of the method, which has failed there."""
    for left in range(1, 100):
        state = _running()
        countdown = Countdown(state)
        if method == "end_step":
            state.begin_step(_next_batch())
        countdown.left = left
        try:
            if method == "begin_step":
                state.begin_step(_next_batch())
            else:
                state.end_step(sampled_of(*_NEXT_SAMPLES))
        except DeviceError as error:
            yield state, error
            continue
        assert left > 4, "hardly a device call"
        return
    raise AssertionError("no end of device calls")


@pytest.mark.parametrize("method", ["begin_step", "end_step"])
def test_after_any_failed_device_call_all_is_refused_until_rebuilt(method: str) -> None:
    for state, error in _failed(method):
        assert not state.is_exact
        assert state.num_tokens is None
        assert state.num_computed_tokens is None
        assert state.upper_num_tokens is None
        assert state.upper_num_computed_tokens is None
        calls: dict[str, tuple[Any, ...]] = {
            "begin_step": (_next_batch(),),
            "end_step": (sampled_of(*_NEXT_SAMPLES),),
            "wait_drafts": (),
            "reconcile": (),
            "known_token_ids": (0,),
        }
        for name, arguments in calls.items():
            with pytest.raises(RuntimeError, match=f"{name}: a device call has failed") as refused:
                getattr(state, name)(*arguments)
            assert refused.value.__cause__ is error

        state.rebuild([_admit(0, (0, 1, 2, 3, 7), 4), _admit(2, (2, 1, 2, 3, 7), 4)])
        assert state.is_exact
        assert state.num_tokens is not None
        assert state.num_tokens.tolist() == [5, 0, 5, 0]
        inputs = state.begin_step(Batch(ints(2, 0), ints(1, 1), ints(0, 0)))
        assert inputs.positions[:2].tolist() == [4, 4]
        assert inputs.input_ids[:2].tolist() == [7, 7]
        assert inputs.slot_mappings[0][:2].tolist() == [20, 4]
        drafts = state.end_step(sampled_of([1, -1, -1], [3, -1, -1])).draft_token_ids
        assert drafts.tolist() == [[2, 3], [7, 3]]
        assert state.reconcile().num_tokens.tolist() == [6, 6]
        assert state.index is not None
        live = {
            int(state._mirrors.slot_of[row]): np.array(state.known_token_ids(row)) for row in (0, 2)
        }
        state.index.check_integrity(live)


@pytest.mark.parametrize("method", ["wait_drafts", "reconcile"])
def test_a_wait_that_reports_an_error_breaks_the_state(method: str) -> None:
    state = _running()
    state.begin_step(_next_batch())
    state.end_step(sampled_of(*_NEXT_SAMPLES))
    Countdown(state).left = 1
    with pytest.raises(DeviceError) as error:
        getattr(state, method)()
    assert state.upper_num_tokens is None
    with pytest.raises(RuntimeError, match="a device call has failed") as refused:
        state.reconcile()
    assert refused.value.__cause__ is error.value


def test_a_rebuild_that_fails_or_is_refused() -> None:
    state, error = next(_failed("begin_step"))
    with pytest.raises(ValueError, match="rebuild: new/resumed: row: expected a free row, got 0"):
        state.rebuild([_admit(0, (1, 2)), _admit(0, (1, 2))])
    with pytest.raises(RuntimeError, match="a device call has failed") as refused:
        state.reconcile()
    assert refused.value.__cause__ is error
    with pytest.raises(ValueError, match="rebuild: requests: expected a sequence of Admission"):
        state.rebuild(None)  # type: ignore[arg-type]
    Countdown(state).left = 5
    with pytest.raises(DeviceError):
        state.rebuild([_admit(0, (1, 2))])
    with pytest.raises(RuntimeError, match="a device call has failed") as refused:
        state.reconcile()
    assert refused.value.__cause__ is error
    state.rebuild([_admit(0, (1, 2))])
    assert state.is_exact


def test_a_rebuild_after_the_forward_pass_has_failed() -> None:
    state = _running()
    state.begin_step(_next_batch())
    state.rebuild([_admit(row, (row, 1, 2, 3, 7), 4) for row in (0, 2)])
    assert state.is_exact
    with pytest.raises(RuntimeError, match="wait_drafts: to be called between end_step and"):
        state.wait_drafts()  # those there were are of requests that the rows no longer hold
    state.begin_step(Batch(ints(2), ints(1), ints(0)))
    state.end_step(sampled_of([1, -1, -1]))
    assert state.reconcile().num_tokens.tolist() == [6]


# Scheduled drafts, what the sampler gives, and the reason.
BAD_SAMPLES: dict[str, tuple[int, list[int], str]] = {
    "no token": (
        0,
        [-1, -1, -1],
        "1 to 1 valid tokens of step 1 at batch position 2, got 0",
    ),
    "no token with drafts": (1, [-1, -1, -1], "expected 1 to 2 valid tokens .*, got 0"),
    "an id beyond the vocabulary": (0, [_VOCAB, -1, -1], "expected 1 to 1 valid tokens .*, got 0"),
    "a token too many": (0, [5, 6, -1], "expected 1 to 1 valid tokens .*, got 2"),
    "a token too many with drafts": (1, [5, 6, 7], "expected 1 to 2 valid tokens .*, got 3"),
}


def _with_a_bad_row(bad: str) -> AsyncSpecState:
    """Step 1, in which row 2, the last, gets an invalid sampler result; not reconciled."""
    drafts, sampled, _ = BAD_SAMPLES[bad]
    state = _running()
    state.begin_step(Batch(ints(0, 1, 2), ints(1, 1, 1 + drafts), ints(0, 0, drafts)))
    outputs = state.end_step(sampled_of([8, -1, -1], [9, -1, -1], sampled))
    batch = outputs.drafter_batch
    assert isinstance(batch, PaddedDrafterBatch)
    assert batch.num_rejected.min() >= 0
    assert batch.token_indices_to_sample.max() < 3 + drafts
    return state


@pytest.mark.parametrize("bad", BAD_SAMPLES)
def test_a_bad_row_of_the_sampler_is_named_and_the_others_go_on(bad: str) -> None:
    state = _with_a_bad_row(bad)
    inputs = state.begin_step(Batch(ints(2, 1, 0), ints(1, 1, 1), ints(0, 0, 0)))
    assert inputs.positions[0] < 8, "beyond the request's blocks"
    state.end_step(sampled_of([10, -1, -1], [11, -1, -1], [12, -1, -1]))

    truth = state.reconcile()
    assert list(truth.faults) == [2]
    message = truth.faults[2]
    assert re.search(BAD_SAMPLES[bad][2], message), message
    assert truth.num_sampled.tolist() == [1, 1, 0]
    assert truth.num_valid_drafts.tolist() == [0, 0, 0]
    assert truth.num_tokens.tolist() == [6, 6, 5]
    assert truth.alive.all()
    # The next step had begun already: what it says of the bad row is of no use either.
    truth = state.reconcile()
    assert truth.faults == {0: message}
    assert truth.num_tokens.tolist() == [5, 7, 7]
    assert state.num_tokens is not None
    assert state.num_tokens.tolist() == [7, 7, 5, 0]

    with pytest.raises(ValueError, match=r"begin_step: rows: .* batch position 1 cannot go on"):
        state.begin_step(Batch(ints(0, 2), ints(1, 1), ints(0, 0)))
    again = _admit(2, (2, 1, 2, 3, 7), 4)
    state.begin_step(
        Batch(ints(0, 1, 2), ints(1, 1, 1), ints(0, 0, 0), removed=ints(2), resumed=[again])
    )
    state.end_step(sampled_of([13, -1, -1], [14, -1, -1], [15, -1, -1]))
    truth = state.reconcile()
    assert not truth.faults
    assert truth.num_tokens.tolist() == [8, 8, 6]


@pytest.mark.parametrize("bad", BAD_SAMPLES)
def test_a_bad_row_that_has_left_is_ignored(bad: str) -> None:
    state = _with_a_bad_row(bad)
    state.begin_step(Batch(ints(0, 1), ints(1, 1), ints(0, 0), removed=ints(2)))
    truth = state.reconcile()
    assert not truth.faults
    assert truth.alive.tolist() == [True, True, False]
    assert truth.num_sampled.tolist() == [1, 1, 0]
    assert truth.num_tokens.tolist() == [6, 6, 0]
    assert not state._mirrors._faults


@pytest.mark.parametrize("bad", BAD_SAMPLES)
def test_what_followed_a_bad_row_is_not_returned_after_it_has_left(bad: str) -> None:
    state = _with_a_bad_row(bad)
    state.begin_step(Batch(ints(2, 0), ints(1, 1), ints(0, 0)))
    state.end_step(sampled_of([11, -1, -1], [12, -1, -1]))
    assert list(state.reconcile().faults) == [2]
    state.begin_step(Batch(ints(0, 1), ints(1, 1), ints(0, 0), removed=ints(2)))
    truth = state.reconcile()
    assert not truth.faults
    assert truth.num_sampled.tolist() == [0, 1]
    assert not state._mirrors._faults
