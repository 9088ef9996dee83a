"""Tests AsyncSpecState after failed device calls and after invalid sampler results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

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

from async_state import make_batch, make_samples, make_small_state, to_ints
from async_state.devices import Countdown, DeviceError

_VOCAB = 100


def _admit_row(row: int, tokens: Any, computed: int = 0) -> Admission:
    return Admission(row, to_ints(*tokens), (to_ints(2 * row, 2 * row + 1), to_ints(row)), computed)


def _start_requests() -> AsyncSpecState:
    """Returns a state after a reconciled step. Rows 0, 1 and 2 have requests with 5 tokens each."""
    state = make_small_state(
        ngram=NgramConfig(min_n=1, max_n=3, k=2, vocab_size=_VOCAB),
        max_rows=4,
        row_capacity=32,
        max_step_tokens=32,
        kv_groups=(KVGroup(4, 8), KVGroup(8, 4)),
    )
    new = [_admit_row(row, (row, 1, 2, 3)) for row in range(3)]
    state.begin_step(make_batch([0, 1, 2], [4, 4, 4], [0, 0, 0], new=new))
    state.end_step(make_samples(7, 7, 7))
    state.reconcile()
    return state


def _make_next_batch() -> Batch:
    """Returns a batch that needs all device calls: requests leave, join and get new blocks."""
    return make_batch(
        [0, 2, 3],
        [3, 3, 2],
        [2, 2, 0],
        removed=to_ints(1),
        new=[_admit_row(3, (5, 6, 5))],
        new_blocks=(NewBlocks(to_ints(0), to_ints(8)), NewBlocks()),
    )


def _make_next_sampled() -> Any:
    return make_samples(8, 9, 4)


def _fail_each_call(method: str) -> Iterator[tuple[AsyncSpecState, DeviceError]]:
    """Makes each device call of a method fail in turn. Yields the state and the error."""
    for number in range(1, 100):
        state = _start_requests()
        countdown = Countdown(state)
        if method == "end_step":
            state.begin_step(_make_next_batch())
        countdown.calls_left = number
        try:
            if method == "begin_step":
                state.begin_step(_make_next_batch())
            else:
                state.end_step(_make_next_sampled())
        except DeviceError as error:
            yield state, error
            continue
        assert number > 4, "expected more device calls"
        return
    raise AssertionError("expected fewer than 99 device calls")


def _assert_unusable(state: AsyncSpecState, cause: BaseException) -> None:
    with pytest.raises(RuntimeError, match="reconcile: a device call has failed") as raised:
        state.reconcile()
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("method", ["begin_step", "end_step"])
def test_state_after_any_failed_device_call_is_unusable_until_rebuilt(method: str) -> None:
    for state, error in _fail_each_call(method):
        assert not state.is_exact
        assert state.num_tokens is None
        assert state.num_computed_tokens is None
        assert state.upper_num_tokens is None
        assert state.upper_num_computed_tokens is None
        calls: dict[str, tuple[Any, ...]] = {
            "begin_step": (_make_next_batch(),),
            "end_step": (_make_next_sampled(),),
            "wait_drafts": (),
            "known_token_ids": (0,),
        }
        for name, arguments in calls.items():
            with pytest.raises(RuntimeError, match=f"{name}: a device call has failed"):
                getattr(state, name)(*arguments)
        _assert_unusable(state, error)

        state.rebuild([_admit_row(0, (0, 1, 2, 3, 7), 4), _admit_row(2, (2, 1, 2, 3, 7), 4)])
        assert state.is_exact
        assert state.num_tokens is not None
        assert state.num_tokens.tolist() == [5, 0, 5, 0]
        inputs = state.begin_step(make_batch([2, 0], [1, 1], [0, 0]))
        assert inputs.positions[:2].tolist() == [4, 4]
        assert inputs.input_ids[:2].tolist() == [7, 7]
        assert inputs.slot_mappings[0][:2].tolist() == [20, 4]
        drafts = state.end_step(make_samples(1, 3)).draft_token_ids
        assert drafts.tolist() == [[2, 3], [7, 3]]
        assert state.reconcile().num_tokens.tolist() == [6, 6]


@pytest.mark.parametrize("method", ["wait_drafts", "reconcile"])
def test_state_after_failed_wait_is_unusable(method: str) -> None:
    state = _start_requests()
    state.begin_step(_make_next_batch())
    state.end_step(_make_next_sampled())
    Countdown(state).calls_left = 1
    with pytest.raises(DeviceError) as error:
        getattr(state, method)()
    assert state.upper_num_tokens is None
    _assert_unusable(state, error.value)


def test_state_after_failed_or_rejected_rebuild_stays_unusable() -> None:
    state, error = next(_fail_each_call("begin_step"))
    with pytest.raises(ValueError, match="rebuild: new/resumed: row: expected a free row, got 0"):
        state.rebuild([_admit_row(0, (1, 2)), _admit_row(0, (1, 2))])
    _assert_unusable(state, error)
    with pytest.raises(ValueError, match="rebuild: requests: expected a sequence of Admission"):
        state.rebuild(None)  # type: ignore[arg-type]
    Countdown(state).calls_left = 5
    with pytest.raises(DeviceError):
        state.rebuild([_admit_row(0, (1, 2))])
    _assert_unusable(state, error)
    state.rebuild([_admit_row(0, (1, 2))])
    assert state.is_exact


def test_rebuild_after_a_failed_forward_pass_drops_the_step() -> None:
    state = _start_requests()
    state.begin_step(_make_next_batch())
    state.rebuild([_admit_row(row, (row, 1, 2, 3, 7), 4) for row in (0, 2)])
    assert state.is_exact
    with pytest.raises(RuntimeError, match="wait_drafts: expected a call between end_step and"):
        state.wait_drafts()  # The last drafts belong to dropped requests.
    state.begin_step(make_batch([2], [1], [0]))
    state.end_step(make_samples(1))
    assert state.reconcile().num_tokens.tolist() == [6]


# Number of scheduled drafts, sampler result, and reported reason.
INVALID_RESULTS: dict[str, tuple[int, list[int], str]] = {
    "no token": (0, [-1, -1, -1], "1 to 1 valid tokens .* of step 1 at batch position 2, got 0"),
    "no token with drafts": (1, [-1, -1, -1], "expected 1 to 2 valid tokens .*, got 0"),
    "id beyond the vocabulary": (0, [_VOCAB, -1, -1], r"valid tokens \(ids 0 to 99\) .*, got 0"),
    "too many tokens": (0, [5, 6, -1], "expected 1 to 1 valid tokens .*, got 2"),
    "too many tokens with drafts": (1, [5, 6, 7], "expected 1 to 2 valid tokens .*, got 3"),
}


@pytest.mark.parametrize("name", INVALID_RESULTS)
def test_invalid_sampler_result_is_reported_and_other_requests_continue(name: str) -> None:
    """Row 2 gets an invalid result in step 1."""
    drafts, sample, message = INVALID_RESULTS[name]
    state = _start_requests()
    state.begin_step(make_batch([0, 1, 2], [1, 1, 1 + drafts], [0, 0, drafts]))
    outputs = state.end_step(make_samples(8, 9, sample))
    batch = outputs.drafter_batch
    assert isinstance(batch, PaddedDrafterBatch)
    assert batch.num_rejected.min() >= 0
    assert batch.token_indices_to_sample.max() < 3 + drafts
    inputs = state.begin_step(make_batch([2, 1, 0], [1, 1, 1], [0, 0, 0]))
    assert inputs.positions[0] < 8, "expected a position within the request's blocks"
    state.end_step(make_samples(10, 11, 12))

    result = state.reconcile()
    assert list(result.faults) == [2]
    reason = result.faults[2]
    assert re.search(message, reason), reason
    assert result.num_sampled.tolist() == [1, 1, 0]
    assert result.num_valid_drafts.tolist() == [0, 0, 0]
    assert result.num_tokens.tolist() == [6, 6, 5]
    assert result.alive.all()
    # The next step had already begun. Its result for the same request is invalid, too.
    result = state.reconcile()
    assert result.faults == {0: reason}
    assert result.num_tokens.tolist() == [5, 7, 7]
    assert state.num_tokens is not None
    assert state.num_tokens.tolist() == [7, 7, 5, 0]

    with pytest.raises(ValueError, match=r"begin_step: rows: .* position 1 cannot continue"):
        state.begin_step(make_batch([0, 2], [1, 1], [0, 0]))
    resumed = [_admit_row(2, (2, 1, 2, 3, 7), 4)]
    batch = make_batch([0, 1, 2], [1, 1, 1], [0, 0, 0], removed=to_ints(2), resumed=resumed)
    state.begin_step(batch)
    state.end_step(make_samples(13, 14, 15))
    result = state.reconcile()
    assert not result.faults
    assert result.num_tokens.tolist() == [8, 8, 6]
