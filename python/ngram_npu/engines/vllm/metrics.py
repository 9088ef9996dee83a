"""Prometheus metrics of an engine, which vLLM's API server serves with its own.

Drafters and schedulers run in other processes than the API server. Each process writes its values
to files of prometheus_client's multi-process mode, where the value changes, so nothing has to run
beside the engine. They are in ``PROMETHEUS_MULTIPROC_DIR``, if it is set, which vLLM's own metrics
then use too. Otherwise the API server's process names a folder in the environment before it starts
the engines, and its registry reads the files at each request of ``/metrics``.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from ngram_npu.engines.vllm.options import engine_index
from ngram_npu.engines.vllm.patching import format_error, logger

FOLDER_VARIABLE = "NGRAM_NPU_METRICS_FOLDER"
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
FILE_BYTES = 1 << 16
"""Size of a file: more than 200 values."""

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
_mutex = threading.Lock()
"""Held while a value is created or changed."""
_files: dict[str, Any] = {}
_metrics: dict[tuple[Any, ...], Metric] = {}
"""By process, folder, name and labels. A process may start several engines."""
_serving_process = 0
"""The process whose registry reads the folder."""


class Metric:
    """A counter or a gauge; without a file, its methods do nothing."""

    def __init__(self, file: Any = None, key: str = "", value: float = 0.0) -> None:
        self.file, self.key, self.value = file, key, value

    def inc(self, amount: float = 1) -> None:
        self.set(self.value + amount)

    def set(self, value: float) -> None:
        self.value = value
        if self.file is not None:
            with _mutex:
                self.file.write_value(self.key, value, time.time())


def increase(metrics: Sequence[Metric], amounts: Sequence[float]) -> None:
    """Adds an amount to each of several counters. Takes half the time of calls of ``inc``."""
    now = time.time()
    with _mutex:
        for metric, amount in zip(metrics, amounts, strict=True):
            metric.value += amount
            if metric.file is not None:
                metric.file.write_value(metric.key, metric.value, now)


def make_labels(vllm_config: Any) -> dict[str, str]:
    return {
        "model_name": str(getattr(vllm_config.model_config, "served_model_name", "")),
        "engine": str(engine_index(vllm_config.parallel_config)),
    }


def get_metric(kind: str, name: str, text: str, labels: dict[str, str]) -> Metric:
    """Returns the metric of this process with these labels. Never raises: if it cannot be exported,
    it logs why, and the metric does nothing.

    Args:
        kind: ``"counter"`` or ``"gauge"``. The name of a counter ends with ``_total``.
    """
    folder = _find_folder()
    identity = os.getpid(), folder, name, *labels.values()
    if identity not in _metrics:
        try:
            metric = _make_metric(folder, kind, f"ngram_npu_{name}", text, labels)
        except ImportError:  # vLLM requires prometheus_client
            metric = Metric()
        except Exception as error:
            logger.warning("ngram_npu: %s is not exported: %s", name, format_error(error))
            metric = Metric()
        _metrics[identity] = metric
    return _metrics[identity]


def _make_metric(folder: str, kind: str, name: str, text: str, labels: dict[str, str]) -> Metric:
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    # prometheus_client may have files of this process in the folder, so the name is another one.
    mode = {"counter": "counter", "gauge": "gauge_mostrecent"}[kind]
    path = os.path.join(folder, f"{mode}_ngramnpu{os.getpid()}.db")
    key = mmap_key(name.removesuffix("_total"), name, [*labels], [*labels.values()], text)
    with _mutex:
        if path not in _files:
            # A write to memory of a file for which the disk has no space would end the process.
            with open(path, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            _files[path] = MmapedDict(path)
        value, _ = _files[path].read_value(key)  # creates it with value 0
    return Metric(_files[path], key, value)


def _find_folder() -> str:
    if folder := os.environ.get(MULTIPROCESS_VARIABLE):
        return folder
    # An engine on another machine has no such folder.
    if not os.path.isdir(os.environ.get(FOLDER_VARIABLE, "")):
        _serve_new_folder()
    return os.environ[FOLDER_VARIABLE]


def serve_engine_metrics() -> None:
    """Makes the registry of this process, the API server's, include the metrics of the engine
    processes that it starts. Only the first call has an effect."""
    # A server may inherit the folder of the program that started it, which does not serve it.
    is_engine = FOLDER_VARIABLE in os.environ and multiprocessing.parent_process() is not None
    if not (is_engine or MULTIPROCESS_VARIABLE in os.environ or _serving_process == os.getpid()):
        _serve_new_folder()


def _serve_new_folder() -> None:
    global _serving_process
    _serving_process = os.getpid()
    folder = os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="ngram_npu_metrics_")
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    REGISTRY.register(_FolderCollector(folder))


class _FolderCollector:
    """Reads the metrics of all processes. Those of a file that cannot be read are missing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Any:
        from prometheus_client.multiprocess import MultiProcessCollector

        files = sorted(glob.glob(os.path.join(self._folder, "*.db")))
        return MultiProcessCollector.merge([*filter(_is_readable, files)])


