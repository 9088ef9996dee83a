"""The two ways to find drafts in vLLM's token buffer: with a scan or with an index."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngram_npu import _C
from ngram_npu.config import SHORT_CONTEXT, NgramConfig
from ngram_npu.index import cost_table, make_index
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.sharing import SharedStore

Int32Array = npt.NDArray[np.int32]

MOST_TOKENS = 1 << 26
"""Capacity of an index in tokens if the KV cache's capacity is not known."""

PROMPT_TOKENS_PER_STEP = 32768
"""Indexed in a step in which all rows prefill, which takes much longer than the millisecond for
indexing."""

LEAST_TOKENS_PER_STEP = 16
"""Indexed at least, in every step with tokens to index: takes less than a microsecond."""

STEPS_TO_CATCH_UP = 4
"""While no row can be looked up yet, one of this many steps indexes for all of them: most of the
additional time is for the call, not for the tokens."""

SCANNED_TOKENS = 3 << 17
"""A step is scanned if its rows have at most this many tokens together, or 1/128 of it each: the
index would not be faster."""

PATIENCE = 64
"""While memory is half used, a request keeps its index for this many steps without being in the
batch: it may still run (pipeline parallelism runs another micro-batch, or the step's token budget
was too small for it)."""


class Engine(Protocol):
    """Drafts for the rows of vLLM's token buffer."""

    name: str
    store: SharedStore | None

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Drafts up to ``k`` tokens for each row with sampled tokens.

        Args:
            token_ids: [B, max_model_len], the live rows with the sampled tokens.
            num_tokens: [B], their lengths.
            num_sampled: [B], number of tokens that this step sampled; 0: the row is still in
                prefill and gets no draft.
            k: 0: no drafts; an index is updated all the same.

        Returns:
            Drafts [B, >= k], their lengths [B], the lengths of their matches [B].
        """

    def rows_indexed(self) -> int:
        """Rows answered from an index, summed over all drafts so far."""


class ScanEngine:
    """Scans each whole row at every step. It keeps no state between steps, so rows may change to
    other requests."""

    name = "scan"
    store: SharedStore | None = None

    def __init__(self, config: NgramConfig) -> None:
        self._lookup = config.lookup_arguments

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        if k < 1:
            none = np.zeros(len(num_tokens), np.int32)
            return np.empty((len(num_tokens), 0), np.int32), none, none
        self._lookup["k"] = k
        return _C.ngram_propose(token_ids, num_tokens, num_sampled=num_sampled, **self._lookup)

    def rows_indexed(self) -> int:
        return 0


class IndexEngine:
    """Reads only the new tokens of each row, and looks drafts up in an index of each request's
    tokens; a step with few tokens is scanned.

    A request keeps its slot of the index when its row moves (``_C.RowRecognizer``). Slots of absent
    requests are kept, because preempted requests come back: all of them while half of the memory is
    free, then only recent ones, and none when memory is nearly full. The first draft makes the
    index, because vLLM then knows how many tokens its KV cache holds.
    """

    name = "index"

    def __init__(self, options: Options, cache_config: Any, context_ranks: int) -> None:
        self._options = options
        self._scan = ScanEngine(options.ngram)
        self._lookup = options.ngram.lookup_arguments
        self._is_ladder = options.ngram.is_ladder
        self._catching_up = (
            LEAST_TOKENS_PER_STEP,
            PROMPT_TOKENS_PER_STEP,
            options.ngram.min_n,
            options.ngram.max_n,
            options.ngram.match_policy_code,
            self._is_ladder,
        )
        self._cache_config = cache_config
        self._context_ranks = context_ranks  # ranks that share a block (context parallelism)
        self._rows = _C.RowRecognizer(2 * options.max_num_seqs)
        self._behind = 0  # rows whose tokens are not all indexed
        self.index: Any = None
        self.store: SharedStore | None = None
        if options.ngram.store is not None:
            self.store = SharedStore(options, 2 * options.max_num_seqs, "numpy")
        self._steps = 0

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        self._steps += 1
        steps = 1
        if not self._is_ladder:
            few = max(SCANNED_TOKENS, SCANNED_TOKENS // 128 * len(num_tokens))
            if np.add.reduce(num_tokens) <= few:  # half of what sum() takes
                return self._scan.draft(token_ids, num_tokens, num_sampled, k)
            if self._behind == len(num_tokens) and num_sampled[0] > 0:
                if self._steps % STEPS_TO_CATCH_UP:
                    return self._scan.draft(token_ids, num_tokens, num_sampled, k)
                steps = STEPS_TO_CATCH_UP
        if self.index is None:
            self.index = self._make_index()
            self._lookup |= cost_arguments(self._options, self.index)
        slots, new = self._rows.assign(token_ids, num_tokens, num_sampled)
        self._forget_absent()
        if len(new):
            self._end(slots[new])
            self._behind = len(new)
        of_requests = slots
        if self._behind:
            slots, self._behind = _C.index_catch_up(
                token_ids,
                num_tokens,
                self.index.tensor,
                slots,
                num_sampled,
                *self._catching_up,
                "costs" in self._lookup,
                steps,
            )
            if self._behind == len(num_tokens) and not self._is_ladder:
                return self._scan.draft(token_ids, num_tokens, num_sampled, k)
        self._lookup["k"] = max(k, 1)
        if self.store is not None:
            self._lookup["draft_costs"] = np.empty((len(num_tokens), max(k, 1)), np.uint8)
        found = _C.ngram_index_propose_(
            token_ids,
            num_tokens,
            self.index.tensor,
            slot_indices=slots,
            num_sampled=num_sampled,
            **self._lookup,
        )
        if self.store is not None:
            self.store.step(
                _C.ngram_store_step_,
                (token_ids, num_tokens, num_sampled),
                found,
                self._lookup["draft_costs"],
                slot_indices=of_requests,
            )
        drafts, counts, match_len = found
        return drafts, counts if k > 0 else np.zeros_like(counts), match_len

    def _forget_absent(self) -> None:
        """Frees the slots of absent requests when memory runs low. vLLM does not tell which
        requests have finished, so with ``"finish"`` a store takes absent ones as finished."""
        share = self.index.share_in_use
        ends = self.store is not None and self.store.held.visibility == "finish"
        if share > 0.5 or (ends and self._steps % PATIENCE == 0):
            self._end(self._rows.forget_absent(0 if share > 0.9 else PATIENCE))

    def _end(self, slots: Int32Array) -> None:
        """Frees the slots of absent requests."""
        self.index.reset(slots)
        if self.store is not None:
            self.store.held.finish(slots)

    def rows_indexed(self) -> int:
        return 0 if self.index is None else self.index.statistics.rows_indexed

    def _make_index(self) -> Any:
        blocks = getattr(self._cache_config, "num_gpu_blocks", None)
        cached = MOST_TOKENS
        if blocks:
            cached = blocks * self._cache_config.block_size * self._context_ranks
        return index_for(self._options, 2 * self._options.max_num_seqs, most_tokens=cached)


def make_engine(options: Options, cache_config: Any, context_ranks: int) -> Engine:
    """The engine that the options ask for."""
    if takes_index(options):
        return IndexEngine(options, cache_config, context_ranks)
    return ScanEngine(options.ngram)


def takes_index(options: Options, device_type: str = "cpu") -> bool:
    """Whether to use an index. ``auto``: if an index is possible and faster, and not on a GPU,
    where it was not measured. A ladder always needs one.

    Raises:
        ValueError: a ladder on a device that does not support it.
    """
    if options.ngram.is_ladder:
        if device_type != "cpu":
            raise ValueError(
                f"ngram_npu: sizes: expected 'consecutive' on {device_type}, got 'ladder'"
            )
        return True
    if options.engine != "auto":
        return options.engine == "index"
    pays = options.max_model_len > SHORT_CONTEXT
    return device_type == "cpu" and options.ngram.fits_index and pays


def index_for(
    options: Options, slots: int, device: Any = None, most_tokens: int = MOST_TOKENS
) -> Any:
    """A numpy ``NgramIndex``, or the index for a runner on ``device`` (a ``torch.device``)."""
    tokens = min(options.max_num_seqs * options.max_model_len, most_tokens)
    kind = "numpy" if device is None else "torch"
    return make_index(options.ngram, slots, tokens, kind=kind, device=device)


def cost_arguments(options: Options, index: Any) -> dict[str, Any]:
    """Keyword arguments of a lookup in ``index`` for drafts that end by their cost."""
    costs = cost_table(options.ngram, index.tensor)
    return {} if costs is None else {"costs": costs}
