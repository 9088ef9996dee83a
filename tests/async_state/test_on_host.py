"""The running loop with drafts that the host makes in the order of the device's stream."""

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
from ngram_npu.async_state import (
    Admission,
    AsyncConfig,
    AsyncSpecState,
    Batch,
    CpuDevice,
    KVGroup,
)
from ngram_npu.host_drafting import Stop

from async_state.device_side import DeviceSide, Launched
from async_state.engine import Engine, run
from async_state.late import LateDevice, value_of
from async_state.scenario import DEVICES, Request, Scenario
from async_state.small import ints


@pytest.mark.parametrize("seed", range(60))
def test_random_scenarios_are_lossless(seed: int) -> None:
    """And their drafts are those of the definition, as on the device."""
    run(Scenario(random.Random(seed), DEVICES[seed % len(DEVICES)], draft_on="host"))


class _Step(NamedTuple):
    ended: list[int]
    begun: list[tuple[int, list[int], Stop | None]]
    """Slot, text and stop."""
    slots: list[int]
    launched: Launched
    found: Any


class _Side(DeviceSide):
    """Compares the scheduled drafts with those that were found; these are compared later."""

    found: list[Any]

    def _check_drafts(self, found: Sequence[int], num_tokens: int, step: Launched, i: int) -> None:
        if not found:
            return
        last = next(f for f, launched in self.found if launched is step.previous)
        position = step.previous_positions[i]
        count = min(int(value_of(last.num_draft_tokens)[position]), len(found))
        step.valid_drafts[i] = count
        drafts = value_of(last.draft_token_ids)[position, :count].tolist()
        assert list(found) == drafts + [self.scenario.config.pad_token] * (len(found) - count)


