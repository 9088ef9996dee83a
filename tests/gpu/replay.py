"""Runs the same work repeatedly: as replays of a CUDA graph, or as calls on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
NO_GPU = "NO GPU: the CUDA backend was not run; its kernels run only on their host twin"
GPU_ONLY = pytest.mark.skipif(not HAS_GPU, reason=NO_GPU)
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]


Work = Callable[[], Any]


def capture_graph(work: Work) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Returns a CUDA graph of ``work``, and the results, which each replay overwrites. Runs
    ``work`` once before the capture, so that nothing is compiled or loaded during the capture."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A failed capture leaves torch on the capture's stream; this block restores the stream.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        results = work()
    return graph, results


class Replay:
    """`work`, captured into a CUDA graph. A call replays the graph and returns its results, which
    the next call overwrites. On the CPU, a call runs `work`."""

    def __init__(self, device: str, work: Work) -> None:
        self._device, self._work = device, work
        self._graph, self._results = (None, None) if device == "cpu" else capture_graph(work)

    def __call__(self) -> Any:
        """Replays the work, and checks that it neither waits for the GPU nor allocates."""
        synchronize(self._device)
        num_before = count_allocations(self._device)
        with forbid_waiting(self._device):
            if self._graph is None:
                return self._work()
            self._graph.replay()
        assert count_allocations(self._device) == num_before
        return self._results


def choose_count(device: str, on_gpu: int, on_cpu: int = 3) -> int:
    """Returns how often a test repeats its work: less often on the CPU, which is slower."""
    return on_cpu if device == "cpu" else on_gpu


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def count_allocations(device: str) -> int:
    """Returns the number of blocks that torch's allocator has allocated so far."""
    if device == "cpu":
        return 0
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def forbid_waiting(device: str) -> Iterator[None]:
    """Makes torch calls that wait for the GPU raise an error within the `with` block."""
    if device == "cpu":
        yield
        return
    mode_before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode_before)
