"""Tests AsyncSpecState with drafts that the host makes in stream order (``draft_on="host"``)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from core.host_drafting.reference import Reference
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, CpuDevice, KVGroup
from ngram_npu.host_drafting import Stop

from async_state import make_batch, to_ints
from async_state.devices import LateDevice, get_value
from async_state.engine import Engine, run_scenario
from async_state.scenario import DEVICES, Request, Scenario
from async_state.simulated_model import LaunchedStep, SimulatedModel


@pytest.mark.parametrize("seed", range(60))
def test_random_scenario_is_lossless(seed: int) -> None:
    """The simulated model also compares the drafts with the reference."""
    run_scenario(Scenario(random.Random(seed), DEVICES[seed % len(DEVICES)], draft_on="host"))


class _Step(NamedTuple):
    ended_slots: list[int]
    """Slots of requests that have left."""
    begun_texts: list[tuple[int, list[int], Stop | None]]
    """Slot, text and stop conditions of the admitted requests."""
    slots: list[int]
    """Slots of the batch."""
    launched_step: LaunchedStep


class _Model(SimulatedModel):
    """Checks only that the scheduled drafts are the previous step's drafts, followed by padding."""

    def _check_drafts(
        self, drafts: Sequence[int], num_tokens: int, step: LaunchedStep, i: int
    ) -> None:
        if not drafts:
            return
        assert step.previous_step is not None
        outputs, position = step.previous_step.outputs, step.previous_positions[i]
        count = min(int(get_value(outputs.num_draft_tokens)[position]), len(drafts))
        step.num_valid_drafts[i] = count
        expected = get_value(outputs.draft_token_ids)[position, :count].tolist()
        padding = [self.scenario.config.pad_token] * (len(drafts) - count)
        assert list(drafts) == expected + padding


class _Engine(Engine):
    """Records all steps, with the slots of the requests that join and leave."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.model = _Model(scenario, self.state, self.device)
        self.recorded_steps: list[_Step] = []
        self._slots: dict[int, int] = {}  # by id of the request

    def _launch_step(self, scheduled: Any, admitted: list[Request], *changes: Any) -> None:
        staying_uids = {request.uid for request in self.running if request not in admitted}
        ended_slots = [self._slots.pop(uid) for uid in self._slots.keys() - staying_uids]
        texts = [list(request.tokens) for request in admitted]
        super()._launch_step(scheduled, admitted, *changes)
        slot_of = self.state._host_state.slot_of
        self._slots |= {r.uid: int(slot_of[r.row]) for r in admitted}
        pairs = zip(admitted, texts, strict=True)
        begun_texts = [(self._slots[r.uid], text, r.stop) for r, text in pairs]
        assert self.last_step is not None
        slots = [self._slots[r.uid] for r in self.last_step.requests]
        self.recorded_steps.append(_Step(ended_slots, begun_texts, slots, self.last_step))


def _make_scenario(seed: int, config: NgramConfig) -> Scenario:
    rng = random.Random(seed)
    fixed = {"neural": False, "k": 3, "draft_on": "host"}
    fixed |= {"failure_probability": 0.0, "invalid_probability": 0.0}
    scenario = Scenario(rng, DEVICES[seed % len(DEVICES)], **fixed)
    scenario.config = replace(scenario.config, ngram=config, engine="index")
    for request in scenario.requests:
        if rng.random() < 0.5:
            request.stop = Stop(max_length=len(request.expected_tokens))
    return scenario


@pytest.mark.parametrize("visibility", ["live", "finish"])
@pytest.mark.parametrize("seed", range(30))
def test_drafts_and_store_equal_those_of_a_reference_with_a_lag_of_one_step(
    seed: int, visibility: Any
) -> None:
    config = NgramConfig(
        k=3,
        sizes="ladder",
        min_draft_probability=0.1,
        store=visibility,
        store_tokens=8192,
        store_costs=np.ones((16, 56), np.uint8),
    )
    scenario = _make_scenario(seed, config)
    rows, capacity = scenario.config.max_rows, scenario.config.row_capacity
    store = NgramStore(rows, 8192, visibility=visibility, kind="numpy")
    reference = Reference(config, store, 1, (rows, capacity), fill=False)
    engine = _Engine(scenario)
    engine.run()
    engine.device.drain()
    for step in engine.recorded_steps:
        for slot in step.ended_slots:
            reference.end(slot)
        for slot, text, stop in step.begun_texts:
            reference.begin(slot, text, stop=stop)
        samples = []
        launched_step = step.launched_step
        for slot, request, count in zip(
            step.slots, launched_step.requests, launched_step.num_sampled, strict=True
        ):
            length = len(reference.rows[slot].text)
            samples.append(request.decoded_tokens[length : length + count])
        tokens, counts, match_len, costs = reference.step(step.slots, samples)
        outputs = launched_step.outputs
        assert get_value(outputs.draft_token_ids).tolist() == tokens
        assert get_value(outputs.num_draft_tokens).tolist() == counts
        assert get_value(outputs.match_len).tolist() == match_len
        actual = get_value(outputs.draft_costs).tolist()
        for row, expected, count in zip(actual, costs, counts, strict=True):
            assert row[:count] == expected[:count]
    assert engine.state.store is not None
    engine.state.store.check_integrity()
    assert reference.has_same_text_as(engine.state.store)


def test_rebuild_stores_text_of_dropped_requests_up_to_their_stop_tokens() -> None:
    ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store="finish")
    device = LateDevice("lazy", random.Random(0))
    config = AsyncConfig(ngram, 2, 64, 64, kv_groups=(KVGroup(64, 1),))
    state = AsyncSpecState(config, runtime=device)  # type: ignore[arg-type]
    stops = None, Stop((9,))
    new = [Admission(row, to_ints(1, 2), (to_ints(row),), stop=stops[row]) for row in range(2)]
    state.begin_step(make_batch([0, 1], [2, 2], [0, 0], new=new))
    samples = device.tensor((2, 3), torch.int32)
    get_value(samples).copy_(torch.tensor([[3, 4, 5], [3, 9, 7]]))
    state.end_step(samples)
    state.rebuild([])
    assert state.store is not None
    statistics = state.store.statistics
    assert (statistics.open_slots, statistics.tokens_inserted) == (0, 2)


@pytest.mark.parametrize(
    ("store", "is_late", "draft_on", "drafts_on_host"),
    [
        (None, False, "auto", False),
        ("live", False, "auto", False),
        (None, True, "auto", False),
        ("live", True, "auto", True),
        (None, False, "host", True),
    ],
)
def test_draft_on_auto_selects_host_if_device_with_store_is_not_the_cpu(
    store: Any, is_late: bool, draft_on: Any, drafts_on_host: bool
) -> None:
    device: Any = LateDevice("lazy", random.Random(0)) if is_late else CpuDevice()
    ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store=store)
    config = AsyncConfig(ngram, 1, 64, 64, (KVGroup(64, 1),), draft_on=draft_on)
    state = AsyncSpecState(config, runtime=device)
    assert (state._device_state.host is not None) == drafts_on_host
    assert state.index is not None