class _Engine(Engine):
    """Notes which requests leave and join, by slot, and all that is drafted."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.side = _Side(scenario, self.state, self.device)
        self.side.found = []
        self.steps_taken: list[_Step] = []
        self._slots: dict[int, int] = {}
        self._leaving: list[int] = []
        end_step = self.state.end_step

        def noting(sampled: Any) -> Any:
            self._outputs = end_step(sampled)
            return self._outputs

        self.state.end_step = noting  # type: ignore[method-assign, assignment]

    def _remove(self, request: Request) -> None:
        super()._remove(request)
        self._leaving.append(self._slots.pop(request.uid))

    def _preempt(self, request: Request, keep: bool | None = None) -> None:
        super()._preempt(request, keep)
        self._leaving.append(self._slots.pop(request.uid))

    def _launch(self, scheduled: Any, admitted: list[Request], *changes: Any) -> None:
        texts = [list(request.tokens) for request in admitted]
        super()._launch(scheduled, admitted, *changes)
        slot_of = self.state._mirrors.slot_of
        self._slots |= {r.uid: int(slot_of[r.row]) for r in admitted}
        begun = [(self._slots[r.uid], t, r.stop) for r, t in zip(admitted, texts, strict=True)]
        assert self.last is not None
        slots = [self._slots[r.uid] for r in self.last.requests]
        self.side.found.append((self._outputs, self.last))
        self.steps_taken.append(_Step(self._leaving, begun, slots, self.last, self._outputs))
        self._leaving = []


def _with_store(seed: int, visibility: str) -> tuple[_Engine, Reference]:
    rng = random.Random(seed)
    scenario = Scenario(
        rng, DEVICES[seed % len(DEVICES)], failing=0.0, bad_samples=0.0, neural=False, k=3,
        draft_on="host",
    )  # fmt: skip
    config = NgramConfig(
        k=3, sizes="ladder", min_draft_probability=0.1, store=visibility,  # type: ignore[arg-type]
        store_tokens=8192, store_costs=np.ones((16, 56), np.uint8),
    )  # fmt: skip
    scenario.config = replace(scenario.config, ngram=config, engine="index")
    for request in scenario.requests:
        if rng.random() < 0.5:
            request.stop = Stop(max_length=len(request.wanted))
    rows, capacity = scenario.config.max_rows, scenario.config.row_capacity
    store = NgramStore(rows, 8192, visibility=visibility, kind="numpy")  # type: ignore[arg-type]
    return _Engine(scenario), Reference(config, store, 1, (rows, capacity), fill=False)


def _compare(engine: _Engine, reference: Reference) -> None:
    """The drafts and the store with those of a reference that lags as much."""
    engine.run()
    engine.device.drain()
    for step in engine.steps_taken:
        for slot in step.ended:
            reference.end(slot)
        for slot, text, stop in step.begun:
            reference.begin(slot, text, stop=stop)
        said = []
        of_step = zip(step.slots, step.launched.requests, step.launched.num_sampled, strict=True)
        for slot, request, count in of_step:
            length = len(reference.rows[slot].text)
            said.append(request.decoded[length : length + count])
        if not step.slots:
            reference.step([], [])
            continue
        tokens, counts, match_len, costs = reference.step(step.slots, said)
        found = step.found
        assert value_of(found.draft_token_ids).tolist() == tokens
        assert value_of(found.num_draft_tokens).tolist() == counts
        assert value_of(found.match_len).tolist() == match_len
        for ours, theirs, count in zip(
            value_of(found.draft_costs).tolist(), costs, counts, strict=True
        ):
            assert ours[:count] == theirs[:count]
    store = engine.state.store
    assert store is not None
    store.check_integrity()
    assert reference.has_the_text_of(store)


@pytest.mark.parametrize("visibility", ["live", "finish"])
@pytest.mark.parametrize("seed", range(30))
def test_the_store_is_that_of_a_lagging_reference(seed: int, visibility: str) -> None:
    _compare(*_with_store(seed, visibility))


def test_a_rebuilt_state_has_ended_what_it_had() -> None:
    """What they said up to their own end is stored, the rest is not."""
    ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store="finish")
    device = LateDevice("lazy", random.Random(0))
    sizes = {"max_rows": 2, "row_capacity": 64, "max_step_tokens": 64}
    config = AsyncConfig(ngram, kv_groups=(KVGroup(64, 1),), **sizes)
    state = AsyncSpecState(config, runtime=device)
    new = [
        Admission(row, ints(1, 2), (ints(row),), stop=Stop((9,)) if row else None)
        for row in range(2)
    ]
    state.begin_step(Batch(ints(0, 1), ints(2, 2), ints(0, 0), new=new))
    sampled = device.tensor((2, 3), torch.int32)
    value_of(sampled).copy_(torch.tensor([[3, 4, 5], [3, 9, 7]]))
    state.end_step(sampled)
    state.rebuild([])
    assert state.store is not None
    found = state.store.statistics
    assert (found.open_slots, found.tokens_entered) == (0, 2)


def test_where_drafts_are_found() -> None:
    """``auto``: on the host only for a store, and only where the device is another."""
    for store, device, draft_on, expected in (
        (None, CpuDevice(), "auto", False),
        ("live", CpuDevice(), "auto", False),
        (None, LateDevice("lazy", random.Random(0)), "auto", False),
        ("live", LateDevice("lazy", random.Random(0)), "auto", True),
        (None, CpuDevice(), "host", True),
    ):
        ngram = NgramConfig(k=2, sizes="ladder", min_draft_probability=0.1, store=store)  # type: ignore[arg-type]
        config = AsyncConfig(ngram, 1, 64, 64, (KVGroup(64, 1),), draft_on=draft_on)  # type: ignore[arg-type]
        state = AsyncSpecState(config, runtime=device)  # type: ignore[arg-type]
        assert (state._truth.host is not None) == expected
        assert state.index is not None
    with pytest.raises(ValueError, match="draft_on: expected 'auto', 'device' or 'host', got 'x'"):
        replace(config, draft_on="x")  # type: ignore[arg-type]
