"""What the drafter counts, in the log and in Prometheus.

Acceptance is not here: vLLM counts it itself, in its ``SpecDecoding metrics`` line and as
``vllm:spec_decode_*``, for this method as for any other.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

from ngram_npu.vllm.engines import Int32Array

logger = logging.getLogger("vllm.ngram_npu")

_LABELS = ("model_name", "engine")
_COUNTERS = {
    "proposals": ("ngram_npu_proposals", "Steps for which drafts were looked for."),
    "rows": ("ngram_npu_rows", "Requests looked up, summed over steps."),
    "drafts": ("ngram_npu_drafts", "Requests for which there was a draft, summed over steps."),
    "tokens": ("ngram_npu_draft_tokens", "Draft tokens handed to the engine."),
    "seconds": ("ngram_npu_propose_seconds", "Time spent in propose()."),
}
# A counter's name can be registered once in a process, while engines come and go.
_registered: dict[str, Any] = {}


class Stats:
    """The counters of one engine; a line in the log at vLLM's own interval while there is work."""

    def __init__(self, vllm_config: Any) -> None:
        self._interval = _log_interval()
        self._counters = _prometheus(vllm_config)
        self._begin(time.perf_counter())

    def observe(self, started: float, num_sampled: Int32Array, counts: Int32Array) -> None:
        """One call of ``propose()``, begun at ``started`` (``time.perf_counter()``)."""
        now = time.perf_counter()
        amounts = {
            "proposals": 1,
            "rows": int(np.count_nonzero(num_sampled)),
            "drafts": int(np.count_nonzero(counts)),
            "tokens": int(counts.sum()),
            "seconds": now - started,
        }
        for name, amount in amounts.items():
            self._sums[name] += amount
        for name, counter in self._counters.items():
            counter.inc(amounts[name])
        if now - self._since >= self._interval:
            self._log(now - self._since)
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._sums: dict[str, float] = dict.fromkeys(_COUNTERS, 0)

    def _log(self, elapsed: float) -> None:
        sums = self._sums
        logger.info(
            "ngram_npu metrics: last %.1f s: %d proposals, %.3f ms each, %d of %d rows drafted "
            "(%.1f%%), %.2f tokens per draft",
            elapsed,
            sums["proposals"],
            1e3 * sums["seconds"] / max(sums["proposals"], 1),
            sums["drafts"],
            sums["rows"],
            100 * sums["drafts"] / max(sums["rows"], 1),
            sums["tokens"] / max(sums["drafts"], 1),
        )


def _log_interval() -> float:
    """As vLLM reads it: seconds, 10 where it is absent or not positive."""
    try:
        seconds = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10"))
    except ValueError:
        return 10.0
    return seconds if seconds > 0 else 10.0


def _prometheus(vllm_config: Any) -> dict[str, Any]:
    """Counters in prometheus_client's default registry, the one vLLM's ``/metrics`` serves. Where
    PROMETHEUS_MULTIPROC_DIR is set they are files instead, which ``/metrics`` gathers; counters
    add up over processes, so that nothing else need be decided here."""
    try:
        import prometheus_client
    except ImportError:  # not vLLM's doing: it cannot start without
        return {}
    labels = {
        "model_name": str(getattr(vllm_config.model_config, "served_model_name", "")),
        "engine": str(getattr(vllm_config.parallel_config, "data_parallel_rank", 0)),
    }
    counters = {}
    for key, (name, text) in _COUNTERS.items():
        if name not in _registered:
            _registered[name] = prometheus_client.Counter(name, text, _LABELS)
        counters[key] = _registered[name].labels(**labels)
    return counters
