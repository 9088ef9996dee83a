"""Tests when the drafters' counts are logged, how counts are exported to Prometheus, and how counts
of a GPU are read."""

from __future__ import annotations

import dataclasses
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
from fake_engine import CPU, K, make_config, make_store_config
from monitoring import find_metric_names
from ngram_npu.engines.vllm import metrics, v1_device
from ngram_npu.engines.vllm.feed.texts import FeedCounters
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.sharing import SharedStore
from ngram_npu.engines.vllm.stats import DeviceStats, Stats


@pytest.fixture(autouse=True)
def _end_earlier_engines() -> None:
    """Ends the engines of earlier tests, because they log their counts when they end."""
    gc.collect()


class CountingEngine:
    def __init__(self, method: Any = "custom_class", **options: Any) -> None:
        vllm_config = make_config(method="custom_class", **{"metrics": True, **options})
        self.stats = Stats(self, vllm_config, read_options(vllm_config, method))

    def observe(self, *, num_sampled: int = 1, length: int = 10, second_row: Any = ()) -> None:
        """Counts a step with two rows: one has a draft, the other is in prefill by default."""
        rows = (length, num_sampled, 3, 2), second_row or (9, 0, 0, 0)
        self.stats.observe(0.001, slice(2), np.array(rows, np.int32).T, None)


def test_interval_begins_with_first_step_and_ends_without_further_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
    engine = CountingEngine(metrics=False)
    for _ in range(2):
        time.sleep(0.3)  # Before the first step the engine starts, later it is idle.
        caplog.clear()
        start_time = time.monotonic()
        engine.observe()
        engine.observe()
        while not caplog.messages and time.monotonic() < start_time + 30:
            time.sleep(0.01)
        (line,) = caplog.messages
        match = re.match(r"ngram_npu metrics: last (\S+) s: 2 proposals, 1.000 ms each", line)
        assert match
        assert 0.2 <= float(match[1]) <= time.monotonic() - start_time + 0.1


@pytest.mark.parametrize(
    ("method", "drafts_text", "acceptance_text"),
    [
        (
            *("custom_class", "3 of 3 rows drafted (100.0%)"),
            "3: 75% of 4; by position 0: 100% of 2, 1: 50% of 2; rows from index: 0, scan: 3",
        ),
        (
            *("beside", "3 of 6 rows drafted (50.0%)"),
            "neural: 75% of 4, 3: 75% of 4; by position 0: 100% of 4, 1: 50% of 4; rows from "
            "ngram: 3, neural: 3",
        ),
    ],
)
def test_remaining_counts_are_logged_when_the_engine_ends(
    caplog: pytest.LogCaptureFixture, method: str, drafts_text: str, acceptance_text: str
) -> None:
    engine = CountingEngine(method)
    for num_sampled, length in ((1, 10), (2, 12), (3, 15)):
        second_row = (length, num_sampled, 0, 2) if method == "beside" else ()
        engine.observe(num_sampled=num_sampled, length=length, second_row=second_row)
    assert caplog.messages == []
    del engine
    metrics_line, *other_lines = caplog.messages
    assert re.match(r"ngram_npu metrics: last 0\.\d s: 3 proposals, 1\.000 ms each, ", metrics_line)
    assert metrics_line.endswith(f" ms each, {drafts_text}, 2.00 tokens per draft")
    assert other_lines == ["ngram_npu acceptance: by match length " + acceptance_text]
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
    vllm_config = make_config(metrics=True)
    drafter = v1_device.AsyncNgramProposer(vllm_config, CPU)
    drafter.device = torch.device("cuda")
    options = read_options(vllm_config, "ngram_gpu")
    device_stats: Any = DeviceStats(drafter, vllm_config, options, None)
    for step, num_reached in enumerate([0, 0, 1, 1, 4, 6]):
        monkeypatch.setattr(FakeEvent, "num_reached", num_reached)
        values = torch.tensor([[10 + step], [1], [3], [2]], dtype=torch.int32)
        device_stats.observe_tensors(time.perf_counter(), slice(1), *values)
        assert device_stats._sums["proposals"] == num_reached
    tokens = device_stats.acceptance.read_and_reset()
    assert tokens[0, 3].tolist() == [5, 5, *[0] * (K - 2)]


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
    engine.observe(num_sampled=2, length=12)
    assert values == {
        ("ngram_npu_proposals",): 2,
        ("ngram_npu_rows",): 2,
        ("ngram_npu_drafts",): 2,
        ("ngram_npu_draft_tokens",): 4,
        ("ngram_npu_propose_seconds",): 0.002,
    }
    values.clear()
    del engine
    assert values == {
        ("ngram_npu_source_rows", "index"): 0,
        ("ngram_npu_source_rows", "scan"): 2,
        ("ngram_npu_verified_tokens", "3", "0"): 1,
        ("ngram_npu_verified_tokens", "3", "1"): 1,
        ("ngram_npu_accepted_tokens", "3", "0"): 1,
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
    feed.update(FeedCounters(texts=1, tokens=20, publishers=2, age_seconds=0.5))
    counters = FeedCounters(texts=3, tokens=50, gaps=1, orphans=2, dropped=4, rejected=5)
    feed.update(counters)
    assert values == {
        (f"ngram_npu_feed_{field.name}",): getattr(counters, field.name)
        for field in dataclasses.fields(FeedCounters)
    }


def test_store_gauges_follow_text_and_saves(
    values: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    vllm_config = make_store_config(store_file=str(tmp_path / "store"), store_save_minutes=0)
    options = read_options(vllm_config, "custom_class")
    store = SharedStore(vllm_config, options, 4, "numpy")
    store.start_saving(store)
    store_metrics = metrics.StoreMetrics(vllm_config, store)
    store.contents.warm([list(range(40))])
    store_metrics.update()
    store_metrics.update()
    assert values.pop(("ngram_npu_store_save_age_seconds",)) > 0
    assert values == {
        ("ngram_npu_store_tokens_held",): 40,
        ("ngram_npu_store_token_capacity",): 16384,
        ("ngram_npu_store_tokens_inserted",): 40,
        ("ngram_npu_store_entries_evicted",): 0,
        ("ngram_npu_store_blocks_lost",): 0,
        ("ngram_npu_store_calls_skipped",): 0,
    }
    store._save()
    store_metrics.update()
    assert values["ngram_npu_store_save_age_seconds",] == 0


def test_store_on_a_device_exports_no_counters(values: dict[tuple[str, ...], float]) -> None:
    on_device: Any = {"store": "live", "lookup": "1-16", "draft_on": "device"}
    vllm_config = make_config(**on_device, store_tokens=16384)
    store = SharedStore(vllm_config, read_options(vllm_config, "v2"), 4, "numpy", CPU)
    metrics.StoreMetrics(vllm_config, store).update()
    assert values == {
        ("ngram_npu_store_tokens_held",): 0,
        ("ngram_npu_store_token_capacity",): 16384,
    }


def test_dashboard_shows_exactly_the_exported_metrics(
    values: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    """The alert rules use a subset. An engine test checks vLLM's metrics of both files."""
    vllm_config = make_store_config(store_file=str(tmp_path / "store"))
    store = SharedStore(vllm_config, read_options(vllm_config, "custom_class"), 4, "numpy")
    metrics.StoreMetrics(vllm_config, store).update()
    metrics.FeedMetrics(vllm_config).update(FeedCounters())
    metrics.DraftLengthMetrics(vllm_config).observe_change("1-2", 3, 1.0)
    metrics.set_drafting_gauge(vllm_config, True)
    engine = CountingEngine()
    engine.observe()
    engine.observe(num_sampled=2, length=12)
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
