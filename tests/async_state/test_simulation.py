"""Tests that random scenarios are lossless and detect faults, and tests the LateDevice itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import ops as _registered  # noqa: F401

from async_state.async_proof import find_detection, run_scenarios
from async_state.devices import (
    UNDEFINED_VALUE,
    ForbiddenWaitError,
    HostReadError,
    LateDevice,
    get_value,
)
from async_state.faults import FAULTS

NUM_QUICK = 100
"""Number of seeded scenarios in a quick run. These scenarios detect every fault."""
_SLOW_STARTS = [pytest.param(first, marks=pytest.mark.slow) for first in (100, 200, 300)]
NUM_COMBINED = 25
COMBINED_STARTS = [
    pytest.param(first, marks=[pytest.mark.slow] if first else [])
    for first in range(0, 1000, NUM_COMBINED)
]
_DETECTING_SCENARIOS = {"rebuild does not empty the index": 25}
"""For faults that few scenarios detect: the first of these scenarios, to save time."""

FREQUENT_EVENTS = (
    *("readmissions", "moves", "discarded", "padded", "accepted", "rejected", "indexed"),
    *("launches of correct_spec_state_", "launches of compute_slot_mapping_"),
    *("launches of prepare_input_ids_", "launches of prepare_next_token_ids"),
    *("launches of prepare_inputs_padded", "launches of prepare_inputs"),
    *("launches of ngram_step_", "launches of ngram_index_step_"),
    *("launches of ngram_index_reset_", "launches of merge_drafts_"),
)
MERGE_EVENTS = "neural drafts", "n-grams instead", "n-grams after neural"
RARE_EVENTS = "empty", "rebuilt", "bad samples", *MERGE_EVENTS


@pytest.mark.parametrize("first", [0, *_SLOW_STARTS])
def test_seeded_scenarios_are_lossless_and_cover_all_events(first: int) -> None:
    """To repeat a failed scenario, call ``run_scenario(make_scenario(number))``."""
    result = run_scenarios(NUM_QUICK, first)
    assert not result["failed"]
    assert [name for name in FREQUENT_EVENTS if result["totals"].get(name, 0) <= 50] == []
    assert [name for name in RARE_EVENTS if result["totals"].get(name, 0) == 0] == []


@pytest.mark.parametrize("first", COMBINED_STARTS)
def test_scenarios_with_graphs_mrope_and_two_stages_are_lossless(first: int) -> None:
    result = run_scenarios(NUM_COMBINED, first, has_all_options=True)
    assert not result["failed"]
    totals = result["totals"]
    for option in ("graphs", "M-RoPE", "two stages"):
        assert totals[f"steps with {option}"] == totals["steps"] > 250


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected_by_a_seeded_scenario(name: str) -> None:
    detection = find_detection(name, _DETECTING_SCENARIOS.get(name, 0))
    assert detection is not None
    # The scenario passes without the fault, because it is one of the seeded scenarios above.
    assert detection[0] < NUM_QUICK


# The late device.


def _make_device() -> LateDevice:
    return LateDevice("lazy", random.Random(0))


def _make_tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_host_read_of_late_tensor_raises() -> None:
    tensor: Any = _make_device().tensor((4,), torch.int32)
    for read in (
        tensor.tolist,
        lambda: np.array(tensor),
        lambda: bool(tensor[0]),
        lambda: list(tensor),
        lambda: tensor + 1,
        lambda: torch.zeros(4)[tensor],
        lambda: torch.zeros(4, dtype=torch.int32).copy_(tensor),
        lambda: torch.from_dlpack(tensor),
        lambda: torch.ops.ngram_npu.prepare_inputs_padded(tensor, _make_tensor(0), tensor),
    ):
        with pytest.raises(HostReadError):
            read()


@pytest.mark.parametrize("side_waits", [True, False])
def test_delayed_copy_runs_when_the_host_waits(side_waits: bool) -> None:
    device = _make_device()
    on_device, on_host = device.tensor((2,), torch.int32), device.host_tensor((2,), torch.int32)
    source = _make_tensor(1, 2)
    device.copy(on_device, source, "main")
    if side_waits:
        device.wait("side", device.record("main"))
    device.copy(on_host, on_device, "side")
    copied = device.record("side")
    assert get_value(on_device).tolist() == [0, 0]
    assert on_host.tolist() == [UNDEFINED_VALUE, UNDEFINED_VALUE]
    source[0] = 5  # the pending copy reads the new value
    device.synchronize(copied)
    assert on_host.tolist() == ([5, 2] if side_waits else [0, 0])


def test_host_wait_where_waits_are_forbidden_raises() -> None:
    device = _make_device()
    device.launch(lambda: None)
    event = device.record("main")
    with device.forbid_waits(), pytest.raises(ForbiddenWaitError):
        device.synchronize(event)
    device.synchronize(event)
    with device.forbid_waits():
        device.synchronize(event)  # the event is set, so the host does not wait
