"""Prometheus metrics of an engine, and their way to ``/metrics`` of vLLM's API server.

The API server serves the default registry of its own process, but drafters and schedulers run in
other processes. vLLM merges the processes' metrics only if ``PROMETHEUS_MULTIPROC_DIR`` is set.
Otherwise the API server's process names a folder in the environment before it starts the engines.
Each of their processes writes its metrics there, as text, and the API server's registry reads them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ngram_npu.engines.vllm.options import engine_index
from ngram_npu.engines.vllm.patching import format_error, logger

if TYPE_CHECKING:
    from ngram_npu.engines.vllm.shared_store import SharedStore

FOLDER_VARIABLE = "NGRAM_NPU_METRICS_FOLDER"
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
INTERVAL_S = 2.0
"""Time between two updates of the metrics that no step updates, and between two files."""

_FEED_COUNTERS = {
    "tokens": "Tokens that other engines published.",
    "gaps": "Lost batches of events.",
    "orphans": "Blocks skipped because the beginning of their text is unknown.",
    "dropped": "Tokens dropped after a gap, or because more arrived than the engine takes.",
    "rejected": "Batches and blocks skipped because they are malformed or ambiguous.",
}
_FEED_GAUGES = {
    "publishers": "Publishers that are connected.",
    "age_seconds": "Age of the oldest text that waits for a step.",
}
# A metric can be registered only once per process, but a process may start several engines.
_registered_metrics: dict[str, Any] = {}
_registry: Any = None
_registration_mutex = threading.Lock()
_serving_process = 0
"""The process id of the API server, if the engines' processes are forked from it or in it."""


def make_labels(vllm_config: Any) -> dict[str, str]:
    return {
        "model_name": str(getattr(vllm_config.model_config, "served_model_name", "")),
        "engine": str(engine_index(vllm_config.parallel_config)),
    }


def get_metric(kind: str, name: str, text: str, labels: dict[str, str]) -> Any:
    """Returns a metric of this process's registry. Without prometheus_client, which vLLM requires,
    the methods of the metric do nothing."""
    global _registry
    try:
        import prometheus_client
    except ImportError:
        return SimpleNamespace(inc=lambda increment=1: None, set=lambda value: None)
    name = f"ngram_npu_{name}"
    with _registration_mutex:
        if not _registered_metrics:
            _registry = _choose_registry(prometheus_client)
        if name not in _registered_metrics:
            options = {"multiprocess_mode": "mostrecent"} if kind == "Gauge" else {}
            metric_class = getattr(prometheus_client, kind)
            metric = metric_class(name, text, tuple(labels), registry=_registry, **options)
            _registered_metrics[name] = metric
    return _registered_metrics[name].labels(**labels)


def serve_engine_metrics() -> None:
    """Makes the registry of this process, the API server's, include the metrics of the engine
    processes that it starts. Only the first call has an effect."""
    global _serving_process
    # A server may inherit the folder of the program that started it, which does not serve it.
    is_engine = FOLDER_VARIABLE in os.environ and multiprocessing.parent_process() is not None
    if is_engine or MULTIPROCESS_VARIABLE in os.environ or _serving_process == os.getpid():
        return
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _serving_process = os.getpid()
    folder = os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="ngram_npu_metrics_")
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    REGISTRY.register(_FileCollector(Path(folder)))


class _FileCollector:
    """Reads the metrics of all processes from their files. No two have a metric with the same
    labels."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> list[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Any] = {}
        for file in self._folder.glob("*.prom"):
            for family in text_string_to_metric_families(file.read_text()):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return list(families.values())


def _choose_registry(prometheus_client: Any) -> Any:
    """Returns a registry that is written to a file if the API server's process reads files, and
    otherwise the default one."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    is_served_here = _serving_process == os.getpid()
    # An engine on another machine has no such folder.
    if MULTIPROCESS_VARIABLE in os.environ or is_served_here or not os.path.isdir(folder):
        return prometheus_client.REGISTRY
    registry, file = prometheus_client.CollectorRegistry(), f"{folder}/{os.getpid()}.prom"
    call_repeatedly(lambda: prometheus_client.write_to_textfile(file, registry))
    return registry


def call_repeatedly(update: Callable[[], object], closed: threading.Event | None = None) -> None:
    """Calls ``update`` in a thread every ``INTERVAL_S`` until ``closed`` is set, or an error."""
    closed = closed or threading.Event()

    def run() -> None:
        while not closed.wait(INTERVAL_S):
            try:
                update()
            except Exception as error:
                logger.warning("ngram_npu: metrics are not updated: %s", format_error(error))
                return

    threading.Thread(target=run, name="ngram_npu metrics", daemon=True).start()


def set_drafting_gauge(vllm_config: Any, enabled: bool) -> None:
    text = "Whether drafting is switched on."
    get_metric("Gauge", "drafting", text, make_labels(vllm_config)).set(int(enabled))


class DraftLengthMetrics:
    """Metrics of the draft lengths that ``k="auto"`` chooses."""

    def __init__(self, vllm_config: Any) -> None:
        self._labels = make_labels(vllm_config)

    def observe_change(self, batches: str, length: int, goodput: float) -> None:
        """Sets the draft length of a range of batch sizes and its goodput, and counts a change."""
        labels = {**self._labels, "batch": batches}
        get_metric("Gauge", "draft_length", "Chosen draft length.", labels).set(length)
        text = "Tokens per second over those without drafts."
        get_metric("Gauge", "goodput", text, labels).set(goodput)
        get_metric("Counter", "draft_length_changes", "Changes of the draft length.", labels).inc()


class FeedMetrics:
    """Metrics of the text that an engine reads from others (``store_feed``)."""

    def __init__(self, vllm_config: Any) -> None:
        self._labels, self._totals = make_labels(vllm_config), dict.fromkeys(_FEED_COUNTERS, 0.0)

    def update(self, values: Mapping[str, float]) -> None:
        """Sets the metrics to the values of a reader; a counter without a value is 0."""
        for name, text in _FEED_COUNTERS.items():
            total = values.get(name, 0.0)
            counter = get_metric("Counter", f"feed_{name}", text, self._labels)
            counter.inc(total - self._totals[name])
            self._totals[name] = total
        for name, text in _FEED_GAUGES.items():
            get_metric("Gauge", f"feed_{name}", text, self._labels).set(values[name])


class StoreMetrics:
    """Metrics of an engine's store."""

    def __init__(self, vllm_config: Any, store: SharedStore) -> None:
        self._labels, self._store = make_labels(vllm_config), store

    def update(self) -> None:
        contents = self._store.contents
        gauges: dict[str, tuple[str, float]] = {
            "tokens_held": ("Tokens in the store.", contents.statistics.tokens_held),
            "token_capacity": ("Capacity of the store in tokens.", contents.capacity),
        }
        if self._store.path:
            text = "Time since the last save; 0 while the file has all of the store's text."
            gauges["save_age_seconds"] = text, self._store.save_age_s
        for name, (text, value) in gauges.items():
            get_metric("Gauge", f"store_{name}", text, self._labels).set(value)
