"""Contains the drafters for vLLM's synchronous V1 runner: ``method="custom_class"`` and
``"ngram"``.

These drafters do not use torch: the runner's token buffer is a numpy array, and drafts are returned
as lists. Drafts are found by a scan of the rows or with an index.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ngram_npu._C as _C
from ngram_npu.config import INDEX_POLICY, NgramConfig
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.engines.vllm.feed.insertion import make_host_inserter
from ngram_npu.engines.vllm.options import Method, Options, read_options
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.sharing import SharedStore
from ngram_npu.engines.vllm.stats import Stats, log_start
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.store import Kind
from ngram_npu.tensors import Int32Array

MAX_INDEX_TOKENS = 1 << 26
"""Maximum capacity of an index in tokens if the capacity of the KV cache is not known."""


def index_for(
    options: Options, slots: int, kind: Kind, max_tokens: int = MAX_INDEX_TOKENS
) -> NgramIndex:
    """Returns an index for the tokens of all requests of a batch, at most ``max_tokens`` tokens."""
    tokens = min(options.max_num_seqs * options.max_model_len, max_tokens)
    return make_index(options.ngram, slots, tokens, kind=kind)


class ScannedRows:
    """Scans every row completely in each step. It keeps no state, so rows may change requests."""

    store: SharedStore | None = None

    def __init__(self, config: NgramConfig) -> None:
        self._drafting = Drafting(config, kind="numpy")

    @property
    def index(self) -> NgramIndex | None:
        return self._drafting.index

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> Drafts[Any]:
        """Drafts up to ``k`` tokens for each of B rows that sampled tokens. With ``k`` = 0 the
        index and the store are still updated."""
        return self._drafting.propose(
            token_ids, num_tokens, num_sampled=num_sampled, k=k, scan=True
        )


class IndexedRows(ScannedRows):
    """Keeps an index of each request's tokens. The rows of a step with few tokens are scanned.

    A request keeps its slot when it moves to another row (``_C.RowRecognizer``). Absent requests
    keep their slots too, because preempted requests return: all absent requests while half of the
    memory is free, then only those that were absent for few steps, and none when memory is nearly
    full. The first draft creates the index, because vLLM then knows the capacity of its KV cache.
    """

    def __init__(self, vllm_config: Any, options: Options) -> None:
        super().__init__(options.ngram)
        self._options, config = options, options.ngram
        self._is_ladder = config.is_ladder
        sizes, outcomes = (config.min_n, config.max_n), config.cost_limit is not None
        self._index_arguments = *sizes, config.match_policy_code, config.is_ladder, outcomes
        self._cache_config: Any = getattr(vllm_config, "cache_config", None)
        parallel = vllm_config.parallel_config
        self._ranks_per_block = getattr(parallel, "decode_context_parallel_size", 1)
        self._num_slots = 2 * options.max_num_seqs
        self._recognizer = _C.RowRecognizer(self._num_slots)
        self._num_steps = 0
        self._num_behind = 0  # rows with tokens that are not indexed yet
        if options.ngram.store is not None:
            self.store = SharedStore(vllm_config, options, self._num_slots, "numpy")
            self.store.text_inserter = make_host_inserter(self.store)

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> Drafts[Any]:
        self._num_steps += 1
        budget_factor = 1
        if not self._is_ladder:
            budget_factor = INDEX_POLICY.compute_budget_factor(
                self._num_steps, num_tokens, num_sampled, self._num_behind
            )
            if budget_factor == 0:
                return super().draft(token_ids, num_tokens, num_sampled, k)
        index = self._drafting.index or self._make_index()
        request_slots, new_rows = self._recognizer.assign(token_ids, num_tokens, num_sampled)
        # When little memory is free, absent requests lose their slots. vLLM does not report which
        # requests have finished, so with store="finish" absent requests count as finished.
        ends_absent_requests = self.store is not None and self.store.contents.visibility == "finish"
        max_absent_steps = INDEX_POLICY.compute_steps_to_keep_absent(
            self._num_steps, index.share_in_use, ends_absent_requests
        )
        if max_absent_steps >= 0:
            self._drafting.end(self._recognizer.free_absent_slots(max_absent_steps))
        if len(new_rows):
            self._drafting.end(request_slots[new_rows])
            self._num_behind = len(new_rows)
        index_slots = request_slots
        if self._num_behind:
            rows = token_ids, num_tokens, index.tensor, request_slots, num_sampled
            arguments: Any = *rows, *self._index_arguments, budget_factor
            index_slots, self._num_behind = _C.index_catch_up(INDEX_POLICY, *arguments)
        return self._drafting.propose(
            token_ids,
            num_tokens,
            num_sampled=num_sampled,
            slot_indices=index_slots,
            store_slots=request_slots,
            k=k,
            scan=self._num_behind == len(num_tokens) and not self._is_ladder,
        )

    def _make_index(self) -> NgramIndex:
        blocks = getattr(self._cache_config, "num_gpu_blocks", None)
        cached_tokens = blocks and blocks * self._cache_config.block_size * self._ranks_per_block
        max_tokens = cached_tokens or MAX_INDEX_TOKENS
        index = index_for(self._options, self._num_slots, "numpy", max_tokens)
        store = None if self.store is None else self.store.host_contents
        self._drafting = Drafting(self._options.ngram, kind="numpy", index=index, store=store)
        return index


class StockNgramProposer:
    """Replaces vLLM's ``NgramProposer``, with the n and k of ``speculative_config``."""

    _method: Method = "ngram"
    has_other_ranks = False
    """Whether ranks must draft the same. Here the scheduler uses the drafts of one rank."""

    def __init__(self, vllm_config: Any) -> None:
        self.options = options = read_options(vllm_config, self._method)
        self.k = options.ngram.k
        name, self.engine = "scan", ScannedRows(options.ngram)
        if options.uses_index():
            name, self.engine = "index", IndexedRows(vllm_config, options)
        self.shared_store = self.engine.store
        logs_on_this_rank = log_start(self, vllm_config, options, self._method, name)
        self._stats = Stats(self, vllm_config, options) if logs_on_this_rank else None

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Does nothing, because there is no model. vLLM calls this method."""

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts as :meth:`NgramProposer.propose`. A draft has at most ``num_speculative_tokens``
        tokens, a number that vLLM may reduce for large batches."""
        batch = len(sampled_token_ids)
        if batch == 0 or token_ids_cpu.shape[1] == 0:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        k = self.k if num_speculative_tokens > self.k else num_speculative_tokens
        num_sampled = np.fromiter(map(len, sampled_token_ids), np.int32, batch)
        lengths = num_tokens_no_spec[:batch]
        drafts, counts, match_len = self.engine.draft(
            token_ids_cpu[:batch], lengths, num_sampled, k
        )
        lists = [row[:n] for row, n in zip(drafts.tolist(), counts.tolist(), strict=True)]
        if self.options.keep_drafting and k > 0:
            limit = self.options.max_model_len
            for draft, sampled, n in zip(lists, sampled_token_ids, lengths.tolist(), strict=True):
                if sampled and not draft and n < limit:
                    draft.append(sampled[-1])
        if self._stats is not None:
            values = lengths, num_sampled, match_len, counts
            seconds = time.perf_counter() - started
            self._stats.observe(seconds, slice(batch), values, self.engine.index)
        return lists


