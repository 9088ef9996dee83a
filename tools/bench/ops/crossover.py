"""The number of tokens from which a second thread pays, per front end's pool, busy and idle.

A call with threads costs ``scan / threads + wake``; one thread costs ``scan``. Both times, taken
at a size that uses threads, give ``wake`` and the number of tokens at which both costs are equal.
Below the pool's own threshold (``Executor.min_tokens_per_thread``) it uses one thread: ratio 1.
The data is "nomatch", where every token is scanned: a scan that ends early has no known length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tools.bench import provenance, stats
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.ops.lookup import StepContestant
from tools.bench.options import FRONTENDS, Options

IDLE_MS = (0.0, 5.0)
"""A pool's threads fall asleep between the steps of a real model, which takes milliseconds."""

_ONE_THREAD = "ours:threads=1"


class Crossover(Op):
    name = "crossover"
    help = "all cores against one thread, by the tokens in a batch"
    sizes = ("32x4k", "32x8k", "32x16k", "32x32k", "32x64k", "64x64k", "128x64k")

    make = StepContestant

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        threads = options.threads if options.threads > 1 else provenance.machine()["cores"]
        for frontend in FRONTENDS:
            for idle in IDLE_MS:
                chosen = replace(
                    options, threads=threads, frontend=frontend, idle_ms=idle,
                    peers=(_ONE_THREAD,), data_kind="nomatch",
                )  # fmt: skip
                for result in super().run(chosen, skipped):
                    yield result | wake(result, threads)


def wake(result: Result, threads: int) -> dict[str, float | int]:
    """The results derived from one size's figures."""
    tokens = result["batch"] * result["context"]
    single = result["peers"][_ONE_THREAD]["median_us"]
    cost = max(0.0, result["ours"]["median_us"] - single / threads)
    even = cost / (single / tokens) * threads / (threads - 1) if threads > 1 else 0.0
    return {
        "tokens": tokens,
        "threads": threads,
        "wake_us": stats.rounded(cost),
        "break_even_tokens": round(even),
    }
