"""Lookups from the index: a step compared with rescans, and the cost and memory of building it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from ngram_npu import _C, NgramIndex
from ngram_npu.config import ANY_TOKEN

from tools.bench import provenance
from tools.bench.arctic_peer import ArcticStep
from tools.bench.data import Int32Array, Workload, make_workload
from tools.bench.measure import Contestant, round_digits, spread
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.ops.lookup import ReadPass, StepContestant
from tools.bench.options import MATCH_POLICY_CODES, Options, Size
from tools.bench.vllm_peer import VllmNumba


class IndexStepContestant(StepContestant):
    """A step with an index of all rows, which were indexed beforehand."""

    op = "ngram_index_step_"
    before_lookup = (None, None, None, True, ANY_TOKEN)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        index = make_index(workload, options, any_data=options.data_kind != "text")
        words = index.tensor
        append(workload.token_ids, self._own_lengths, index, options)
        # Contexts that went back to their base lengths would have to be indexed again: restoring a
        # copy of the index is faster, and gives each lap the same work.
        used = len(words) - count_unused_pages(words) * _C.INDEX_PAGE_WORDS
        self._words, self._saved = words, words[:used].copy()
        self.index = index
        self._tensor = self._convert(words)

    def reset(self) -> None:
        super().reset()
        self._words[: len(self._saved)] = self._saved

    def arguments(self, step: int) -> tuple[Any, ...]:
        tokens, lengths, sampled, *tail = super().arguments(step)
        return (tokens, lengths, sampled, self._tensor, *tail)


class NgramIndexStep(Op):
    name = "ngram_index_step_"
    help = "append the sampled tokens, then draft from the index"
    sizes = ("128x1k", "128x32k", "128x128k", "256x128k")
    peers = ("vllm-numba", "ours:engine=scan")
    engines = ("index", "scan")
    peer_makers: ClassVar[Mapping[str, Make]] = {
        "vllm-numba": VllmNumba,
        "read": ReadPass,
        "arctic-local": ArcticStep,
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        if options.engine == "scan":
            return StepContestant(workload, options)
        return IndexStepContestant(workload, options)


DATA = ("text", "random", "random-128")
LADDERS = {"ladder": "sizes=ladder", "ladder with bytes": "min_draft_probability=0.177"}


class IndexMemory(Op):
    """Counts memory in use and times nothing."""

    name = "index-memory"
    help = "memory of an index per token"
    sizes = ("128x1k", "128x8k", "128x32k")
    unused_settings = frozenset({"config", "k", "match_policy", "threads", "rounds", "device"})

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for size in self.select_sizes(options):
            workload = _make_workload(size, options, options.data_kind)
            for name, changes in {"2 to 5": "min_n=2,max_n=5", **LADDERS}.items():
                changed = options.changed(changes)
                index = make_index(workload, changed, any_data=options.data_kind != "text")
                append(workload.token_ids, workload.lengths[0].copy(), index, changed)
                used = index.statistics.bytes_in_use
                yield {
                    "size": str(size),
                    "context": size.context,
                    "variant": name,
                    **_describe_index(changed),
                    "bytes_per_token": round(used / size.tokens, 2),
                    "data": workload.describes,
                }


class IndexBuild(Op):
    """Times a single thread by its CPU time, which other processes disturb less."""

    name = "index-build"
    help = "indexing whole rows, per token; memory; growth step by step"
    sizes = ("128x32k",)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for size in self.select_sizes(options):
            variants = [
                replace(options, min_n=2, max_n=max_n, match_policy=match_policy)
                for max_n in (4, 5)
                for match_policy in MATCH_POLICY_CODES
            ]
            for data in DATA:
                workload = _make_workload(size, options, data)
                for variant in variants:
                    yield measure_build(workload, variant, data)
            yield measure_growth(size, options)
            for data in DATA:
                workload = _make_workload(size, options, data)
                for ladder in LADDERS.values():
                    yield measure_build(workload, options.changed(ladder), data)


def _make_workload(size: Size, options: Options, data: str) -> Workload:
    """Returns a workload. ``random-128`` has so few ids that most pairs of them occur at least
    twice, which needs the most entries."""
    workload = make_workload(size, replace(options, data_kind=data.partition("-")[0]))
    if data == "random-128":
        workload.token_ids %= 128
        workload.describes = {"kind": data, "source": "uniform over 128 ids"}
    return workload


def measure_build(workload: Workload, options: Options, data: str) -> Result:
    lengths: Int32Array = workload.lengths[0].copy()
    index = make_index(workload, options, any_data=data != "text")
    slots = np.arange(workload.size.batch, dtype=np.int32)
    cores = provenance.machine()["cores"]
    per_token: dict[int, list[float]] = {1: [], cores: []}
    for number in range(-1, options.rounds):
        for threads, figures in per_token.items():
            index.reset(slots)
            _C.set_num_threads(threads)
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            append(workload.token_ids, lengths, index, options)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if number >= 0:
                figures.append((cpu if threads == 1 else wall) / workload.size.tokens)
    result: Result = {
        "size": str(workload.size),
        "batch": workload.size.batch,
        "context": workload.size.context,
        **_describe_index(options),
        "data": workload.describes,
        "data_kind": data,
        "rounds": options.rounds,
        "what": "_C.ngram_index_append_, presized, memory touched before",
        "build_ns_per_token": spread(per_token[1]),
        "bytes_per_token": round(index.statistics.bytes_in_use / workload.size.tokens, 2),
    }
    if "costs" not in options.ladder:  # outcome bytes cannot be distinguished from entries
        result["entries_per_token"] = round(count_entries(index) / workload.size.tokens, 2)
    if cores > 1:
        result["threaded_ns_per_token"] = {"threads": cores, **spread(per_token[cores])}
    return result


def measure_growth(size: Size, options: Options) -> Result:
    """Grows all rows from empty at the same length, by one to three tokens per step. A step's time
    is the least of three passes over the same tokens, so that only effects of the tokens remain."""
    workload = _make_workload(size, options, "text")
    batch = size.batch
    rng = np.random.default_rng(7)
    counts = rng.integers(1, 4, size.context // 3)
    ends = np.cumsum(counts)
    tokens = workload.token_ids
    fastest = np.full(len(counts), np.inf)
    _C.set_num_threads(1)
    for _ in range(3):
        index = make_index(workload, options, any_data=False)
        lengths = np.zeros(batch, np.int32)
        for step, (count, end) in enumerate(zip(counts, ends, strict=True)):
            sampled = np.ascontiguousarray(tokens[:, end - count : end])
            start = time.thread_time_ns()
            _C.ngram_index_step_(tokens, lengths, sampled, index.tensor, **options.lookup)
            fastest[step] = min(fastest[step], (time.thread_time_ns() - start) / 1e3)
    return {
        "size": f"{batch}x0-{int(ends[-1])}",
        "batch": batch,
        "context": int(ends[-1]),
        "config": [options.min_n, options.max_n],
        "match_policy": options.match_policy,
        "data": workload.describes,
        "growth_steps": len(counts),
        "growth_page_splits": index.statistics.page_splits,
        "growth_median_us": round_digits(float(np.median(fastest))),
        "growth_p99_us": round_digits(float(np.percentile(fastest, 99))),
        "growth_worst_us": round_digits(float(fastest.max())),
    }


def make_index(workload: Workload, options: Options, any_data: bool) -> NgramIndex:
    rows, capacity = workload.token_ids.shape
    return NgramIndex(
        rows,
        rows * capacity,
        min_n=options.lookup["min_n"],
        max_n=options.lookup["max_n"],
        sizes="ladder" if options.is_ladder else "consecutive",
        outcomes="costs" in options.ladder,
        any_data=any_data,
        prefault=True,
    )


def append(token_ids: Int32Array, lengths: Int32Array, index: NgramIndex, options: Options) -> None:
    lookup = {name: options.lookup[name] for name in ("min_n", "max_n", "match_policy")}
    outcomes = "costs" in options.ladder
    _C.ngram_index_append_(
        token_ids, lengths, index.tensor, **lookup, ladder=options.is_ladder, outcomes=outcomes
    )


def _describe_index(options: Options) -> dict[str, Any]:
    if options.is_ladder:
        return {"sizes": "ladder", "outcomes": "costs" in options.ladder}
    return {"config": [options.min_n, options.max_n], "match_policy": options.match_policy}


def count_unused_pages(words: Int32Array) -> int:
    """Returns the number of pages that were never used; they are at the end."""
    unused = _C.index_statistics(words)["num_pages"] - int(words[_C.INDEX_HEADER_UNUSED_PAGE])
    return max(0, unused)


def count_entries(index: NgramIndex) -> int:
    """Returns the words in use in pages: entries, and a few words of directories."""
    used_pages = int(index.tensor[_C.INDEX_HEADER_UNUSED_PAGE])
    start = len(index.tensor) - index.statistics.num_pages * _C.INDEX_PAGE_WORDS
    words = index.tensor[start : start + used_pages * _C.INDEX_PAGE_WORDS]
    return int(np.count_nonzero(words))
