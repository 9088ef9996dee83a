"""Random scenarios are lossless, faults are detected, and the late device works as intended."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import ops as _registered  # noqa: F401

from async_state.async_proof import find_detection, run_scenarios
from async_state.devices import (
    POISON,
    CriticalWaitError,
    HostReadError,
    LateDevice,
    value_of,
)
from async_state.faults import FAULTS

QUICK = 100
"""Number of seeded scenarios in a normal run. They detect every fault."""
_SLOW = [pytest.param(first, marks=pytest.mark.slow) for first in (100, 200, 300)]
_RARE = {"rebuild does not empty the index": 25}
"""The first scenarios that detect these faults."""

FREQUENT = (
    *("readmissions", "moves", "discarded", "padded", "accepted", "rejected", "indexed"),
    *("launches of correct_spec_state_", "launches of compute_slot_mapping_"),
    *("launches of prepare_input_ids_", "launches of prepare_next_token_ids"),
    *("launches of prepare_inputs_padded", "launches of prepare_inputs"),
    *("launches of ngram_step_", "launches of ngram_index_step_"),
    *("launches of ngram_index_reset_", "launches of merge_drafts_"),
)
RARE = "empty", "rebuilt", "bad samples", "neural drafts", "n-grams instead", "n-grams after neural"


@pytest.mark.parametrize("first", [0, *_SLOW])
def test_seeded_scenarios_are_lossless_and_cover_all_events(first: int) -> None:
    """``run(make_scenario(number))`` repeats a failed scenario."""
    result = run_scenarios(QUICK, first)
    assert not result["failed"]
    assert [name for name in FREQUENT if result["totals"].get(name, 0) <= 50] == []
    assert [name for name in RARE if result["totals"].get(name, 0) == 0] == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected(name: str) -> None:
    detection = find_detection(name, _RARE.get(name, 0))
    assert detection is not None
    # Without the fault, the scenario passes: it is one of the seeded scenarios above.
    assert detection[0] < QUICK


# The late device.


def _device() -> LateDevice:
    return LateDevice("lazy", random.Random(0))


def _tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_host_read_of_late_tensor_raises() -> None:
    tensor: Any = _device().tensor((4,), torch.int32)
    for read in (
        tensor.tolist,
        lambda: np.array(tensor),
        lambda: bool(tensor[0]),
        lambda: list(tensor),
        lambda: tensor + 1,
        lambda: torch.zeros(4)[tensor],
        lambda: torch.zeros(4, dtype=torch.int32).copy_(tensor),
        lambda: torch.from_dlpack(tensor),
        lambda: torch.ops.ngram_npu.prepare_inputs_padded(tensor, _tensor(0), tensor),
    ):
        with pytest.raises(HostReadError):
            read()


@pytest.mark.parametrize("side_waits", [True, False])
def test_late_copy_runs_when_the_host_waits(side_waits: bool) -> None:
    device = _device()
    there, here = device.tensor((2,), torch.int32), device.host_tensor((2,), torch.int32)
    source = _tensor(1, 2)
    device.copy(there, source, "main")
    if side_waits:
        device.wait("side", device.record("main"))
    device.copy(here, there, "side")
    done = device.record("side")
    assert value_of(there).tolist() == [0, 0]
    assert here.tolist() == [POISON, POISON]
    source[0] = 5  # the pending copy reads the new value
    device.synchronize(done)
    assert here.tolist() == ([5, 2] if side_waits else [0, 0])


def test_host_wait_in_critical_section_raises() -> None:
    device = _device()
    device.launch(lambda: None)
    event = device.record("main")
    with device.must_not_wait(), pytest.raises(CriticalWaitError):
        device.synchronize(event)
    device.synchronize(event)
    with device.must_not_wait():
        device.synchronize(event)  # the event is set, so the host does not wait
