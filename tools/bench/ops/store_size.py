"""What the size of a store costs: a step, saving it while steps go on, loading it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ngram_npu import _C, NgramStore
from ngram_npu.store import file as store_file

from tools.bench.data import Workload
from tools.bench.measure import waited_ns
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.ops.store import ProposerStep
from tools.bench.options import Options

NEXT_SERIAL, END_OF_SERIALS = 5, 1 << 24  # csrc/core/store.h
SIZES = {"1M": 1 << 20, "16M": 1 << 24, "64M": 1 << 26}
KILLS = 50
STEPS = 4000
PAUSE_S = 2e-3
DISTURBED_NS = 100_000


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
        "file": "64M; steps of the same rows, each after 2 ms without one, go on in another thread "
        "while it is saved; a step is disturbed if threads of the process waited for a core in it "
        "for more than 0.1 ms in all; the worst step is one of the others, if there are any",
        "longest_piece": "the use of the store that a step may have to wait for, by its thread's "
        "own time",
        "renumbering": "the step that has no number left for a block, and writes all entries",
    }

    def make(self, workload: Workload, options: Options) -> Any:
        return ProposerStep(workload, options, None)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for cache in ("hot", "dram-cold"):
            for result in super().run(replace(options, cache=cache), skipped):
                file = result.pop("file", None)
                yield {"cache": cache, **result}
                if file is not None:
                    yield {"part": "file", "size": result["size"], **file}

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        result = super().compare(contestants, workload, options)
        if options.cache == "hot":
            result["file"] = _file_of(contestants[-1], workload)
        return result


def _file_of(largest: Any, workload: Workload) -> dict[str, Any]:
    """Saving while steps go on, kills in the middle of it, loading; running out of numbers."""
    store: NgramStore = largest._proposer.store
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        alone = _steps(largest, workload, until=lambda: False)
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
        "steps": alone,
        "steps_while_saving": meanwhile,
        "longest_piece_us": round(_longest_piece(store), 1),
        "skipped_while_saving": store.statistics.calls_busy,
        "kills": KILLS,
        "whole_after_kills": whole,
        "renumbering_ms": round(_renumbering(store), 2),
    }


def _steps(contestant: Any, workload: Workload, until: Callable[[], bool]) -> dict[str, float]:
    """Steps until something, at most `STEPS`."""
    taken: list[tuple[float, bool]] = []
    while len(taken) < STEPS and not (taken and until()):
        at = len(taken) % workload.steps
        if at == 0:
            contestant.reset()
        arguments = contestant.arguments(at)
        time.sleep(PAUSE_S)
        waited, started = waited_ns(), time.perf_counter_ns()
        contestant.function(*arguments)
        took = time.perf_counter_ns() - started
        taken.append((took / 1e3, waited_ns() - waited > DISTURBED_NS))
    calm = [took for took, disturbed in taken if not disturbed]
    return {
        "median_us": round(float(np.median(calm or [took for took, _ in taken])), 1),
        "worst_us": round(max(calm or [took for took, _ in taken]), 1),
        "worst_of_all_us": round(max(taken)[0], 1),
        "steps": len(taken),
        "disturbed": len(taken) - len(calm),
    }


def _longest_piece(store: NgramStore) -> float:
    room = np.empty(_C.STORE_PIECE_WORDS, np.int32)
    longest = 0
    for piece in range(_C.store_pieces(store.tensor)):
        started = time.thread_time_ns()
        _C.store_pack(store.tensor, piece, room)
        longest = max(longest, time.thread_time_ns() - started)
    return longest / 1e3


def _renumbering(store: NgramStore) -> float:
    """Milliseconds; afterwards the store has forgotten most of its text."""
    store.tensor[NEXT_SERIAL] = END_OF_SERIALS
    started = time.perf_counter()
    store.warm([[1]])
    took = time.perf_counter() - started
    assert store.statistics.renumberings == 1
    return took * 1e3


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
        store_file.read_description(file, str(path))
        return sum(1 for _ in store_file.read_pieces(file, str(path))) > 0
