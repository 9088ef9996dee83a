"""Measures lookups from the index, compared with scans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ngram_npu import _C, NgramIndex
from ngram_npu.config import ANY_TOKEN

from tools.bench.data import Int32Array, Workload
from tools.bench.device_peers import TokenReader
from tools.bench.measure import Implementation
from tools.bench.ops.base import Maker, Op
from tools.bench.ops.lookup import StepImplementation
from tools.bench.options import Options
from tools.bench.vllm_peer import VllmNumba


class IndexStepImplementation(StepImplementation):
    """A step with an index that already contains all rows."""

    op = "ngram_index_step_"
    leading_arguments = (None, None, None, True, ANY_TOKEN)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        rows, capacity = workload.token_ids.shape
        lookup = {name: options.lookup[name] for name in ("min_n", "max_n")}
        has_outcomes = "costs" in options.ladder
        index = NgramIndex(
            rows,
            rows * capacity,
            **lookup,
            sizes="ladder" if options.is_ladder else "consecutive",
            outcomes=has_outcomes,
            any_data=options.data_kind != "text",
            prefault=True,
        )
        words = index.tensor
        _C.ngram_index_append_(
            workload.token_ids,
            self._own_lengths,
            words,
            **lookup,
            match_policy=options.lookup["match_policy"],
            ladder=options.is_ladder,
            outcomes=has_outcomes,
        )
        # After a reset to the initial lengths, the rows would have to be indexed again. Restoring a
        # copy of the index is faster, and the steps do the same work after each reset.
        num_used = len(words) - count_unused_pages(words) * _C.INDEX_PAGE_WORDS
        self._words, self._saved_words = words, words[:num_used].copy()
        self.index = index
        self._tensor = self._convert(words)

    def reset(self) -> None:
        super().reset()
        self._words[: len(self._saved_words)] = self._saved_words

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        tokens, lengths, sampled, *lookup = super().get_arguments(step)
        return (tokens, lengths, sampled, self._tensor, *lookup)


class NgramIndexStep(Op):
    name = "ngram_index_step_"
    help = "append the sampled tokens, then draft from the index"
    sizes = ("128x1k", "128x32k", "128x128k", "256x128k")
    peers = ("vllm-numba", "ours:engine=scan")
    engines = ("index", "scan")
    peer_makers: ClassVar[Mapping[str, Maker]] = {"vllm-numba": VllmNumba, "read": TokenReader}

    def make(self, workload: Workload, options: Options) -> Implementation:
        if options.engine == "scan":
            return StepImplementation(workload, options)
        return IndexStepImplementation(workload, options)


def count_unused_pages(words: Int32Array) -> int:
    """Returns the number of pages at the end of the index that were never used."""
    num_unused = _C.index_statistics(words)["num_pages"] - int(words[_C.INDEX_HEADER_UNUSED_PAGE])
    return max(0, num_unused)
