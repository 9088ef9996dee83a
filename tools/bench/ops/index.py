"""Lookups from the index: a step against rescans of all kinds, and the cost of building it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from ngram_npu import _C, NgramIndex
from ngram_npu.config import ANY_TOKEN

from tools.bench import provenance, stats
from tools.bench.arctic_peer import ArcticStep
from tools.bench.data import Int32Array, Workload, make_workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.ops.lookup import ReadPass, StepContestant
from tools.bench.options import MATCH_POLICY_CODES, Options, Size
from tools.bench.vllm_peer import VllmNumba


class IndexStepContestant(StepContestant):
    """A step answered from an index of all rows, which were indexed beforehand."""

    op = "ngram_index_step_"
    before_lookup = (None, None, None, True, ANY_TOKEN)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        index = _presized(workload, options, any_data=options.data_kind != "text")
        words = index.tensor
        _append(workload.token_ids, self._own_lengths, index, options)
        # Contexts that went back to their base lengths would have to be indexed again: restoring a
        # copy of the index is faster, and gives each lap the same work.
        used = len(words) - pages_after(words) * _C.INDEX_PAGE_WORDS
        self._words, self._saved = words, words[:used].copy()
        self.index = index
        self._tensor = self._array(words)

    def reset(self) -> None:
        super().reset()
        self._words[: len(self._saved)] = self._saved

    def arguments(self, step: int) -> tuple[Any, ...]:
        tokens, lengths, sampled, *tail = super().arguments(step)
        return (tokens, lengths, sampled, self._tensor, *tail)


class NgramIndexStep(Op):
    name = "ngram_index_step_"
    help = "append what was sampled, then draft from the index"
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
    help = "memory that an index holds for each token"
    sizes = ("128x1k", "128x8k", "128x32k")
    unused_settings = frozenset({"config", "k", "match_policy", "threads", "rounds", "device"})

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for size in self.sizes_of(options):
            workload = _workload(size, options, options.data_kind)
            for name, changes in {"2 to 5": "min_n=2,max_n=5", **LADDERS}.items():
                chosen = options.changed(changes)
                index = _presized(workload, chosen, any_data=options.data_kind != "text")
                _append(workload.token_ids, workload.lengths[0].copy(), index, chosen)
                used = index.statistics.bytes_in_use
                yield {
                    "size": str(size),
                    "context": size.context,
                    "variant": name,
                    **_index_of(chosen),
                    "bytes_per_token": round(used / size.tokens, 2),
                    "data": workload.describes,
                }


class IndexBuild(Op):
    """Times a single thread by its CPU time, which other processes disturb less."""

    name = "index-build"
    help = "indexing whole rows, per token; memory held; growth step by step"
    sizes = ("128x32k",)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        for size in self.sizes_of(options):
            for data in DATA:
                workload = _workload(size, options, data)
                for config in ((2, 4), (2, 5)):
                    for match_policy in MATCH_POLICY_CODES:
                        chosen = replace(
                            options, min_n=config[0], max_n=config[1], match_policy=match_policy
                        )
                        yield build(workload, chosen, data)
            yield _grow(size, options)
            for data in DATA:
                workload = _workload(size, options, data)
                for ladder in LADDERS.values():
                    yield build(workload, options.changed(ladder), data)


def _workload(size: Size, options: Options, data: str) -> Workload:
    """``random-128``: so few ids that most pairs of them occur twice or more, which needs the most
    entries."""
    workload = make_workload(size, replace(options, data_kind=data.partition("-")[0]))
    if data == "random-128":
        workload.token_ids %= 128
        workload.describes = {"kind": data, "source": "uniform over 128 ids"}
    return workload


def build(workload: Workload, options: Options, data: str) -> Result:
    lengths: Int32Array = workload.lengths[0].copy()
    index = _presized(workload, options, any_data=data != "text")
    slots = np.arange(workload.size.batch, dtype=np.int32)
    several = provenance.machine()["cores"]
    per_token: dict[int, list[float]] = {1: [], several: []}
    for number in range(-1, options.rounds):
        for threads, figures in per_token.items():
            index.reset(slots)
            _C.set_num_threads(threads)
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            _append(workload.token_ids, lengths, index, options)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if number >= 0:
                figures.append((cpu if threads == 1 else wall) / workload.size.tokens)
    held = index.statistics
    result: Result = {
        "size": str(workload.size),
        "batch": workload.size.batch,
        "context": workload.size.context,
        **_index_of(options),
        "data": workload.describes,
        "data_kind": data,
        "rounds": options.rounds,
        "what": "_C.ngram_index_append_, presized and touched before",
        "build_ns_per_token": stats.spread(per_token[1]),
        "bytes_per_token": round(held.bytes_in_use / workload.size.tokens, 2),
    }
    if "costs" not in options.ladder:  # their bytes cannot be told from entries
        result["entries_per_token"] = round(_entries(index) / workload.size.tokens, 2)
    if several > 1:
        result["threaded_ns_per_token"] = {"threads": several, **stats.spread(per_token[several])}
    return result


def _grow(size: Size, options: Options) -> Result:
    """All rows grow from empty at the same length, by one to three tokens per step. A step's time
    is the least of three passes over the same tokens: effects of the tokens show in all passes."""
    workload = _workload(size, options, "text")
    batch, context = size.batch, size.context
    rng = np.random.default_rng(7)
    counts = rng.integers(1, 4, context // 3)
    ends = np.cumsum(counts)
    tokens = workload.token_ids
    least = np.full(len(counts), np.inf)
    splits = 0
    _C.set_num_threads(1)
    for _ in range(3):
        index = _presized(workload, options, any_data=False)
        lengths = np.zeros(batch, np.int32)
        for step, (count, end) in enumerate(zip(counts, ends, strict=True)):
            sampled = np.ascontiguousarray(tokens[:, end - count : end])
            start = time.thread_time_ns()
            _C.ngram_index_step_(tokens, lengths, sampled, index.tensor, **options.lookup)
            least[step] = min(least[step], (time.thread_time_ns() - start) / 1e3)
        splits = index.statistics.page_splits
    return {
        "size": f"{batch}x0-{int(ends[-1])}",
        "batch": batch,
        "context": int(ends[-1]),
        "config": [options.min_n, options.max_n],
        "match_policy": options.match_policy,
        "data": workload.describes,
        "growth_steps": len(counts),
        "growth_page_splits": splits,
        "growth_median_us": stats.rounded(float(np.median(least))),
        "growth_p99_us": stats.rounded(float(np.percentile(least, 99))),
        "growth_worst_us": stats.rounded(float(least.max())),
    }


def _presized(workload: Workload, options: Options, any_data: bool) -> NgramIndex:
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


def _index_of(options: Options) -> dict[str, Any]:
    """An index's contents, for the record."""
    if options.is_ladder:
        return {"sizes": "ladder", "outcomes": "costs" in options.ladder}
    return {"config": [options.min_n, options.max_n], "match_policy": options.match_policy}


def _append(
    token_ids: Int32Array, lengths: Int32Array, index: NgramIndex, options: Options
) -> None:
    lookup = {name: options.lookup[name] for name in ("min_n", "max_n", "match_policy")}
    _C.ngram_index_append_(
        token_ids,
        lengths,
        index.tensor,
        **lookup,
        ladder=options.is_ladder,
        outcomes="costs" in options.ladder,
    )


def pages_after(words: Int32Array) -> int:
    """Number of pages that were never used; they lie at the end."""
    unused = _C.index_statistics(words)["num_pages"] - int(words[_C.INDEX_HEADER_UNUSED_PAGE])
    return max(0, unused)


def _entries(index: NgramIndex) -> int:
    """Words in use in pages: entries, and a few words of directories."""
    held = int(index.tensor[_C.INDEX_HEADER_UNUSED_PAGE])
    pages = index.statistics.num_pages
    at = len(index.tensor) - pages * _C.INDEX_PAGE_WORDS
    return int(np.count_nonzero(index.tensor[at : at + held * _C.INDEX_PAGE_WORDS]))
