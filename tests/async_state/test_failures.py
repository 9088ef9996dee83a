"""AsyncSpecState after failed device calls and invalid sampler results."""

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

from async_state import ints, make_batch, sampled_tensor, small_state
from async_state.devices import Countdown, DeviceError

_VOCAB = 100


def _admit(row: int, tokens: Any, computed: int = 0) -> Admission:
    return Admission(row, ints(*tokens), (ints(2 * row, 2 * row + 1), ints(row)), computed)


def _start() -> AsyncSpecState:
    """Rows 0, 1 and 2 are live, with 5 tokens each, and their step is reconciled."""
    state = small_state(
        ngram=NgramConfig(min_n=1, max_n=3, k=2, vocab_size=_VOCAB),
        max_rows=4,
        row_capacity=32,
        max_step_tokens=32,
        kv_groups=(KVGroup(4, 8), KVGroup(8, 4)),
        engine="index",
    )
    new = [_admit(row, (row, 1, 2, 3)) for row in range(3)]
    state.begin_step(make_batch([0, 1, 2], [4, 4, 4], [0, 0, 0], new=new))
    state.end_step(sampled_tensor(7, 7, 7))
    state.reconcile()
    return state


def _next_batch() -> Batch:
    """A batch that needs all kinds of device calls: a request leaves, one joins, one grows."""
    return make_batch(
        [0, 2, 3],
        [3, 3, 2],
        [2, 2, 0],
        removed=ints(1),
        new=[_admit(3, (5, 6, 5))],
        new_blocks=(NewBlocks(ints(0), ints(8)), NewBlocks()),
    )


def _next_sampled() -> Any:
    return sampled_tensor(8, 9, 4)


def _fail_each_call(method: str) -> Iterator[tuple[AsyncSpecState, DeviceError]]:
    """Yields a state for each device call of a method that fails, and the error."""
    for left in range(1, 100):
        state = _start()
        countdown = Countdown(state)
        if method == "end_step":
            state.begin_step(_next_batch())
        countdown.left = left
        try:
            if method == "begin_step":
                state.begin_step(_next_batch())
            else:
                state.end_step(_next_sampled())
        except DeviceError as error:
            yield state, error
            continue
        assert left > 4, "expected more device calls"
        return
    raise AssertionError("too many device calls")


def _assert_unusable(state: AsyncSpecState, cause: BaseException) -> None:
    with pytest.raises(RuntimeError, match="reconcile: a device call has failed") as refused:
        state.reconcile()
    assert refused.value.__cause__ is cause


@pytest.mark.parametrize("method", ["begin_step", "end_step"])
def test_state_is_unusable_after_any_failed_device_call_until_rebuilt(method: str) -> None:
    for state, error in _fail_each_call(method):
        assert not state.is_exact
        assert state.num_tokens is None
        assert state.num_computed_tokens is None
        assert state.upper_num_tokens is None
        assert state.upper_num_computed_tokens is None
        calls: dict[str, tuple[Any, ...]] = {
            "begin_step": (_next_batch(),),
            "end_step": (_next_sampled(),),
            "wait_drafts": (),
            "known_token_ids": (0,),
        }
        for name, arguments in calls.items():
            with pytest.raises(RuntimeError, match=f"{name}: a device call has failed"):
                getattr(state, name)(*arguments)
        _assert_unusable(state, error)

        state.rebuild([_admit(0, (0, 1, 2, 3, 7), 4), _admit(2, (2, 1, 2, 3, 7), 4)])
        assert state.is_exact
        assert state.num_tokens is not None
        assert state.num_tokens.tolist() == [5, 0, 5, 0]
        inputs = state.begin_step(make_batch([2, 0], [1, 1], [0, 0]))
        assert inputs.positions[:2].tolist() == [4, 4]
        assert inputs.input_ids[:2].tolist() == [7, 7]
        assert inputs.slot_mappings[0][:2].tolist() == [20, 4]
        drafts = state.end_step(sampled_tensor(1, 3)).draft_token_ids
        assert drafts.tolist() == [[2, 3], [7, 3]]
        assert state.reconcile().num_tokens.tolist() == [6, 6]
        assert state.index is not None
        slot_of = state._host_state.slot_of
        rows = {int(slot_of[row]): np.array(state.known_token_ids(row)) for row in (0, 2)}
        state.index.check_integrity(rows)


