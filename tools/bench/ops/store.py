"""A step of requests that share a store, compared with one without a store and suffix decoding."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from ngram_npu import NgramConfig, NgramProposer, NgramStore

from tools.bench.arctic_peer import DEPTH, FACTOR, GLOBAL_DETAIL, OFFSET, PROBABILITY, ArcticStep
from tools.bench.data import VOCAB_SIZE, Workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Make, Op, Result
from tools.bench.options import Options

MIN_DRAFT_PROBABILITY = 2 ** (-40 / 16)
STORE_TOKENS = 1_000_000
FILLER_TOKENS = 1000
"""Tokens of each text that fills a store."""
Visibility = Literal["live", "finish"]


class ProposerStep(Contestant):
    """`NgramProposer.step` on arrays. A store contains the rows' tokens and is full."""

    def __init__(self, workload: Workload, options: Options, visibility: Visibility | None) -> None:
        config = NgramConfig(
            sizes="ladder",
            k=options.k,
            min_draft_probability=MIN_DRAFT_PROBABILITY,
            store=visibility,
        )
        rows, capacity = workload.token_ids.shape
        store = NgramStore(rows, STORE_TOKENS, visibility=visibility) if visibility else None
        self._workload = workload
        self._token_ids = workload.token_ids.copy()
        self._num_tokens = workload.lengths[0].copy()
        proposer = NgramProposer(config, "index", token_capacity=rows * capacity, store=store)
        proposer.append(self._token_ids, self._num_tokens)
        self._proposer, self._slots = proposer, np.arange(rows, dtype=np.int32)
        self.ns_per_finished_token: list[float] = []
        """Time of ending all requests."""
        if store:
            # Text that is in no row fills the remaining capacity.
            rng = np.random.default_rng(1)
            filler = max(0, STORE_TOKENS - int(workload.lengths[0].sum()))
            for _ in range(filler // FILLER_TOKENS):
                store.warm([rng.integers(0, VOCAB_SIZE, FILLER_TOKENS)])
            pairs = zip(self._token_ids, self._num_tokens.tolist(), strict=True)
            store.warm(row[:length] for row, length in pairs)
        self.function = proposer.step
        self.detail = f"NgramProposer.step, store: {visibility}"

    def reset(self) -> None:
        self._num_tokens[:] = self._workload.lengths[0]
        # Without this, the index would catch up step by step, each up to a limit.
        self._proposer.append(self._token_ids, self._num_tokens)
        if (store := self._proposer.store) is not None:
            before, start = store.statistics.tokens_entered, time.thread_time_ns()
            store.finish(self._slots)
            elapsed = time.thread_time_ns() - start
            if entered := store.statistics.tokens_entered - before:
                self.ns_per_finished_token.append(elapsed / entered)

    def arguments(self, step: int) -> tuple[Any, ...]:
        return (self._token_ids, self._num_tokens, self._workload.sampled[step])


class ArcticGlobalStep(ArcticStep):
    """With an additional tree that all rows share and that contains their tokens."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._shared = self._new_tree(DEPTH)
        lengths = workload.lengths[0].tolist()
        for number, (row, length) in enumerate(zip(workload.token_ids, lengths, strict=True)):
            self._shared.extend_ndarray(number, row[:length])
        self.detail = GLOBAL_DETAIL

    def _draft(self, requests: list[tuple[Any, ...]]) -> list[Any]:
        shared, limits = self._shared, (FACTOR, OFFSET, PROBABILITY, False)
        drafts = []
        for number, (extend, new, speculate, context) in enumerate(requests):
            extend(0, new)
            shared.extend_ndarray(number, new)
            own_draft = speculate(context, self._k, *limits)
            shared_draft = shared.speculate_ndarray(context, self._k, *limits)
            drafts.append(own_draft if own_draft.score >= shared_draft.score else shared_draft)
        return drafts


class StoreStep(Op):
    name = "store-step"
    help = "a step of requests that share a store; ours: the same without one"
    sizes = ("128x8k",)
    peers = ("live", "finish", "arctic-global")
    engines = ("index",)
    unused_settings = frozenset({"config", "match_policy", "device"})
    peer_makers: ClassVar[Mapping[str, Make]] = {
        "live": lambda workload, options: ProposerStep(workload, options, "live"),
        "finish": lambda workload, options: ProposerStep(workload, options, "finish"),
        "arctic-global": ArcticGlobalStep,
    }
    assumptions: Mapping[str, Any] = {
        "store": f"{STORE_TOKENS} tokens, full, warmed with the rows' text",
        "finish": "a step's time excludes the ends of requests; finish_ns_per_token has them",
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        return ProposerStep(workload, options, None)

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        result = super().compare(contestants, workload, options)
        for contestant in contestants:
            if contestant.name == "finish":
                median = float(np.median(contestant.ns_per_finished_token))
                result["finish_ns_per_token"] = round(median, 1)
        return result
