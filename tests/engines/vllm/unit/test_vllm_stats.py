"""Tests when the drafters' counts are logged, how counts are exported to Prometheus, and how counts
of a GPU are read."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import make_config, make_store_config
from monitoring import find_metric_names
from ngram_npu.engines.vllm import metrics
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.shared_store import SharedStore
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


def test_interval_begins_with_first_step_and_ends_without_further_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
    engine = CountingEngine()
    for _ in range(2):
        time.sleep(0.3)  # Before the first step the engine starts, later it is idle.
        caplog.clear()
        start_time = time.monotonic()
        engine.observe()
        engine.observe()
        while not caplog.messages and time.monotonic() < start_time + 30:
            time.sleep(0.01)
        (line,) = caplog.messages
        match = re.match(r"ngram_npu metrics: last (\S+) s: 2 proposals, 1\.0.. ms each", line)
        assert match
        assert 0.2 <= float(match[1]) <= time.monotonic() - start_time + 0.1


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


@pytest.mark.parametrize("interval", ["-1", "0", "10"])
def test_interval_that_is_not_positive_is_replaced_by_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", interval)
    assert CountingEngine().stats._interval == 10


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


class FakeCounter:
    """A fake of prometheus_client's Counter that keeps the values of all counters."""

    values: dict[tuple[str, ...], float]

    def __init__(self, name: str, text: str, names: tuple[str, ...], registry: str) -> None:
        assert registry == "default registry"
        self.name, self.names = name, names

    def labels(self, **labels: str) -> Any:
        assert tuple(labels) == self.names
        assert (labels.pop("model_name"), labels.pop("engine")) == ("model", "0")
        key = self.name, *labels.values()

        def increase(amount: float = 1) -> None:
            self.values[key] = self.values.get(key, 0) + amount

        return SimpleNamespace(inc=increase)


class FakeGauge(FakeCounter):
    """A fake of prometheus_client's Gauge."""

    def __init__(self, *args: Any, multiprocess_mode: str, **kwargs: Any) -> None:
        assert multiprocess_mode == "mostrecent"  # includes processes that have ended
        super().__init__(*args, **kwargs)

    def labels(self, **labels: str) -> Any:
        _, _, *values = labels.values()  # after the model's name and the engine's number
        key = self.name, *values
        return SimpleNamespace(set=lambda value: self.values.update({key: value}))


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    """The values of all metrics of this test, by name and labels."""
    monkeypatch.setattr(FakeCounter, "values", {}, raising=False)
    module = SimpleNamespace(Counter=FakeCounter, Gauge=FakeGauge, REGISTRY="default registry")
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    monkeypatch.setattr(metrics, "_registered_metrics", {})
    return FakeCounter.values


def test_counters_are_exported_to_prometheus(values: dict[tuple[str, ...], float]) -> None:
    engine = CountingEngine()
    engine.observe()
    engine.observe()
    assert values.pop(("ngram_npu_propose_seconds",)) == pytest.approx(0.002, rel=0.5)
    assert values == {
        ("ngram_npu_proposals",): 2,
        ("ngram_npu_rows",): 2,
        ("ngram_npu_drafts",): 2,
        ("ngram_npu_draft_tokens",): 4,
    }


def test_draft_lengths_are_exported_to_prometheus(values: dict[tuple[str, ...], float]) -> None:
    lengths = metrics.DraftLengthMetrics(make_config())
    lengths.observe_change("9-16", 3, 1.25)
    lengths.observe_change("9-16", 0, 1.0)
    assert values == {
        ("ngram_npu_draft_length", "9-16"): 0,
        ("ngram_npu_goodput", "9-16"): 1.0,
        ("ngram_npu_draft_length_changes", "9-16"): 2,
    }


def test_feed_counters_are_exported_to_prometheus(values: dict[tuple[str, ...], float]) -> None:
    feed = metrics.FeedMetrics(make_config())
    feed.update({"tokens": 20, "publishers": 2, "age_seconds": 0.5})
    counters = {"tokens": 50, "gaps": 1, "orphans": 2, "dropped": 4, "rejected": 5}
    state = {"publishers": 1, "age_seconds": 0.0}
    feed.update({**counters, **state})
    expected = {**counters, **state}
    assert values == {(f"ngram_npu_feed_{name}",): expected[name] for name in expected}


def make_store(vllm_config: Any) -> SharedStore:
    options = read_options(vllm_config, "custom_class")
    return SharedStore(vllm_config, options, None, has_scopes=False)


def test_store_gauges_follow_text_and_saves(
    values: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    vllm_config = make_store_config(store_file=str(tmp_path / "store"))
    store = make_store(vllm_config)
    store.start_saving(store)
    store_metrics = metrics.StoreMetrics(vllm_config, store)
    store.contents.warm([list(range(40))])
    store_metrics.update()
    assert values.pop(("ngram_npu_store_save_age_seconds",)) > 0
    assert values == {
        ("ngram_npu_store_tokens_held",): 40,
        ("ngram_npu_store_token_capacity",): 16384,
    }
    store._save()
    store_metrics.update()
    assert values["ngram_npu_store_save_age_seconds",] == 0


def test_dashboard_shows_exactly_the_exported_metrics(
    values: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    """The alert rules use a subset. An engine test checks vLLM's metrics of both files."""
    vllm_config = make_store_config(store_file=str(tmp_path / "store"))
    metrics.StoreMetrics(vllm_config, make_store(vllm_config)).update()
    metrics.FeedMetrics(vllm_config).update({"publishers": 0, "age_seconds": 0.0})
    metrics.DraftLengthMetrics(vllm_config).observe_change("1-2", 3, 1.0)
    metrics.set_drafting_gauge(vllm_config, True)
    engine = CountingEngine()
    engine.observe()
    engine.stats.end_interval()
    exported = {
        name + ("_total" if type(metric) is FakeCounter else "")
        for name, metric in metrics._registered_metrics.items()
    }
    assert find_metric_names("grafana-dashboard.json", "ngram_npu_") == exported
    alerts = find_metric_names("alerts.yaml", "ngram_npu_") - {"ngram_npu_set_drafting"}
    assert alerts
    assert alerts <= exported


def test_server_that_inherits_a_folder_serves_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collectors: list[Any] = []
    registry = SimpleNamespace(register=collectors.append)
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(REGISTRY=registry))
    monkeypatch.setattr(metrics, "_serving_process", 0)
    monkeypatch.delenv(metrics.MULTIPROCESS_VARIABLE, raising=False)
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    for _ in range(2):
        metrics.serve_engine_metrics()
    folder = os.environ[metrics.FOLDER_VARIABLE]
    assert len(collectors) == 1
    assert folder != str(tmp_path)
    # A process that the server starts with multiprocessing runs an engine.
    monkeypatch.setattr(metrics, "_serving_process", 0)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "the server")
    metrics.serve_engine_metrics()
    assert len(collectors) == 1
    assert os.environ[metrics.FOLDER_VARIABLE] == folder
