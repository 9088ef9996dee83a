"""Timing on a GPU or an NPU: a few steps at a time, by the device's own events."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ngram_npu import _library
from ngram_npu.ops import workspace_size

from tools.bench.measure import Contestant, Measurement, check, rotate
from tools.bench.options import BenchError, Options

STEPS = 12
"""Steps per timing by default."""
_WARM_UP_ROUNDS = 2
_AHEAD_CYCLES, _MAX_AHEAD_CYCLES = 1 << 18, 1 << 28
"""The device waits about 130 us while the host launches the graph, because a late host must not
count as device time. If the host is still late, the wait is doubled, up to a tenth of a second."""

Work = Callable[[], Any]


def require(op: str, device: str) -> str:
    """Returns the device; tests replace it with the CPU.

    Raises:
        BenchError: There is no such device, or the operator has no kernel for it.
    """
    if not (_library.has_kernel(op, device) and torch.get_device_module(device).is_available()):
        reason = _library.backends()[device].reason or "torch finds no such device"
        raise BenchError(f"device {device}: no kernel of {op}: {reason}")
    return device


def make_workspace(op: str, batch: int, device: str) -> torch.Tensor:
    return torch.zeros(workspace_size(op, batch), dtype=torch.int32, device=device)


def measure(contestants: Sequence[Contestant], lap: int, options: Options) -> Measurement:
    """Measures the contestants, of which our op is the first. In each round all of them do the
    workload's first steps once, one contestant after the other, on a GPU as the replay of a CUDA
    graph; the first one changes from round to round."""
    result = Measurement(steps=min(options.steps or STEPS, lap))
    check(contestants, result)
    works: dict[str, Work] = {}
    for contestant in contestants:
        contestant.reset()
        work = partial(_run_steps, contestant, result.steps)
        is_replayed = options.device == "cuda" and contestant.captured
        works[contestant.name] = captured(work)[0].replay if is_replayed else work
        result.rounds_us[contestant.name] = []
    for number in range(-_WARM_UP_ROUNDS, options.rounds):
        for contestant in rotate(contestants, number):
            us = time_us(works[contestant.name], contestant.reset, options.device)
            if number >= 0:
                result.rounds_us[contestant.name].append(us / result.steps)
    return result


def _run_steps(contestant: Contestant, count: int) -> None:
    for step in range(count):
        contestant.function(*contestant.arguments(step))


def captured(work: Work) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Returns a graph of ``work`` and its results, which each replay overwrites. ``work`` runs once
    before the capture, so that compilation, library loading and allocations happen outside it."""
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


def time_us(work: Work, restore: Work, device: str) -> float:
    """Returns the microseconds of ``work`` on the device, without those of ``restore`` before it.

    Raises:
        BenchError: The host is slower than the longest wait of the GPU.
    """
    module = torch.get_device_module(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    ahead = _AHEAD_CYCLES
    while ahead <= _MAX_AHEAD_CYCLES:
        restore()
        if device == "cuda":
            torch.cuda._sleep(ahead)
        start.record()
        work()
        end.record()
        is_late = device == "cuda" and start.query()
        end.synchronize()
        if not is_late:
            return float(start.elapsed_time(end)) * 1e3
        ahead *= 2
    raise BenchError("the host is slower than the device waits for it: is a debugger attached?")


def describe(device: str) -> dict[str, Any]:
    """Describes the current device, for the record."""
    if device == "npu":
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere"))
        cann = next((p.read_text().strip() for p in home.glob("**/version.info")), None)
        return {"name": torch.npu.get_device_name(0), "cann": cann}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    smi = "nvidia-smi --query-gpu=driver_version,clocks.max.sm,clocks.max.mem --id=0"
    done = subprocess.run([*smi.split(), "--format=csv,noheader"], capture_output=True, text=True)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "l2_mib": round(properties.L2_cache_size / (1 << 20), 1),
        "cuda": torch.version.cuda,
        "driver, highest clocks": done.stdout.strip(),
    }
