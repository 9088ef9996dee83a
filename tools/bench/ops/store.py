"""A step of requests that share a store, against one without a store and suffix decoding."""

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

LEAST_PROBABILITY = 2 ** (-40 / 16)
STORE_TOKENS = 1_000_000
OTHER_TEXT = 1000
"""Tokens of a text that fills a store."""
Visibility = Literal["live", "finish"]


class ProposerStep(Contestant):
    """`NgramProposer.step` on arrays. A store holds the rows' tokens, and is full."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        visibility: Visibility | None,
        store_tokens: int = STORE_TOKENS,
    ) -> None:
        config = NgramConfig(
            sizes="ladder", k=options.k, min_draft_probability=LEAST_PROBABILITY, store=visibility
        )
        rows, capacity = workload.token_ids.shape
        store = NgramStore(rows, store_tokens, visibility=visibility) if visibility else None
        self._workload = workload
        self._token_ids = workload.token_ids.copy()
        self._num_tokens = workload.lengths[0].copy()
        proposer = NgramProposer(config, "index", token_capacity=rows * capacity, store=store)
        proposer.append(self._token_ids, self._num_tokens)
        self._proposer, self._slots = proposer, np.arange(rows, dtype=np.int32)
        self.entered: list[float] = []
        """Time of ending all requests, in nanoseconds per token."""
        if store:
            # Text that the rows do not have fills what they leave.
            rng, rest = np.random.default_rng(1), max(0, store_tokens - token_ids_in(workload))
            for _ in range(rest // OTHER_TEXT):
                store.warm([rng.integers(0, VOCAB_SIZE, OTHER_TEXT)])
            pairs = zip(self._token_ids, self._num_tokens.tolist(), strict=True)
            store.warm(row[:length] for row, length in pairs)
        self.function = proposer.step
        self.detail = f"NgramProposer.step, store: {visibility}"

    def reset(self) -> None:
        self._num_tokens[:] = self._workload.lengths[0]
        # Otherwise the index would take the rows in again step by step, each up to a limit.
        self._proposer.append(self._token_ids, self._num_tokens)
        if (store := self._proposer.store) is not None:
            before, started = store.statistics.tokens_entered, time.thread_time_ns()
            store.finish(self._slots)
            took = time.thread_time_ns() - started
            if entered := store.statistics.tokens_entered - before:
                self.entered.append(took / entered)

    def arguments(self, step: int) -> tuple[Any, ...]:
        return (self._token_ids, self._num_tokens, self._workload.sampled[step])


def token_ids_in(workload: Workload) -> int:
    return int(workload.lengths[0].sum())


class ArcticGlobalStep(ArcticStep):
    """With an additional tree that all rows share and that holds their tokens."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._shared = self._new_tree(DEPTH)
        for number, (row, length) in enumerate(
            zip(workload.token_ids, workload.lengths[0].tolist(), strict=True)
        ):
            self._shared.extend_ndarray(number, row[:length])
        self.detail = GLOBAL_DETAIL

    def _draft(self, requests: list[tuple[Any, ...]]) -> list[Any]:
        shared, limits = self._shared, (FACTOR, OFFSET, PROBABILITY, False)
        drafts = []
        for number, (extend, new, speculate, context) in enumerate(requests):
            extend(0, new)
            shared.extend_ndarray(number, new)
            own = speculate(context, self._k, *limits)
            others = shared.speculate_ndarray(context, self._k, *limits)
            drafts.append(own if own.score >= others.score else others)
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
        "store": f"{STORE_TOKENS} tokens, full, warm with what the rows hold",
        "finish": "the ends of requests are not in a step's time; finish_ns_per_token has them",
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        return ProposerStep(workload, options, None)

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        result = super().compare(contestants, workload, options)
        for contestant in contestants:
            if contestant.name == "finish":
                result["finish_ns_per_token"] = round(float(np.median(contestant.entered)), 1)
        return result
