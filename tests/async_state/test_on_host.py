"""Tests AsyncSpecState with drafts that the host makes in stream order (``draft_on="host"``)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, CpuDevice, KVGroup
from ngram_npu.host_drafting import Stop

from async_state import make_batch, to_ints
from async_state.devices import LateDevice, get_value
from async_state.engine import run_scenario
from async_state.scenario import DEVICES, Scenario


@pytest.mark.parametrize("seed", range(30))
def test_random_scenario_is_lossless(seed: int) -> None:
    """The simulated model also compares the drafts with the reference."""
    run_scenario(Scenario(random.Random(seed), DEVICES[seed % len(DEVICES)], draft_on="host"))


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