class NgramProposer(StockNgramProposer):
    """Drafts for vLLM's V1 model runner with synchronous scheduling, as a custom class. vLLM drops
    ``prompt_lookup_*`` for custom classes, so they are options here, by default 2 and 5.

    Raises:
        ValueError: An option is unknown, malformed, or contradicts another. The message is one
            line.
    """

    _method = "custom_class"
    _draft = StockNgramProposer.propose  # super() takes longer

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None):
            logger.warning(
                "ngram_npu: num_speculative_tokens_per_batch_size has no effect: vLLM does not "
                "pass it to a custom class; use method 'ngram' with NGRAM_NPU_VLLM=1 instead"
            )

    def propose(  # type: ignore[override]
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Returns a draft for each request, possibly empty.

        Args:
            sampled_token_ids: Tokens that this step sampled for each request. A request without
                sampled tokens is still in prefill and gets no draft.
            num_tokens_no_spec: [max_num_seqs] int32, lengths of the rows with the sampled tokens.
            token_ids_cpu: [max_num_seqs, max_model_len] int32. Row i is that of request i.
            slot_mappings: Not used.

        Raises:
            ValueError: An array has the wrong dtype, shape or stride, or the runner passes other
                arguments.
        """
        # vLLM has no version number for the interface of custom classes, so the ranks are checked.
        ranks = getattr(num_tokens_no_spec, "ndim", None), getattr(token_ids_cpu, "ndim", None)
        if ranks != (1, 2):
            raise ValueError(
                "ngram_npu: propose: expected num_tokens_no_spec of rank 1 and token_ids_cpu of "
                f"rank 2, got {ranks[0]} and {ranks[1]}: this vLLM's runner calls a custom class "
                "with other arguments"
            )
        return self._draft(self.k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
