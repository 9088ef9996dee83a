"""Repeated work: replays of a CUDA graph, or plain calls on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tools.bench.device import Work, captured

HAS_GPU = torch.cuda.is_available()
NO_GPU = "NO GPU: nothing of the CUDA backend was run; its kernels run on their host twin only"
GPU_ONLY = pytest.mark.skipif(not HAS_GPU, reason=NO_GPU)
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]


class Replay:
    """`work`, captured into a CUDA graph; each call is a replay and gives the graph's results,
    which the next call overwrites. On the CPU each call is a call."""

    def __init__(self, device: str, work: Work) -> None:
        self._device, self._work = device, work
        self._graph, self._results = (None, None) if device == "cpu" else captured(work)

    def __call__(self) -> Any:
        """Neither waits for the GPU nor allocates."""
        synchronize(self._device)
        before = num_allocations(self._device)
        with no_synchronisation(self._device):
            if self._graph is None:
                return self._work()
            self._graph.replay()
        assert num_allocations(self._device) == before
        return self._results


def times(device: str, on_a_gpu: int, on_the_cpu: int = 3) -> int:
    return on_the_cpu if device == "cpu" else on_a_gpu


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def num_allocations(device: str) -> int:
    """Number of blocks that torch's allocator has allocated so far."""
    if device == "cpu":
        return 0
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """Within the block, a call of torch that waits for the GPU is an error."""
    if device == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
