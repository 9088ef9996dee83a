"""Whether the process grows over many steps, and whether a step copies the token buffer."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu import _C

from tools.bench import stats
from tools.bench.data import Int32Array, Workload, make_workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.ops.lookup import StepContestant, array_of, torch_op
from tools.bench.options import BenchError, Options, Size

STEPS = 10_000
WARM_UP = 200
VARIANTS = (
    "numpy",
    "numpy-sliced",
    "torch",
    "torch-sliced",
    "torch.compile",
    "torch.compile-sliced",
)


class Memory(Op):
    name = "memory"
    help = f"growth of the process over {STEPS} steps"
    sizes = ("256x32k",)

    def make(self, workload: Workload, options: Options) -> Contestant:
        return StepContestant(workload, options)

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        if not sys.platform.startswith("linux"):
            raise BenchError("memory: /proc is needed to see a process's memory")
        # Periodic rows match at once: thousands of steps take a second, and a copy would show.
        options = replace(options, data_kind="periodic")
        results: list[Result] = []
        skipped: Skipped = {}
        for size in self.sizes_of(options):
            for variant in VARIANTS:
                try:
                    results.append(_grow(variant, size, options))
                except ImportError as error:  # without torch; any other error is a failure
                    skipped[variant] = str(error)
                    continue
                report(results[-1])
        return results, skipped


def _grow(variant: str, size: Size, options: Options) -> Result:
    frontend = "numpy" if variant.startswith("numpy") else "torch"
    workload = make_workload(size, replace(options, frontend=frontend))
    tokens = workload.token_ids
    if "sliced" in variant:
        # Every second row of a buffer with room on both sides, like a runner's slice.
        wide = np.zeros((2 * tokens.shape[0], tokens.shape[1] + 32), np.int32)
        wide[::2, 16:-16] = tokens
        tokens = wide[::2, 16:-16]
    step = _stepper(variant, tokens, workload, replace(options, frontend=frontend))
    _C.set_num_threads(options.threads)
    step(WARM_UP)
    gc.collect()
    _forget_peak()
    before, start = resident(), time.perf_counter()
    step(STEPS)
    seconds = time.perf_counter() - start
    gc.collect()
    growth, peak = resident() - before, _peak() - before
    return {
        "size": str(size),
        "batch": size.batch,
        "context": size.context,
        "variant": variant,
        "data": workload.describes,
        "steps": STEPS,
        "token_buffer_bytes": tokens.size * tokens.itemsize,
        "growth_bytes": growth,
        "peak_growth_bytes": peak,
        "us_per_step": stats.rounded(seconds / STEPS * 1e6),
    }


def _stepper(
    variant: str, tokens: Int32Array, workload: Workload, options: Options
) -> Callable[[int], None]:
    """A function that runs this many steps; the rows grow and go back to their base lengths."""
    array = array_of(options)
    own: Int32Array = workload.lengths[0].copy()
    buffer, lengths = array(tokens), array(own)
    sampled = [array(step) for step in workload.sampled]
    lookup = options.lookup | {"max_len": tokens.shape[1]}
    op: Callable[..., Any]
    if variant.startswith("torch.compile"):
        import torch

        default = torch_op("ngram_step_")
        op = torch.compile(default, fullgraph=True, dynamic=True)
    else:
        op = _C.ngram_step_ if options.frontend == "numpy" else torch_op("ngram_step_")

    def step(count: int) -> None:
        for number in range(count):
            at = number % workload.steps
            if at == 0:
                own[:] = workload.lengths[0]
            op(buffer, lengths, sampled[at], **lookup)

    return step


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _forget_peak() -> None:
    """Resets the kernel's peak to the present resident size."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchError("memory: the system tells no peak")
