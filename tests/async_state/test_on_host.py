"""AsyncSpecState with drafts that the host makes in stream order (``draft_on="host"``)."""

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

from async_state import ints, make_batch
from async_state.devices import LateDevice, value_of
from async_state.engine import Engine, run
from async_state.scenario import DEVICES, Request, Scenario
from async_state.simulated_model import Launched, SimulatedModel


@pytest.mark.parametrize("seed", range(60))
def test_random_scenario_is_lossless(seed: int) -> None:
    """Also compares the drafts with the reference."""
    run(Scenario(random.Random(seed), DEVICES[seed % len(DEVICES)], draft_on="host"))


class _Step(NamedTuple):
    ended: list[int]
    """Slots of requests that have left."""
    begun: list[tuple[int, list[int], Stop | None]]
    """Slot, text and stop conditions of the admitted requests."""
    slots: list[int]
    launched: Launched


class _Model(SimulatedModel):
    """Checks only that the scheduled drafts are those of the last step."""

    def _check_drafts(self, drafts: Sequence[int], num_tokens: int, step: Launched, i: int) -> None:
        if not drafts:
            return
        assert step.previous is not None
        outputs, position = step.previous.outputs, step.previous_positions[i]
        count = min(int(value_of(outputs.num_draft_tokens)[position]), len(drafts))
        step.valid_drafts[i] = count
        expected = value_of(outputs.draft_token_ids)[position, :count].tolist()
        padding = [self.scenario.config.pad_token] * (len(drafts) - count)
        assert list(drafts) == expected + padding


class _Engine(Engine):
    """Records all steps, with the requests that join and leave."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.model = _Model(scenario, self.state, self.device)
        self.recorded: list[_Step] = []
        self._slots: dict[int, int] = {}

    def _launch(self, scheduled: Any, admitted: list[Request], *changes: Any) -> None:
        staying = {request.uid for request in self.running if request not in admitted}
        ended = [self._slots.pop(uid) for uid in self._slots.keys() - staying]
        texts = [list(request.tokens) for request in admitted]
        super()._launch(scheduled, admitted, *changes)
        slot_of = self.state._host_state.slot_of
        self._slots |= {r.uid: int(slot_of[r.row]) for r in admitted}
        begun = [(self._slots[r.uid], t, r.stop) for r, t in zip(admitted, texts, strict=True)]
        assert self.last is not None
        slots = [self._slots[r.uid] for r in self.last.requests]
        self.recorded.append(_Step(ended, begun, slots, self.last))


def _make_scenario(seed: int, config: NgramConfig) -> Scenario:
    rng = random.Random(seed)
    fixed = {"failing": 0.0, "bad_samples": 0.0, "neural": False, "k": 3, "draft_on": "host"}
    scenario = Scenario(rng, DEVICES[seed % len(DEVICES)], **fixed)
    scenario.config = replace(scenario.config, ngram=config, engine="index")
    for request in scenario.requests:
        if rng.random() < 0.5:
            request.stop = Stop(max_length=len(request.expected_tokens))
    return scenario


@pytest.mark.parametrize("visibility", ["live", "finish"])
@pytest.mark.parametrize("seed", range(30))
def test_drafts_and_store_match_a_reference_with_a_lag_of_one_step(
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
    for step in engine.recorded:
        for slot in step.ended:
            reference.end(slot)
        for slot, text, stop in step.begun:
            reference.begin(slot, text, stop=stop)
        sampled = []
        launched = step.launched
        for slot, request, count in zip(
            step.slots, launched.requests, launched.num_sampled, strict=True
        ):
            length = len(reference.rows[slot].text)
            sampled.append(request.decoded[length : length + count])
        tokens, counts, match_len, costs = reference.step(step.slots, sampled)
        outputs = launched.outputs
        assert value_of(outputs.draft_token_ids).tolist() == tokens
        assert value_of(outputs.num_draft_tokens).tolist() == counts
        assert value_of(outputs.match_len).tolist() == match_len
        actual = value_of(outputs.draft_costs).tolist()
        for row, expected, count in zip(actual, costs, counts, strict=True):
            assert row[:count] == expected[:count]
    assert engine.state.store is not None
    engine.state.store.check_integrity()
    assert reference.has_same_text_as(engine.state.store)


def test_rebuild_stores_the_text_of_dropped_requests_up_to_their_stop() -> None:
    ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store="finish")
    device = LateDevice("lazy", random.Random(0))
    config = AsyncConfig(ngram, 2, 64, 64, kv_groups=(KVGroup(64, 1),))
    state = AsyncSpecState(config, runtime=device)  # type: ignore[arg-type]
    stops = None, Stop((9,))
    new = [Admission(row, ints(1, 2), (ints(row),), stop=stops[row]) for row in range(2)]
    state.begin_step(make_batch([0, 1], [2, 2], [0, 0], new=new))
    sampled = device.tensor((2, 3), torch.int32)
    value_of(sampled).copy_(torch.tensor([[3, 4, 5], [3, 9, 7]]))
    state.end_step(sampled)
    state.rebuild([])
    assert state.store is not None
    statistics = state.store.statistics
    assert (statistics.open_slots, statistics.tokens_inserted) == (0, 2)


@pytest.mark.parametrize(
    ("store", "is_late", "draft_on", "on_host"),
    [
        (None, False, "auto", False),
        ("live", False, "auto", False),
        (None, True, "auto", False),
        ("live", True, "auto", True),
        (None, False, "host", True),
    ],
)
def test_draft_on_auto_selects_the_host_for_a_store_on_another_device(
    store: Any, is_late: bool, draft_on: Any, on_host: bool
) -> None:
    device: Any = LateDevice("lazy", random.Random(0)) if is_late else CpuDevice()
    ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store=store)
    config = AsyncConfig(ngram, 1, 64, 64, (KVGroup(64, 1),), draft_on=draft_on)
    state = AsyncSpecState(config, runtime=device)
    assert (state._device_state.host is not None) == on_host
    assert state.index is not None
