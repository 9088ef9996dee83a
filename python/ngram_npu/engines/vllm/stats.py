"""Counts what a drafter drafts, for the log and for Prometheus.

vLLM itself counts accepted drafts for every method, in its ``SpecDecoding metrics`` line and as
``vllm:spec_decode_*``.
"""

from __future__ import annotations

import os
import time
from collections import deque
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch

from ngram_npu.engines.vllm.metrics import get_metric, increase, make_labels
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.tensors import Int32Array

_COUNTERS = {
    "proposals": ("proposals_total", "Steps with a lookup."),
    "rows": ("rows_total", "Requests looked up, summed over steps."),
    "drafts": ("drafts_total", "Requests with an n-gram draft, summed over steps."),
    "tokens": ("draft_tokens_total", "Tokens of n-gram drafts."),
    "seconds": ("propose_seconds_total", "Time spent in propose()."),
}


class Stats:
    """Counts the calls of one engine. Logs a line with the counts of an interval at the first call
    after it, and the last line when the process or ``owner``, the engine's drafter, ends."""

    def __init__(self, owner: object, vllm_config: Any) -> None:
        interval = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10"))
        self._interval = interval if interval > 0 else 10.0  # as in vLLM
        labels = make_labels(vllm_config)
        self._counters = [
            get_metric("counter", name, text, labels) for name, text in _COUNTERS.values()
        ]
        self._sums: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._begin = self._end = 0.0
        Finalize(owner, self.end_interval, exitpriority=0)

    def observe(self, started: float, num_sampled: Any, num_draft_tokens: Any) -> None:
        """Counts one call of ``propose()``.

        Args:
            started: When the call began, as a time of ``time.perf_counter()``.
            num_sampled: [B] numbers of sampled tokens; requests without any are in prefill.
            num_draft_tokens: [B] lengths of n-gram drafts, without padding; 0: none is used.
        """
        self._count(time.perf_counter() - started, num_sampled, num_draft_tokens)

    def _count(self, seconds: float, num_sampled: Int32Array, num_draft_tokens: Int32Array) -> None:
        now = time.perf_counter()
        if self._sums["proposals"] and now - self._begin > self._interval:
            self.end_interval()
        if not self._sums["proposals"]:
            self._begin = now - seconds
        self._end = now
        tokens = int(np.add.reduce(num_draft_tokens))  # takes half the time of sum()
        num_rows, num_drafts = np.count_nonzero(num_sampled), np.count_nonzero(num_draft_tokens)
        increments = 1, int(num_rows), int(num_drafts), tokens, seconds
        for name, increment in zip(_COUNTERS, increments, strict=True):
            self._sums[name] += increment
        increase(self._counters, increments)

    def end_interval(self) -> None:
        """Logs and resets the counts, if there are any."""
        sums, self._sums = self._sums, dict.fromkeys(_COUNTERS, 0)
        if not sums["proposals"]:
            return
        rows, drafts = int(sums["rows"]), int(sums["drafts"])
        seconds = self._end - self._begin
        logger.info(
            f"ngram_npu metrics: last {seconds:.1f} s: {sums['proposals']} proposals, "
            f"{1e3 * sums['seconds'] / sums['proposals']:.3f} ms each, {drafts} of {rows} rows "
            f"drafted ({100 * drafts / max(rows, 1):.1f}%), "
            f"{sums['tokens'] / max(drafts, 1):.2f} tokens per draft"
        )


class DeviceStats(Stats):
    """Counts from tensors. Tensors of a GPU are copied asynchronously after the step. The first
    later step at which the copy is complete counts them."""

    def __init__(self, owner: object, vllm_config: Any, device: torch.device) -> None:
        super().__init__(owner, vllm_config)
        self._on_host = device.type == "cpu"
        self._runtime: Any = torch.get_device_module(device)
        self._copies: deque[tuple[Any, torch.Tensor, float]] = deque()

    def observe(self, started: float, num_sampled: Any, num_draft_tokens: Any) -> None:
        table = torch.stack((num_sampled, num_draft_tokens))
        if self._on_host:
            self._count(time.perf_counter() - started, *table.numpy())
            return
        table = table.to("cpu", non_blocking=True)  # into pinned memory
        event = self._runtime.Event()
        event.record()
        self._copies.append((event, table, time.perf_counter() - started))
        while self._copies and self._copies[0][0].query():
            _, table, seconds = self._copies.popleft()
            self._count(seconds, *table.numpy())
