"""The way from a device's stream to the host and back, when the host is busy.

A job of drafting on the host runs in a thread of the driver's. What matters is how late it may be:
with busy cores, with other engines on the machine, or while another job runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.index import make_index

from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.ops.store import LEAST_PROBABILITY
from tools.bench.options import Options, Size

ENGINES = 8
SPIN = 1
"""CU_CTX_SCHED_SPIN: a thread that waits for the device keeps its core."""


class HostLatency(Op):
    name = "host-latency"
    help = "round trips of drafting on the host: idle, spinning, with busy cores, with 8 processes"
    sizes = ("1x1k", "128x32k", "256x32k")
    device_peers = ()
    unused_settings = frozenset({"config", "match_policy", "engine", "threads", "cache"})
    assumptions: Mapping[str, Any] = {
        "round trip": "from the call that enqueues a step until the device has its drafts; one "
        "token for each request, ladder, no store",
        "launch": "enqueueing a step while the job of the one before runs",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for size in self.sizes_of(options):
            given = [f"--batch={size.batch}", f"--context={size.context}", f"--k={options.k}"]
            given += [f"--device={options.device}", f"--steps={100 * options.rounds}"]
            (idle,) = _measured(given, 1)
            result: Result = {"size": str(size), "idle": idle}
            if options.device != "cpu":
                (result["spinning"],) = _measured([*given, "--spin"], 1)
            with _busy_cores():
                (result["busy cores"],) = _measured(given, 1)
            others = _measured(given, ENGINES)
            result[f"{ENGINES} processes"] = max(others, key=lambda of: of["p99_us"])
            yield result


def _measured(arguments: list[str], processes: int) -> list[dict[str, float]]:
    """What so many processes at the same time measure."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", *arguments]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("host-latency: a process that measures has failed")
    return [json.loads(text) for text in said]


@contextmanager
def _busy_cores() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(device: torch.device, size: Size, k: int, steps: int) -> dict[str, float]:
    """Microseconds of one process."""
    rows = np.arange(size.batch, dtype=np.int32)
    capacity = size.context + 3 * steps + 64
    config = NgramConfig(sizes="ladder", k=k, min_draft_probability=LEAST_PROBABILITY)
    drafting = HostDrafting(
        config,
        num_rows=size.batch,
        capacity=capacity,
        max_sampled=1,
        device=device,
        index=make_index(config, size.batch, size.batch * capacity, kind="numpy"),
    )
    rng = np.random.default_rng(0)
    for row in rows:
        drafting.begin(int(row), rng.integers(0, 1000, size.context))
    sampled = torch.ones(size.batch, 2, dtype=torch.int32, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(16 + size.batch * size.context // 8192):  # prompts are indexed
        drafting.propose(rows[:0], sampled[:0])
    wait()
    round_trips, launches = [], []
    for _ in range(steps):
        drafting.propose(rows, sampled)
        between = time.perf_counter_ns()
        drafting.propose(rows, sampled)
        launches.append(time.perf_counter_ns() - between)
        wait()
        begun = time.perf_counter_ns()
        drafting.propose(rows, sampled)
        wait()
        round_trips.append(time.perf_counter_ns() - begun)
    names = {"median_us": 50, "p99_us": 99}
    found = {name: float(np.percentile(round_trips, at)) / 1e3 for name, at in names.items()}
    found["launch_median_us"] = float(np.median(launches)) / 1e3
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("batch", "context", "k", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--spin", action="store_true")
    given = parser.parse_args()
    if given.spin:  # before anything makes a context
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxSetFlags(0, SPIN)
    size = Size(given.batch, given.context)
    print(json.dumps(measure(torch.device(given.device), size, given.k, given.steps)))
