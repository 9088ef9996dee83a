"""Measures ``propose()`` as vLLM's V1 engine calls it, with lists and counters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from ngram_npu import _C
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.engines.vllm.v1_sync import IndexedRows

from tools.bench.data import Workload
from tools.bench.measure import Drafts, Implementation
from tools.bench.ops.base import Maker, Op
from tools.bench.ops.index import count_unused_pages
from tools.bench.options import Options
from tools.bench.vllm_peer import VllmNumba, make_config, make_sampled_lists


class ProposerImplementation(Implementation):
    def __init__(self, workload: Workload, options: Options) -> None:
        self._workload = workload
        self._threads = options.threads
        self._sampled = make_sampled_lists(workload)
        config = make_config(options, workload.capacity, workload.size.batch)
        config.additional_config = {
            "ngram_npu": {
                "prompt_lookup_min": options.min_n,
                "prompt_lookup_max": options.max_n,
                "match_policy": options.match_policy,
                "engine": options.engine,
                "num_threads": options.threads,
            }
        }
        proposer = NgramProposer(config)
        self.function = proposer.propose
        self.detail = (
            f"NgramProposer.propose of vLLM's engine, engine: {options.engine}, "
            f"threads: at most {options.threads}, match_policy: {options.match_policy}"
        )
        self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)
        engine = proposer.engine
        self._engine = engine if isinstance(engine, IndexedRows) else None
        if self._engine is not None:
            self._prefill(self._engine)

    def _prefill(self, engine: IndexedRows) -> None:
        """Indexes the rows as a server does, in steps in which no row samples a token and a bounded
        number of tokens is indexed. Saves the index, which `reset` restores."""
        lengths, no_tokens = self._workload.lengths[0], [[]] * self._workload.size.batch
        for _ in range(int(lengths.sum()) // INDEX_POLICY.prefill_index_budget + 1):
            self.function(no_tokens, lengths, self._workload.token_ids)
        assert not engine._num_behind
        if engine.index is not None:  # None if the rows are so short that they are scanned
            self._save(engine)

    def _save(self, engine: IndexedRows) -> None:
        words = engine.index.tensor
        num_used = len(words) - count_unused_pages(words) * _C.INDEX_PAGE_WORDS
        self._saved = words[:num_used].copy(), copy.copy(engine._recognizer)

    def activate(self) -> None:
        _C.set_num_threads(self._threads)

    def reset(self) -> None:
        if self._engine is not None and self._engine.index is not None:
            words, recognizer = self._saved
            self._engine.index.tensor[: len(words)] = words
            self._engine._recognizer = copy.copy(recognizer)

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return (self._sampled[step], self._workload.lengths[step + 1], self._workload.token_ids)

    def get_drafts(self, result: Any) -> Drafts:
        return [list(draft) for draft in result]


class CatchingUpImplementation(ProposerImplementation):
    def _prefill(self, engine: IndexedRows) -> None:
        """Indexes nothing before drafting begins, as if all prompts were in the prefix cache. Only
        creates the index, so that its creation is not timed."""
        engine._make_index()
        self._save(engine)


class VllmPropose(Op):
    name = "vllm-propose"
    help = "the proposer class as vLLM's engine calls it, compared with vLLM's proposer"
    sizes = ("1x1k", "32x1k", "128x1k", "128x8k", "128x32k", "256x128k")
    peers = ("vllm-numba", "ours:engine=scan")
    engines = ("index", "scan")
    peer_makers: ClassVar[Mapping[str, Maker]] = {"vllm-numba": VllmNumba}

    make = ProposerImplementation


class VllmCatchUp(VllmPropose):
    name = "vllm-catch-up"
    help = "the proposer class while it indexes prompts of the prefix cache, compared with the scan"
    sizes = ("1x128k", "8x64k", "32x16k", "128x1k", "128x4k", "128x8k", "128x32k")
    peers = ("ours:engine=scan",)

    make = CatchingUpImplementation
