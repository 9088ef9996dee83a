"""Measures implementations on a GPU or an NPU with the device's events, several steps at a time."""

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

from tools.bench.measure import Implementation, Measurement, compare_drafts, rotate
from tools.bench.options import BenchError, Options

STEPS = 12
"""Default number of steps per measurement."""
_WARM_UP_ROUNDS = 2
_WAIT_CYCLES, _MAX_WAIT_CYCLES = 1 << 18, 1 << 28
"""The GPU waits about 130 us while the host launches the graph; otherwise the time that the host
needs would be counted as device time. If the host needs longer, the measurement is repeated with
twice the wait, up to a tenth of a second."""

Work = Callable[[], Any]


def require_device(op: str, device: str) -> str:
    """Returns the device. Tests replace this function with one that returns the CPU.

    Raises:
        BenchError: There is no such device, or the operator has no kernel for it.
    """
    if not (_library.has_kernel(op, device) and torch.get_device_module(device).is_available()):
        reason = _library.backends()[device].reason or "torch finds no such device"
        raise BenchError(f"device {device}: no kernel of {op}: {reason}")
    return device


def make_workspace(op: str, batch: int, device: str) -> torch.Tensor:
    return torch.zeros(workspace_size(op, batch), dtype=torch.int32, device=device)


def measure(
    implementations: Sequence[Implementation], workload_steps: int, options: Options
) -> Measurement:
    """Measures the implementations; the first is ours. In each round, all implementations do the
    workload's first steps, one implementation after the other, on a GPU as the replay of a CUDA
    graph. A different implementation begins each round."""
    result = Measurement(steps=min(options.steps or STEPS, workload_steps))
    compare_drafts(implementations, result)
    functions: dict[str, Work] = {}
    for implementation in implementations:
        implementation.reset()
        work = partial(_run_steps, implementation, result.steps)
        is_replayed = options.device == "cuda" and implementation.is_captured
        functions[implementation.name] = capture_graph(work)[0].replay if is_replayed else work
        result.rounds_us[implementation.name] = []
    for number in range(-_WARM_UP_ROUNDS, options.rounds):
        for implementation in rotate(implementations, number):
            us = measure_us(functions[implementation.name], implementation.reset, options.device)
            if number >= 0:
                result.rounds_us[implementation.name].append(us / result.steps)
    return result


def _run_steps(implementation: Implementation, count: int) -> None:
    for step in range(count):
        implementation.function(*implementation.get_arguments(step))


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


def measure_us(work: Work, restore: Work, device: str) -> float:
    """Calls ``restore``, then ``work``; returns the microseconds of ``work`` on the device.

    Raises:
        BenchError: The host takes longer to launch ``work`` than the GPU can wait.
    """
    module = torch.get_device_module(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    cycles = _WAIT_CYCLES
    while cycles <= _MAX_WAIT_CYCLES:
        restore()
        if device == "cuda":
            torch.cuda._sleep(cycles)
        start.record()
        work()
        end.record()
        is_late = device == "cuda" and start.query()
        end.synchronize()
        if not is_late:
            return float(start.elapsed_time(end)) * 1e3
        cycles *= 2
    raise BenchError(
        "expected a launch within 0.1 s, the host took longer: is a debugger attached?"
    )


def describe_device(device: str) -> dict[str, Any]:
    """Describes the current device for the results file."""
    if device == "npu":
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere"))
        cann = next((p.read_text().strip() for p in home.glob("**/version.info")), None)
        return {"name": torch.npu.get_device_name(0), "cann": cann}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    smi = "nvidia-smi --query-gpu=driver_version,clocks.max.sm,clocks.max.mem --id=0"
    result = subprocess.run([*smi.split(), "--format=csv,noheader"], capture_output=True, text=True)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "l2_mib": round(properties.L2_cache_size / (1 << 20), 1),
        "cuda": torch.version.cuda,
        "driver, highest clocks": result.stdout.strip(),
    }
