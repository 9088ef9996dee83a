"""Statistics of drafts on a device, without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from ngram_npu import _C
from ngram_npu.index import DeviceIndexStatistics
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.stats import Rows, Stats


class DeviceStats:
    """:class:`Stats` of tensors. From a GPU they are copied asynchronously after the step; the
    first later step that finds the copy complete counts it."""

    def __init__(
        self, vllm_config: Any, options: Options, rows: int, index: Any, device: torch.device
    ) -> None:
        self._stats = Stats(vllm_config, options, rows)
        self._index = index
        self._on_host = device.type == "cpu"
        self._copies: deque[tuple[Any, torch.Tensor, torch.Tensor | None, float, Rows]] = deque()

    def observe(
        self,
        started: float,
        rows: Rows,
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Counts one call of ``propose()`` that began at ``started`` (``time.perf_counter()``).

        Args:
            rows: as in :meth:`Stats.observe`, on the host.
            values: lengths, num_sampled, match_len, counts; [B] int32.
        """
        table = torch.stack(values)
        if self._on_host:
            indexed = 0 if self._index is None else self._index.statistics.rows_indexed
            self._stats.observe(time.perf_counter() - started, rows, table.numpy(), indexed)
            return
        header = None
        if self._index is not None:
            header = _to_host(self._index.tensor[: _C.DEVICE_INDEX_HEADER_WORDS])
        table = _to_host(table)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copies.append((event, table, header, time.perf_counter() - started, rows))
        while self._copies and self._copies[0][0].query():
            _, table, header, seconds, rows = self._copies.popleft()
            self._stats.observe(seconds, rows, table.numpy(), _rows_indexed(header))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)  # into pinned memory


def _rows_indexed(header: torch.Tensor | None) -> int:
    if header is None:
        return 0
    return DeviceIndexStatistics(**_C.device_index_statistics(header.numpy())).rows_indexed
