"""What drafters on the runner's device share, whatever the device. Nothing waits for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from ngram_npu.ops import workspace_size
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.stats import Rows, Stats


def never_empty(found: Any) -> Any:
    """Gives each request that sampled tokens but has no draft its newest token as a draft."""
    none = (found.num_draft_tokens == 0) & (found.num_sampled > 0)
    drafts = found.draft_token_ids
    drafts[:, 0] = torch.where(none, found.next_token_ids, drafts[:, 0])
    return found._replace(num_draft_tokens=found.num_draft_tokens + none)


def workspace(op: str, options: Options, device: torch.device) -> torch.Tensor | None:
    """The workspace of ``op`` on a GPU. Without it each call would allocate and zero one."""
    if device.type == "cpu":
        return None
    size = workspace_size(op, options.max_num_seqs)
    return torch.zeros(size, dtype=torch.int32, device=device)


def as_matrix(sampled: torch.Tensor | list[list[int]], device: torch.device) -> torch.Tensor:
    if isinstance(sampled, torch.Tensor):
        return sampled.to(torch.int32)
    width = max([1, *map(len, sampled)])
    rows = [[*row, *[-1] * (width - len(row))] for row in sampled]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)


class DeviceStats(Stats):
    """Of tensors. From a GPU they are copied asynchronously after the step; the first later step
    that finds the copy complete counts it."""

    def __init__(self, owner: Any, vllm_config: Any, options: Options, rows: int, index: Any):
        super().__init__(owner, vllm_config, options, rows)
        self._index = index
        self._on_host = owner.device.type == "cpu"
        self._runtime: Any = torch.get_device_module(owner.device)
        self._copies: deque[tuple[Any, torch.Tensor, float, Rows]] = deque()

    def observe_tensors(self, started: float, rows: Rows, *values: torch.Tensor) -> None:
        """As :meth:`observe`, for a call that began at ``started`` (``time.perf_counter()``)."""
        table = torch.stack(values)
        if self._on_host:
            self.observe(time.perf_counter() - started, rows, table.numpy(), self._index)
            return
        table = table.to("cpu", non_blocking=True)  # into pinned memory
        event = self._runtime.Event()
        event.record()
        self._copies.append((event, table, time.perf_counter() - started, rows))
        while self._copies and self._copies[0][0].query():
            _, table, seconds, rows = self._copies.popleft()
            self.observe(seconds, rows, table.numpy(), None)  # the index is in host memory