@pytest.mark.parametrize("method", ["wait_drafts", "reconcile"])
def test_failed_wait_makes_the_state_unusable(method: str) -> None:
    state = _start()
    state.begin_step(_next_batch())
    state.end_step(_next_sampled())
    Countdown(state).left = 1
    with pytest.raises(DeviceError) as error:
        getattr(state, method)()
    assert state.upper_num_tokens is None
    _assert_unusable(state, error.value)


def test_state_stays_unusable_after_a_failed_or_rejected_rebuild() -> None:
    state, error = next(_fail_each_call("begin_step"))
    with pytest.raises(ValueError, match="rebuild: new/resumed: row: expected a free row, got 0"):
        state.rebuild([_admit(0, (1, 2)), _admit(0, (1, 2))])
    _assert_unusable(state, error)
    with pytest.raises(ValueError, match="rebuild: requests: expected a sequence of Admission"):
        state.rebuild(None)  # type: ignore[arg-type]
    Countdown(state).left = 5
    with pytest.raises(DeviceError):
        state.rebuild([_admit(0, (1, 2))])
    _assert_unusable(state, error)
    state.rebuild([_admit(0, (1, 2))])
    assert state.is_exact


def test_rebuild_after_a_failed_forward_pass_drops_the_step() -> None:
    state = _start()
    state.begin_step(_next_batch())
    state.rebuild([_admit(row, (row, 1, 2, 3, 7), 4) for row in (0, 2)])
    assert state.is_exact
    with pytest.raises(RuntimeError, match="wait_drafts: expected a call between end_step and"):
        state.wait_drafts()  # the last drafts belong to dropped requests
    state.begin_step(make_batch([2], [1], [0]))
    state.end_step(sampled_tensor(1))
    assert state.reconcile().num_tokens.tolist() == [6]


# Number of scheduled drafts, invalid result, and reason.
INVALID_RESULTS: dict[str, tuple[int, list[int], str]] = {
    "no token": (0, [-1, -1, -1], "1 to 1 valid tokens of step 1 at batch position 2, got 0"),
    "no token with drafts": (1, [-1, -1, -1], "expected 1 to 2 valid tokens .*, got 0"),
    "id beyond the vocabulary": (0, [_VOCAB, -1, -1], "expected 1 to 1 valid tokens .*, got 0"),
    "too many tokens": (0, [5, 6, -1], "expected 1 to 1 valid tokens .*, got 2"),
    "too many tokens with drafts": (1, [5, 6, 7], "expected 1 to 2 valid tokens .*, got 3"),
}


@pytest.mark.parametrize("name", INVALID_RESULTS)
def test_invalid_sampler_result_is_reported_and_other_requests_continue(name: str) -> None:
    """Row 2 gets an invalid result in step 1."""
    drafts, sampled, message = INVALID_RESULTS[name]
    state = _start()
    state.begin_step(make_batch([0, 1, 2], [1, 1, 1 + drafts], [0, 0, drafts]))
    outputs = state.end_step(sampled_tensor(8, 9, sampled))
    batch = outputs.drafter_batch
    assert isinstance(batch, PaddedDrafterBatch)
    assert batch.num_rejected.min() >= 0
    assert batch.token_indices_to_sample.max() < 3 + drafts
    inputs = state.begin_step(make_batch([2, 1, 0], [1, 1, 1], [0, 0, 0]))
    assert inputs.positions[0] < 8, "the position is outside the request's blocks"
    state.end_step(sampled_tensor(10, 11, 12))

    result = state.reconcile()
    assert list(result.faults) == [2]
    reason = result.faults[2]
    assert re.search(message, reason), reason
    assert result.num_sampled.tolist() == [1, 1, 0]
    assert result.num_valid_drafts.tolist() == [0, 0, 0]
    assert result.num_tokens.tolist() == [6, 6, 5]
    assert result.alive.all()
    # The next step had already begun. Its result for the request is invalid too.
    result = state.reconcile()
    assert result.faults == {0: reason}
    assert result.num_tokens.tolist() == [5, 7, 7]
    assert state.num_tokens is not None
    assert state.num_tokens.tolist() == [7, 7, 5, 0]

    with pytest.raises(ValueError, match=r"begin_step: rows: .* position 1 cannot continue"):
        state.begin_step(make_batch([0, 2], [1, 1], [0, 0]))
    resumed = [_admit(2, (2, 1, 2, 3, 7), 4)]
    state.begin_step(make_batch([0, 1, 2], [1, 1, 1], [0, 0, 0], removed=ints(2), resumed=resumed))
    state.end_step(sampled_tensor(13, 14, 15))
    result = state.reconcile()
    assert not result.faults
    assert result.num_tokens.tolist() == [8, 8, 6]
