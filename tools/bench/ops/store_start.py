"""What making a store takes, and whether the first text that comes in waits for memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from ngram_npu import NgramStore

from tools.bench.ops.acceptance import Acceptance
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options

TOKENS = 1 << 24
STEPS, SAMPLED = 50, 4


class StoreStart(Op):
    name = "store-start"
    help = "making a store of 16 million tokens, and the first 200 tokens that come in"
    sizes = ()
    unused_settings = Acceptance.unused_settings - {"rounds"}
    assumptions: Mapping[str, Any] = {
        "process": "one for each round; each figure is the median of the rounds",
        "step": f"{SAMPLED} random tokens come in (NgramStore.warm), {STEPS} times; the thread's "
        "own time, which other work on the machine disturbs less",
        "resident": "of the process, above what it had before the store was made",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        rounds = [json.loads(subprocess.check_output(command)) for _ in range(options.rounds)]
        yield {
            "size": "16M",
            **{name: round(median(of[name] for of in rounds), 1) for name in rounds[0]},
        }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """One round."""
    rng, before = np.random.default_rng(0), _resident_mb()
    began, spent = time.perf_counter_ns(), time.thread_time_ns()
    store = NgramStore(256, TOKENS)
    made, own = time.perf_counter_ns() - began, time.thread_time_ns() - spent
    at_first = _resident_mb() - before
    steps = []
    for _ in range(STEPS):
        new = rng.integers(0, 1 << 17, SAMPLED)
        spent = time.thread_time_ns()
        store.warm([new])
        steps.append((time.thread_time_ns() - spent) / 1e3)
    found = {
        "make_ms": made / 1e6,
        "make_own_ms": own / 1e6,
        "resident_mb": at_first,
        "resident_after_mb": _resident_mb() - before,
        "worst_step_us": max(steps),
        "median_step_us": median(steps),
    }
    print(json.dumps(found))
