"""The device's part in a comparison: a clock, repeatable steps, and a GPU's limits."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ngram_npu import _library

from tools.bench import stats
from tools.bench.options import BenchError

Work = Callable[[], Any]
Microseconds = Callable[[], float]

_COPY_BYTES = 2 << 30
_AHEAD_CYCLES = 1 << 18
"""About 130 us of waiting on the device, in which the host launches the graph: a late host must not
count as device time. If the host is still late, the wait is doubled, up to a tenth of a second."""
_MOST_AHEAD_CYCLES = 1 << 28


def captured(work: Work) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `work`, and its results, which each replay overwrites. `work` runs once before the
    capture, so that compilation, library loading and allocations happen outside it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A failed capture leaves torch on the capture's stream; this block restores the stream.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        results = work()
    return graph, results


class Cuda:
    """The current CUDA device; tests replace it with the CPU."""

    device = "cuda"
    host_us = 0.0
    """Host time until all plain calls of the works measured last were launched."""
    _ahead_cycles = _AHEAD_CYCLES
    _spoiler: torch.Tensor | None = None

    def prepare(self, works: list[Work], restore: Work, cold: bool) -> Microseconds:
        """Makes `works`, in order, repeatable as a whole.

        Returns:
            A function that restores, does all of them once, and returns the time they took
            together, without the restoring and the emptying of caches.
        """
        before = [self._spoil] if cold else []
        timed = self._graph([part for work in works for part in (*before, work)])
        spoiling = self._graph([self._spoil] * len(works)) if cold else None

        def once() -> float:
            us = self._time(timed, restore)
            if spoiling is not None:
                us -= self._time(spoiling)
            restore()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for work in works:
                work()
            self.host_us = (time.perf_counter() - began) * 1e6
            torch.cuda.synchronize()
            return us

        return once

    def clocks(self) -> str | None:
        """Of a busy device: an idle one's are lower."""
        torch.cuda._sleep(_MOST_AHEAD_CYCLES * 4)
        found = _asked("clocks.sm,clocks.mem,power.draw,temperature.gpu")
        torch.cuda.synchronize()
        return found

    def floors(self, ours_us: float, live_bytes: int | None) -> dict[str, float]:
        """The lower bounds of a step's time, and how ours compares with them.

        Args:
            live_bytes: bytes that every step must read; None: no step must read them.
        """
        bandwidth, empty = max(self.copy_bandwidth, self.read_bandwidth), self.empty_node_us()
        values = {
            "copy_gb_per_s": self.copy_bandwidth / 1e9,
            "read_gb_per_s": self.read_bandwidth / 1e9,
            "empty_node_us": empty,
            "ours_above_empty_us": ours_us - empty,
        }
        if live_bytes is not None:
            read_us = live_bytes / bandwidth * 1e6
            over = ours_us / read_us
            values |= {"live_bytes": live_bytes, "read_us": read_us, "ours_over_read": over}
        return {name: stats.rounded(value) for name, value in values.items()}

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written bytes both counted."""
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        graph = self._graph([lambda: target.copy_(source)])
        fastest = min(self._time(graph) for _ in range(20))
        return 2 * _COPY_BYTES / fastest * 1e6

    @functools.cached_property
    def read_bandwidth(self) -> float:
        """Bytes per second of a large sum, which writes next to nothing."""
        source = torch.zeros(_COPY_BYTES // 4, dtype=torch.float32, device=self.device)
        graph = self._graph([source.sum])
        return _COPY_BYTES / min(self._time(graph) for _ in range(20)) * 1e6

    def empty_node_us(self) -> float:
        """Time of an empty kernel, one of many in a graph."""
        nodes = 100
        graph = self._graph([lambda: torch.cuda._sleep(0)] * nodes)
        return sorted(self._time(graph) for _ in range(21))[10] / nodes

    def _graph(self, works: list[Work]) -> torch.cuda.CUDAGraph:
        def all_of_them() -> None:
            for work in works:
                work()

        return captured(all_of_them)[0]

    def _time(self, graph: torch.cuda.CUDAGraph, restore: Work = lambda: None) -> float:
        """Microseconds of one replay.

        Raises:
            BenchError: the host never gets ahead of the device.
        """
        while self._ahead_cycles <= _MOST_AHEAD_CYCLES:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            restore()
            torch.cuda._sleep(self._ahead_cycles)
            start.record()
            graph.replay()
            end.record()
            late = start.query()
            end.synchronize()
            if not late:
                return float(start.elapsed_time(end)) * 1e3
            self._ahead_cycles *= 2
        raise BenchError("the host is slower than the device waits for it: is a debugger at work?")

    def _spoil(self) -> None:
        """Reads twice the L2's size; written data would first have to be evicted."""
        if self._spoiler is None:
            size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
            self._spoiler = torch.zeros(size // 4, dtype=torch.int32, device=self.device)
        self._spoiler.amax()


class Npu:
    """The current NPU: plain calls, one after the other, and no floors."""

    device = "npu"
    host_us = 0.0

    def prepare(self, works: list[Work], restore: Work, cold: bool) -> Microseconds:
        if cold:
            raise BenchError("device npu: cache: expected hot")
        start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))

        def once() -> float:
            restore()
            torch.npu.synchronize()
            began = time.perf_counter()
            start.record()
            for work in works:
                work()
            end.record()
            self.host_us = (time.perf_counter() - began) * 1e6
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return once

    def clocks(self) -> str | None:
        return None

    def floors(self, ours_us: float, live_bytes: int | None) -> dict[str, float]:
        return {}


def runtime_of(op: str, device: str) -> Cuda | Npu:
    """
    Raises:
        BenchError: No such device, or no kernel of the operator for it; the message says why.
    """
    found = _library.has_kernel(op, device) and torch.get_device_module(device).is_available()
    if not found:
        reason = _library.backends()[device].reason or "torch sees none here"
        raise BenchError(f"device {device}: no kernel of {op}: {reason}")
    return Cuda() if device == "cuda" else Npu()


def describe(device: str) -> dict[str, Any]:
    """The current device, for the record."""
    if device == "npu":
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere"))
        cann = next((p.read_text().strip() for p in home.glob("**/version.info")), None)
        return {"name": torch.npu.get_device_name(0), "cann": cann}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / (1 << 30), 1),
        "l2_mib": round(found.L2_cache_size / (1 << 20), 1),
        "compute_capability": f"{found.major}.{found.minor}",
        "driver": _asked("driver_version"),
        "clocks_sm_memory_highest": _asked("clocks.sm,clocks.mem,clocks.max.sm"),
        "cuda": torch.version.cuda,
    }


def _asked(what: str) -> str | None:
    """Of the first GPU, as nvidia-smi reports it; None if it does not."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
