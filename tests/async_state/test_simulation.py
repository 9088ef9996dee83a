"""Tests that random scenarios are lossless and detect faults."""

from __future__ import annotations

import pytest
from ngram_npu import ops as _registered  # noqa: F401

from async_state.async_proof import find_detection, run_scenarios
from async_state.faults import FAULTS

NUM_SCENARIOS = 50
"""Number of scenarios in a test. The first ones detect all faults; the next have all events."""
NUM_COMBINED = 25
FREQUENT_EVENTS = (
    *("readmissions", "moves", "discarded", "padded", "accepted", "rejected", "stored tokens"),
    *("launches of correct_spec_state_", "launches of compute_slot_mapping_"),
    *("launches of prepare_input_ids_", "launches of prepare_next_token_ids"),
    *("launches of prepare_inputs_padded", "launches of prepare_inputs"),
    *("launches of ngram_step_", "launches of merge_drafts_"),
    *("launches of store_append_", "launches of store_propose_"),
)
MERGE_EVENTS = "neural drafts", "n-grams instead", "n-grams after neural"
RARE_EVENTS = "empty", "rebuilt", "bad samples", *MERGE_EVENTS


@pytest.mark.slow
def test_first_scenarios_are_lossless() -> None:
    assert not run_scenarios(NUM_SCENARIOS)["failed"]


def test_next_scenarios_are_lossless_and_cover_all_events() -> None:
    """To repeat a failed scenario, call ``run_scenario(make_scenario(number))``. `make prove` runs
    10,000 scenarios."""
    result = run_scenarios(NUM_SCENARIOS, first=NUM_SCENARIOS)
    assert not result["failed"]
    assert [name for name in FREQUENT_EVENTS if result["totals"].get(name, 0) <= 50] == []
    assert [name for name in RARE_EVENTS if result["totals"].get(name, 0) == 0] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", [n * NUM_COMBINED for n in range(4)])
def test_scenarios_with_graphs_mrope_and_two_stages_are_lossless(first: int) -> None:
    result = run_scenarios(NUM_COMBINED, first, has_all_options=True)
    assert not result["failed"]
    totals = result["totals"]
    for option in ("graphs", "M-RoPE", "two stages"):
        assert totals[f"steps with {option}"] == totals["steps"] > 250


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected_by_a_seeded_scenario(name: str) -> None:
    detection = find_detection(name)
    assert detection is not None
    # The scenario passes without the fault, because it is one of the seeded scenarios above.
    assert detection[0] < NUM_SCENARIOS
