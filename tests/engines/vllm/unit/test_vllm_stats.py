"""Tests when the drafters' counts are logged, and how counts of a GPU are read."""

from __future__ import annotations

import gc
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import make_config
from ngram_npu.engines.vllm import stats
from ngram_npu.engines.vllm.stats import DeviceStats, Stats


@pytest.fixture(autouse=True)
def _end_earlier_engines() -> None:
    """Ends the engines of earlier tests, because they log their counts when they end."""
    gc.collect()


class CountingEngine:
    def __init__(self) -> None:
        self.stats = Stats(self, make_config(method="custom_class"))

    def observe(self) -> None:
        """Counts a step with two rows: one has a draft of two tokens, the other is in prefill."""
        columns = np.array([[1, 0], [2, 0]], np.int32)
        self.stats.observe(time.perf_counter() - 0.001, *columns)


def test_counts_of_an_interval_are_logged_at_the_first_step_after_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interval that is not positive is replaced by ten seconds."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0")
    assert CountingEngine().stats._interval == 10
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(stats, "time", clock)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "2")
    engine = CountingEngine()
    # The engine is idle before the last step.
    for seconds, expected in (
        (0, ""),
        (1.5, ""),
        (1, "last 1.5 s: 2 pro"),
        (3600, "last 0.0 s: 1 "),
    ):
        caplog.clear()
        clock.now += seconds
        columns = np.array([[1, 0], [2, 0]], np.int32)
        engine.stats.observe(clock.now - 0.001, *columns)
        assert len(caplog.messages) == bool(expected)
        assert all(f"ngram_npu metrics: {expected}" in line for line in caplog.messages)
    assert engine.stats._sums["proposals"] == 1


def test_remaining_counts_are_logged_when_the_engine_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = CountingEngine()
    for _ in range(3):
        engine.observe()
    assert caplog.messages == []
    del engine
    (line,) = caplog.messages
    assert re.match(r"ngram_npu metrics: last 0\.\d s: 3 proposals, 1\.0.. ms each, ", line)
    assert line.endswith(" ms each, 3 of 3 rows drafted (100.0%), 2.00 tokens per draft")
    caplog.clear()
    idle_engine = CountingEngine()
    del idle_engine
    assert caplog.messages == []


class FakeEvent:
    """An event that a slow GPU reaches a few steps later."""

    num_recorded = num_reached = 0

    def record(self) -> None:
        FakeEvent.num_recorded += 1
        self.number = FakeEvent.num_recorded

    def query(self) -> bool:
        return self.number <= FakeEvent.num_reached


def test_counts_of_a_gpu_are_read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "num_recorded", 0)
    owner = CountingEngine()
    device_stats: Any = DeviceStats(owner, make_config(), torch.device("cuda"))
    for num_reached in (0, 0, 1, 1, 4, 6):
        monkeypatch.setattr(FakeEvent, "num_reached", num_reached)
        values = torch.tensor([[1], [2]], dtype=torch.int32)
        device_stats.observe(time.perf_counter(), *values)
        assert device_stats._sums["proposals"] == num_reached
    assert device_stats._sums["tokens"] == 2 * 6
