"""Tests how metrics reach the registry of the API server's process, with vLLM's prometheus_client.
No engine runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monitoring import find_metric_names
from ngram_npu.engines.vllm import metrics
from ngram_npu.engines.vllm.stats import Stats
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="model"),
    parallel_config=SimpleNamespace(data_parallel_index=3),
)


@pytest.fixture(autouse=True)
def _unregister_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begins as in a new process, and ends the service of the folders of the test."""
    for name in (metrics.FOLDER_VARIABLE, metrics.MULTIPROCESS_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(metrics, "_serving_process", 0)
    register, collectors = REGISTRY.register, list[Any]()

    def register_and_note(collector: Any) -> None:
        collectors.append(collector)
        register(collector)

    monkeypatch.setattr(REGISTRY, "register", register_and_note)
    yield
    for collector in collectors:
        REGISTRY.unregister(collector)


def scrape() -> dict[str, float]:
    """Returns the values of the metrics of this file's engine in the registry of this process, by
    name and the values of further labels. Engines of other files have other labels."""
    text = generate_latest(REGISTRY).decode()
    values = {}
    for name, labels, value in re.findall(r"^ngram_npu_(\w+)\{(.*)\} (\S+)$", text, re.M):
        if {'engine="3"', 'model_name="model"'} <= {*labels.split(",")}:
            further = re.findall(r'batch="(.*?)"', labels)
            values["/".join((name, *further))] = float(value)
    return values


def run_engine_process(code: str) -> None:
    """Runs code with a counter and a gauge in another process, which then ends."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from types import SimpleNamespace
from ngram_npu.engines.vllm import metrics
labels = {{"model_name": "model", "engine": "3"}}
rows = metrics.get_metric("counter", "rows_total", "Rows.", labels)
held = metrics.get_metric("gauge", "store_tokens_held", "Tokens.", labels)
{code}
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_metrics_of_other_processes_are_in_the_registry_of_the_server() -> None:
    metrics.serve_engine_metrics()
    folder = os.environ[metrics.FOLDER_VARIABLE]
    metrics.serve_engine_metrics()  # vLLM creates several configurations
    assert os.environ[metrics.FOLDER_VARIABLE] == folder
    assert scrape() == {}
    run_engine_process("rows.inc(40); rows.inc(); held.set(1)")
    assert scrape() == {"rows_total": 41, "store_tokens_held": 1}
    run_engine_process("rows.inc(1); held.set(7); held.set(5)")
    assert scrape() == {"rows_total": 42, "store_tokens_held": 5}
    text = generate_latest(REGISTRY).decode()
    assert "# TYPE ngram_npu_rows_total counter" in text
    assert "# TYPE ngram_npu_store_tokens_held gauge" in text


def test_metrics_of_an_engine_in_the_process_of_the_server_are_in_its_registry() -> None:
    metrics.serve_engine_metrics()
    owner = type("Owner", (), {})()
    stats = Stats(owner, CONFIG)
    stats._sums["proposals"] = 0
    stats._count(0.5, [1, 2, 0], [3, 0, 0])  # type: ignore[arg-type]
    values = scrape()
    assert values.pop("propose_seconds_total") == 0.5
    assert values == {
        "proposals_total": 1,
        "rows_total": 2,
        "drafts_total": 1,
        "draft_tokens_total": 3,
    }


def test_metrics_that_cannot_be_read_disappear_until_they_can() -> None:
    metrics.serve_engine_metrics()
    run_engine_process("rows.inc(42); held.set(5)")
    folder = Path(os.environ[metrics.FOLDER_VARIABLE])
    (counters,) = folder.glob("counter*.db")
    content = counters.read_bytes()
    for damaged in (b"", content[:4], b"\xff" * 300, content[:12] + b"?" * (len(content) - 12)):
        counters.write_bytes(damaged)
        assert scrape() == {"store_tokens_held": 5}
    counters.unlink()
    counters.mkdir()
    assert scrape() == {"store_tokens_held": 5}
    counters.rmdir()
    counters.write_bytes(content)
    assert scrape() == {"rows_total": 42, "store_tokens_held": 5}


def test_metric_that_cannot_be_written_does_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    metrics.serve_engine_metrics()
    monkeypatch.setattr(os, "posix_fallocate", fail)
    caplog.set_level("WARNING", "vllm.ngram_npu")
    for _ in range(2):
        metrics.set_drafting_gauge(CONFIG, True)
    line = "ngram_npu: drafting is not exported: OSError: no space left"
    assert [*caplog.messages] == [line]
    assert scrape() == {}


def test_vllm_reads_the_metrics_in_the_folder_of_several_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(metrics.MULTIPROCESS_VARIABLE, str(tmp_path))
    metrics.serve_engine_metrics()
    assert metrics.FOLDER_VARIABLE not in os.environ
    metrics.set_drafting_gauge(CONFIG, True)
    run_engine_process("rows.inc(2); held.set(0)")
    families = MultiProcessCollector(None, str(tmp_path)).collect()
    samples = [sample for family in families for sample in family.samples]
    values = {sample.name: sample.value for sample in samples}
    expected = {"drafting": 1, "rows_total": 2, "store_tokens_held": 0}
    assert values == {f"ngram_npu_{name}": value for name, value in expected.items()}


def test_server_that_inherits_a_folder_serves_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    metrics.serve_engine_metrics()
    folder = os.environ[metrics.FOLDER_VARIABLE]
    assert folder != str(tmp_path)
    # A process that the server starts with multiprocessing runs an engine.
    monkeypatch.setattr(metrics, "_serving_process", 0)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "the server")
    metrics.serve_engine_metrics()
    assert os.environ[metrics.FOLDER_VARIABLE] == folder


def test_draft_lengths_are_exported_from_the_start() -> None:
    lengths = metrics.DraftLengthMetrics(CONFIG, ["9-16"])
    names = "draft_length/9-16", "goodput/9-16", "draft_length_changes_total/9-16"
    assert scrape() == dict(zip(names, (0, 1.0, 0), strict=True))
    lengths.observe_change("9-16", 3, 1.25)
    lengths.observe_change("9-16", 0, 1.0)
    assert scrape() == dict(zip(names, (0, 1.0, 2), strict=True))


def test_feed_counters_are_exported() -> None:
    feed = metrics.FeedMetrics(CONFIG)
    feed.update({"tokens": 20, "publishers": 2, "age_seconds": 0.5})
    counters = {"tokens": 50, "gaps": 1, "orphans": 2, "dropped": 4, "rejected": 5}
    state = {"publishers": 1, "age_seconds": 0.25}
    feed.update({**counters, **state})
    values = {name.removesuffix("_total"): value for name, value in scrape().items()}
    assert values == {f"feed_{name}": value for name, value in {**counters, **state}.items()}


def test_dashboard_shows_exactly_the_exported_metrics() -> None:
    """Without a server, the metrics are in the registry of this process. The alert rules use a
    subset. Another test checks vLLM's metrics of both files."""
    metrics.StoreMetrics(CONFIG, 1024, has_file=True).tokens_held.set(0)
    metrics.FeedMetrics(CONFIG).update({"publishers": 0, "age_seconds": 0.0})
    metrics.DraftLengthMetrics(CONFIG, ["1-2"])
    metrics.set_drafting_gauge(CONFIG, True)
    Stats(type("Owner", (), {})(), CONFIG)
    exported = {f"ngram_npu_{name.partition('/')[0]}" for name in scrape()}
    assert find_metric_names("grafana-dashboard.json", "ngram_npu_") == exported
    alerts = find_metric_names("alerts.yaml", "ngram_npu_") - {"ngram_npu_set_drafting"}
    assert alerts
    assert alerts <= exported
