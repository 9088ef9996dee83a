"""The two ways to find drafts in vLLM's token buffer: with a scan or with an index."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ngram_npu import _C, drafting
from ngram_npu.config import SCANNED_TOKENS, SHORT_CONTEXT, NgramConfig
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.sharing import SharedStore

Int32Array = npt.NDArray[np.int32]

MOST_TOKENS = 1 << 26
"""Capacity of an index in tokens if the KV cache's capacity is not known."""

PROMPT_TOKENS_PER_STEP = 32768
"""Indexed in a step in which all rows prefill, which takes much longer than this millisecond."""

LEAST_TOKENS_PER_STEP = 16
"""Indexed at least, in every step with tokens to index: takes less than a microsecond."""

STEPS_TO_CATCH_UP = 4
"""While no row can be looked up yet, one of this many steps indexes for all of them: most of the
additional time is for the call, not for the tokens."""

PATIENCE = 64
"""While memory is half used, a request keeps its index for this many steps without being in the
batch: it may still run (in another micro-batch, or the token budget was too small for it)."""


class ScanEngine:
    """By a scan of each whole row at every step. It keeps no state, so rows may change to other
    requests."""

    name = "scan"
    store: SharedStore | None = None

    def __init__(self, config: NgramConfig) -> None:
        self._drafting = Drafting(config, kind="numpy")

    @property
    def index(self) -> NgramIndex | None:
        return self._drafting.index

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> Drafts[Any]:
        """Up to ``k`` draft tokens for each of B rows that has sampled tokens. With ``k`` = 0 an
        index is updated all the same."""
        return self._drafting.propose(
            token_ids, num_tokens, num_sampled=num_sampled, k=k, scan=True
        )


class IndexEngine(ScanEngine):
    """With an index of each request's tokens; a step with few tokens is scanned.

    A request keeps its slot when its row moves (``_C.RowRecognizer``). Slots of absent requests are
    kept, because preempted requests come back: all of them while half of the memory is free, then
    only recent ones, and none when memory is nearly full. The first draft makes the index, because
    vLLM then knows how many tokens its KV cache holds.
    """

    name = "index"

    def __init__(self, vllm_config: Any, options: Options) -> None:
        super().__init__(options.ngram)
        self._options = options
        self._is_ladder = options.ngram.is_ladder
        self._cache_config: Any = getattr(vllm_config, "cache_config", None)
        # Ranks that share a block (context parallelism).
        self._context_ranks = getattr(
            vllm_config.parallel_config, "decode_context_parallel_size", 1
        )
        self._slots = 2 * options.max_num_seqs
        self._rows = _C.RowRecognizer(self._slots)
        self._behind = 0  # rows whose tokens are not all indexed
        if options.ngram.store is not None:
            self.store = SharedStore(vllm_config, options, self._slots, "numpy")
        self._steps = 0

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> Drafts[Any]:
        self._steps += 1
        steps = 1
        if not self._is_ladder:
            few = max(SCANNED_TOKENS, SCANNED_TOKENS // 128 * len(num_tokens))
            if np.add.reduce(num_tokens) <= few:  # half of what sum() takes
                return super().draft(token_ids, num_tokens, num_sampled, k)
            if self._behind == len(num_tokens) and num_sampled[0] > 0:
                if self._steps % STEPS_TO_CATCH_UP:
                    return super().draft(token_ids, num_tokens, num_sampled, k)
                steps = STEPS_TO_CATCH_UP
        index = self._drafting.index or self._make_index()
        of_requests, new = self._rows.assign(token_ids, num_tokens, num_sampled)
        self._forget_absent(index)
        if len(new):
            self._drafting.end(of_requests[new])
            self._behind = len(new)
        slots = of_requests
        if self._behind:
            config = self._options.ngram
            slots, self._behind = _C.index_catch_up(
                token_ids,
                num_tokens,
                index.tensor,
                slots,
                num_sampled,
                LEAST_TOKENS_PER_STEP,
                PROMPT_TOKENS_PER_STEP,
                config.min_n,
                config.max_n,
                config.match_policy_code,
                config.is_ladder,
                config.cost_limit is not None,
                steps,
            )
            if self._behind == len(num_tokens) and not config.is_ladder:
                return super().draft(token_ids, num_tokens, num_sampled, k)
        return self._drafting.propose(
            token_ids,
            num_tokens,
            num_sampled=num_sampled,
            slot_indices=slots,
            store_slots=of_requests,
            k=k,
        )

    def _forget_absent(self, index: NgramIndex) -> None:
        """Frees the slots of absent requests when memory runs low. vLLM does not tell which
        requests have finished, so with ``"finish"`` a store takes absent ones as finished."""
        share = index.share_in_use
        ends = self.store is not None and self.store.held.visibility == "finish"
        if share > 0.5 or (ends and self._steps % PATIENCE == 0):
            self._drafting.end(self._rows.forget_absent(0 if share > 0.9 else PATIENCE))

    def _make_index(self) -> NgramIndex:
        blocks = getattr(self._cache_config, "num_gpu_blocks", None)
        cached = blocks and blocks * self._cache_config.block_size * self._context_ranks
        index = index_for(self._options, self._slots, "numpy", cached or MOST_TOKENS)
        store = None if self.store is None else self.store.held
        self._drafting = Drafting(self._options.ngram, kind="numpy", index=index, store=store)
        return index


def takes_index(options: Options, device_type: str = "cpu") -> bool:
    """:func:`ngram_npu.drafting.takes_index` for rows as long as the model's.

    Raises:
        ValueError: an index or a ladder on a device other than the CPU.
    """
    return drafting.takes_index(
        options.ngram,
        options.engine,
        capacity=options.max_model_len,
        short=SHORT_CONTEXT,
        device_type=device_type,
        says="ngram_npu: ",
    )


def drafts_on_host(options: Options, device_type: str) -> bool:
    """Whether the V2 runner's drafts are made on the host: ``auto`` does so for a store, which is
    nowhere else, and where the rows are on the host too and an index pays.

    Raises:
        ValueError: what is asked for is not on the device; one line.
    """
    if options.draft_on == "host":
        return True
    store = options.ngram.store is not None
    if options.draft_on == "auto" and (store or device_type == "cpu"):
        return store or takes_index(options, device_type)
    try:
        if store:
            raise ValueError("ngram_npu: store: expected none on the device")
        return takes_index(options, "the device")
    except ValueError as error:
        raise ValueError(f"{error}; draft_on='host' drafts there") from None


def index_for(
    options: Options,
    slots: int,
    kind: Literal["numpy", "torch"],
    most_tokens: int = MOST_TOKENS,
) -> NgramIndex:
    """An index for all requests of a batch, but of at most ``most_tokens`` tokens."""
    tokens = min(options.max_num_seqs * options.max_model_len, most_tokens)
    return make_index(options.ngram, slots, tokens, kind=kind)
