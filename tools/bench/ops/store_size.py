"""What the size of a store costs: a step, saving it while steps go on, loading it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ngram_npu import NgramStore, store_file

from tools.bench.data import Workload
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.ops.store import ProposerStep
from tools.bench.options import Options

SIZES = {"1M": 1 << 20, "16M": 1 << 24, "64M": 1 << 26}
KILLS = 50


def _with(tokens: int) -> Make:
    return lambda workload, options: ProposerStep(workload, options, "live", tokens)


class StoreSize(Op):
    name = "store-size"
    help = "a step with full stores of 1, 16 and 64 million tokens; ours: without; saving, loading"
    sizes = ("128x8k",)
    peers = tuple(SIZES)
    engines = ("index",)
    unused_settings = frozenset({"config", "match_policy", "device", "cache"})
    peer_makers: ClassVar[Mapping[str, Make]] = {name: _with(n) for name, n in SIZES.items()}
    assumptions: Mapping[str, Any] = {
        "store": "full: the rows' text, and texts of 1,000 random tokens",
        "dram-cold": "256 MB of other memory are read before each step",
        "file": "64M; steps of the same rows go on in another thread while it is saved",
    }

    def make(self, workload: Workload, options: Options) -> Any:
        return ProposerStep(workload, options, None)

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        results: list[Result] = []
        for cache in ("hot", "dram-cold"):
            found, skipped = super().run(replace(options, cache=cache), report)
            results += [{"cache": cache, **result} for result in found]
        files = [result.pop("file") for result in results if "file" in result]
        return results + [{"part": "file", **file} for file in files], skipped

    def compare(
        self, contestants: list[Any], workload: Workload, options: Options, skipped: Skipped
    ) -> Result:
        result = super().compare(contestants, workload, options, skipped)
        if options.cache == "hot":
            result["file"] = _file_of(contestants[-1], workload)
        return result


def _file_of(largest: Any, workload: Workload) -> dict[str, float]:
    """Saving while steps go on, kills in the middle of it, loading."""
    store: NgramStore = largest._proposer.store
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        alone = _steps(largest, workload, until=lambda: False, most=2000)
        started = time.perf_counter()
        saving = threading.Thread(target=store.save, args=(path,))
        saving.start()
        meanwhile = _steps(largest, workload, until=lambda: not saving.is_alive())
        saving.join()
        saved = time.perf_counter() - started
        started = time.perf_counter()
        loaded = NgramStore.load(path)
        took = time.perf_counter() - started
        held = loaded.statistics.tokens_held
        size = path.stat().st_size
        del loaded
        whole = sum(_killed(store, path, saved * i / KILLS) for i in range(KILLS))
    return {
        "tokens_held": held,
        "bytes": size,
        "save_s": round(saved, 2),
        "load_s": round(took, 2),
        "step_median_us": round(float(np.median(alone)), 1),
        "step_worst_us": round(max(alone), 1),
        "step_median_while_saving_us": round(float(np.median(meanwhile)), 1),
        "step_worst_while_saving_us": round(max(meanwhile), 1),
        "skipped_while_saving": store.statistics.calls_busy,
        "kills": KILLS,
        "whole_after_kills": whole,
    }


def _steps(
    contestant: Any, workload: Workload, until: Callable[[], bool], most: int = 1 << 30
) -> list[float]:
    taken: list[float] = []
    while not until() and len(taken) < most:
        contestant.reset()
        for step in range(workload.steps):
            arguments = contestant.arguments(step)
            started = time.perf_counter_ns()
            contestant.function(*arguments)
            taken.append((time.perf_counter_ns() - started) / 1e3)
    return taken


def _killed(store: NgramStore, path: Path, seconds: float) -> bool:
    """Whether the file is whole after a process that saved it was killed."""
    child = os.fork()
    if child == 0:
        store.save(path)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with path.open("rb") as file:
        store_file.read_head(file, str(path))
        return sum(1 for _ in store_file.read_pieces(file, str(path))) > 0