def _is_readable(path: str) -> bool:
    from prometheus_client.multiprocess import MultiProcessCollector

    try:
        MultiProcessCollector.merge([path])
    except Exception as error:
        logger.debug("ngram_npu: %s is not served: %s", path, format_error(error))
        return False
    return True


def set_drafting_gauge(vllm_config: Any, enabled: bool) -> None:
    text = "Whether drafting is switched on."
    get_metric("gauge", "drafting", text, make_labels(vllm_config)).set(int(enabled))


class DraftLengthMetrics:
    """Metrics of the draft lengths that ``k="auto"`` chooses, for ranges of batch sizes.

    Args:
        batches: The ranges, each with draft length 0.
    """

    def __init__(self, vllm_config: Any, batches: Sequence[str]) -> None:
        self._labels = make_labels(vllm_config)
        for name in batches:
            self._set(name, 0, 1.0)

    def observe_change(self, batches: str, length: int, goodput: float) -> None:
        """Sets the draft length of a range and its goodput, and counts a change."""
        self._set(batches, length, goodput).inc()

    def _set(self, batches: str, length: int, goodput: float) -> Metric:
        """Sets the gauges of a range. Returns its counter of changes."""
        labels = {**self._labels, "batch": batches}
        get_metric("gauge", "draft_length", "Chosen draft length.", labels).set(length)
        text = "Tokens per second over those without drafts."
        get_metric("gauge", "goodput", text, labels).set(goodput)
        text = "Changes of the draft length."
        return get_metric("counter", "draft_length_changes_total", text, labels)


class FeedMetrics:
    """Metrics of the text that an engine reads from others (``store_feed``)."""

    def __init__(self, vllm_config: Any) -> None:
        self._labels, self._totals = make_labels(vllm_config), dict.fromkeys(_FEED_COUNTERS, 0.0)

    def update(self, values: Mapping[str, float]) -> None:
        """Sets the metrics to the values of a reader; a counter without a value is 0."""
        for name, text in _FEED_COUNTERS.items():
            total = values.get(name, 0.0)
            counter = get_metric("counter", f"feed_{name}_total", text, self._labels)
            counter.inc(total - self._totals[name])
            self._totals[name] = total
        for name, text in _FEED_GAUGES.items():
            get_metric("gauge", f"feed_{name}", text, self._labels).set(values[name])


class StoreMetrics:
    """Metrics of an engine's store."""

    def __init__(self, vllm_config: Any, capacity: int, *, has_file: bool) -> None:
        labels = make_labels(vllm_config)
        text = "Capacity of the store in tokens."
        get_metric("gauge", "store_token_capacity", text, labels).set(capacity)
        text = "Tokens in the store, at the last copy."
        self.tokens_held = get_metric("gauge", "store_tokens_held", text, labels)
        self.unsaved_since = Metric()
        if has_file:
            text = "Time of the oldest text that is not in the file; 0: the file has all text."
            name = "store_unsaved_since_timestamp_seconds"
            self.unsaved_since = get_metric("gauge", name, text, labels)
            self.unsaved_since.set(0)
