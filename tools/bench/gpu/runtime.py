"""What the comparison needs of a GPU: a clock, graphs, a cache to empty, and its limits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tools.bench.options import BenchError

Work = Callable[[], Any]
Microseconds = Callable[[], float]

_COPY_BYTES = 2 << 30
_AHEAD_CYCLES = 1 << 18
"""Some 130 us of waiting on the device, in which the host gets ahead of it with the launch of a
graph: a host that is late must not count. Where it is, the wait is doubled, up to a tenth of a
second."""
_MOST_AHEAD_CYCLES = 1 << 28


class Runtime(Protocol):
    """The seam between the comparison and a device; tests put the CPU here."""

    device: str

    def prepare(self, works: list[Work], restore: Work, cold: bool) -> Microseconds:
        """Makes `works`, in order, repeatable as a whole.

        Returns:
            What restores, does all of them once, and says how long they took together, without
            restoring and without emptying caches.
        """

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written bytes both counted."""

    def empty_node_us(self) -> float:
        """A kernel that does nothing, one of a graph's many."""

    def describe(self) -> dict[str, Any]:
        """For the record."""


class Cuda:
    """The current CUDA device."""

    device = "cuda"
    _ahead_cycles = _AHEAD_CYCLES

    def __init__(self) -> None:
        self._properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._spoiler: torch.Tensor | None = None
        self._bandwidth: float | None = None

    def prepare(self, works: list[Work], restore: Work, cold: bool) -> Microseconds:
        before = [self._spoil] if cold else []
        timed = self._graph([part for work in works for part in (*before, work)])
        spoiling = self._graph([self._spoil] * len(works)) if cold else None

        def once() -> float:
            us = self._time(timed, restore)
            return us if spoiling is None else us - self._time(spoiling)

        return once

    def copy_bandwidth(self) -> float:
        if self._bandwidth is None:
            self._bandwidth = self._measure_bandwidth()
        return self._bandwidth

    def _measure_bandwidth(self) -> float:
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        graph = self._graph([lambda: target.copy_(source)])
        fastest = min(self._time(graph) for _ in range(20))
        return 2 * _COPY_BYTES / fastest * 1e6

    def empty_node_us(self) -> float:
        nodes = 100
        graph = self._graph([lambda: torch.cuda._sleep(0)] * nodes)
        return sorted(self._time(graph) for _ in range(21))[10] / nodes

    def describe(self) -> dict[str, Any]:
        found = self._properties
        return {
            "name": found.name,
            "multiprocessors": found.multi_processor_count,
            "memory_gib": round(found.total_memory / (1 << 30), 1),
            "l2_mib": round(found.L2_cache_size / (1 << 20), 1),
            "compute_capability": f"{found.major}.{found.minor}",
            "driver": query("driver_version"),
            "cuda": torch.version.cuda,
        }

    def _graph(self, works: list[Work]) -> torch.cuda.CUDAGraph:
        """Run once before: compilers run, libraries load, and memory is allocated in the open."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for work in works:
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A capture that is refused leaves torch on the stream of the capture: the block does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for work in works:
                work()
        return graph

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
        """Overwrites twice as much as the L2 holds."""
        if self._spoiler is None:
            size = 2 * self._properties.L2_cache_size
            self._spoiler = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._spoiler.zero_()


def query(field: str) -> str | None:
    """A field of the first GPU as nvidia-smi reports it; None where it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip() or None
