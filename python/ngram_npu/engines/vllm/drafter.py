"""The drafter of an engine's rank, for every runner of vLLM.

A runner's adapter says which rows a step has. The drafter looks up the rows, and with a store it
stores their text and replaces drafts by text of other requests that follows a longer n-gram. Rows
are arrays on the host or tensors on the runner's device. No step waits for a device.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch

import ngram_npu._C as _C
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.engines.vllm.feed.insertion import insert_texts
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.ranks import Ranks, compare_ranks, exit_worker_on_error, is_first_rank
from ngram_npu.engines.vllm.request_scopes import find_scope
from ngram_npu.engines.vllm.shared_store import SharedStore
from ngram_npu.engines.vllm.stats import DeviceStats, Stats
from ngram_npu.ops import workspace_size
from ngram_npu.proposer import Drafts
from ngram_npu.store import Scope

ATTRIBUTE = "ngram_npu"
"""Attribute of a runner's drafter or speculator that holds its :class:`Drafter`."""


class SampledStep(NamedTuple):
    """Result of :meth:`Drafter.step_sampled`."""

    next_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    drafts: Drafts[torch.Tensor]


class Drafter:
    """Lookup, store, scopes and statistics of an engine's rank.

    Args:
        device: Device of the runner's rows; None: the rows are arrays.
        label: Name of the method, for the log.
        pads: Whether the runner verifies ``num_speculative_tokens`` tokens of every request.
        has_scopes: Whether the runner passes on ``cache_salt`` and adapter of requests.
        holds_back: Whether the runner learns only with the next step which requests have ended.
        compares_ranks: Whether the drafts of all ranks must be equal.

    Raises:
        ValueError: A store's file cannot be used, or another rank has other options.
    """

    def __init__(
        self,
        vllm_config: Any,
        options: Options,
        device: torch.device | None,
        label: str,
        *,
        pads: bool,
        has_scopes: bool = True,
        holds_back: bool = True,
        compares_ranks: bool = True,
    ) -> None:
        config = options.ngram
        self.options, self.k, self.device = options, config.k, device
        self.costs = DraftCosts(config)
        self._ops: Any = _C if device is None else torch.ops.ngram_npu
        self._lookup_arguments = config.lookup_arguments
        self._limit_arguments = config.limit_arguments
        if pads:
            self._lookup_arguments["fill"] = self._limit_arguments["fill"] = True
        self._ends_drafts = config.min_draft_probability is not None
        self._holds_back, self._max_new = holds_back, config.k + 1
        self._workspace: torch.Tensor | None = None
        # Allocated before vLLM measures how much memory is left for its KV cache.
        if device is not None and device.type != "cpu":
            size = workspace_size("ngram_step_", options.max_num_seqs)
            self._workspace = torch.zeros(size, dtype=torch.int32, device=device)
        self.shared_store: SharedStore | None = None
        if options.store:
            self.shared_store = SharedStore(vllm_config, options, device, has_scopes=has_scopes)
        digest = "" if self.shared_store is None else self.shared_store.digest
        ranks = compare_ranks(vllm_config, options, digest) if compares_ranks else Ranks()
        self.has_other_ranks = ranks.has_others
        if self.shared_store is not None and not ranks.have_equal_stores:
            self.shared_store.discard_files()
        self._store = None if self.shared_store is None else self.shared_store.contents
        # vLLM runs one drafter per tensor-parallel rank on the cores that also tokenise.
        _C.set_num_threads(options.num_threads)
        self.stats: Stats | None = None
        self.is_logging_rank = is_first_rank(vllm_config.parallel_config)
        if not self.is_logging_rank:
            return
        log_start(options, label, device)
        if self.shared_store is not None:
            self.shared_store.log_settings()
            self.shared_store.start_saving(self, vllm_config)
        if device is None:
            self.stats = Stats(self, vllm_config)
        elif options.metrics:
            self.stats = DeviceStats(self, vllm_config, device)

    @exit_worker_on_error
    def begin_step(self, scheduler_output: Any) -> None:
        """Called with what the scheduler sends for each step, also without requests, before the
        runner executes the step. vLLM sends it once after the last request has ended."""
        if self.shared_store is None:
            return
        insert_texts(self.shared_store.contents, scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            self.shared_store.copy_if_due(is_idle=True)

    def find_scope(self, request: Any) -> Scope:
        """Returns the scope in the store of a request, the scheduler's ``NewRequestData``."""
        return find_scope(request, is_private=self.options.scope == "private")

    @exit_worker_on_error
    def step(
        self,
        tokens: Any,
        lengths: Any,
        rows: Any,
        num_sampled: Any,
        k: int | None = None,
        scopes: Any = None,
        *,
        int64: bool = False,
    ) -> Drafts[Any]:
        """Returns drafts for rows that contain the sampled tokens already. Padded drafts continue
        with the text that they follow, and then with the request's newest token. Otherwise, tokens
        behind a draft's length are unspecified.

        Args:
            tokens, lengths: [R, S] and [R] int32, the rows and their lengths.
            rows: [B] int32 or int64, row of each request; None: request i is in row i. Rows out of
                range are ignored.
            num_sampled: [B] int32, number of tokens that each request sampled. A request without
                sampled tokens is still in prefill and gets no draft.
            k: Maximum number of draft tokens (default: all).
            scopes: [B] int64; None: all requests have scope 0.
            int64: Whether the draft tokens of tensors are int64.
        """
        k = self.k if k is None else k
        drafts = self._look_up(tokens, lengths, rows, num_sampled, k, int64)
        if self._store is not None:
            drafts = self._draft_from_store(tokens, lengths, rows, num_sampled, scopes, drafts)
        if self._ends_drafts:
            self.costs.limit_counts(drafts.num_draft_tokens, drafts.match_len, drafts.agreement)
        return drafts

    @exit_worker_on_error
    def step_sampled(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        sampled: torch.Tensor,
        discard: torch.Tensor | None = None,
        k: int | None = None,
        scopes: torch.Tensor | None = None,
    ) -> SampledStep:
        """Writes the sampled tokens into the rows, without changing the lengths, and drafts.

        Args:
            tokens, lengths: [B, S] and [B] int32, the requests' rows and their lengths without the
                sampled tokens.
            sampled: [B, M] int32, -1 in unused positions.
            discard: [B] bool, requests whose sampled tokens are ignored.
            k, scopes: As in :meth:`step`.
        """
        arguments = {**self._lookup_arguments, "k": self.k if k is None else k}
        if has_store := self._store is not None:
            lengths = lengths.clone()  # the store needs the new lengths
        next_token_ids, num_sampled, *results = self._ops.ngram_step_(
            tokens,
            lengths,
            sampled,
            discard=discard,
            advance=has_store,
            workspace=self._workspace,
            **arguments,
        )
        drafts = Drafts(*results)
        if has_store:
            drafts = self._draft_from_store(tokens, lengths, None, num_sampled, scopes, drafts)
        return SampledStep(next_token_ids, num_sampled, drafts)

    @exit_worker_on_error
    def store_text(
        self, tokens: Any, lengths: Any, rows: Any, num_sampled: Any, scopes: Any = None
    ) -> None:
        """Stores the text of a step that needs no drafts. Arguments are those of :meth:`step`."""
        if self.shared_store is None:
            return
        store = self.shared_store.contents
        store.begin_step(len(num_sampled), self._max_new)
        store.append(
            tokens,
            lengths,
            num_sampled,
            row_indices=rows,
            scopes=scopes,
            max_new=self._max_new,
            hold_back=self._holds_back,
        )
        self.shared_store.copy_if_due()

    def _look_up(
        self, tokens: Any, lengths: Any, rows: Any, num_sampled: Any, k: int, int64: bool
    ) -> Drafts[Any]:
        arguments = {**self._lookup_arguments, "num_sampled": num_sampled}
        if rows is not None:
            arguments["row_indices"] = rows
        if self.device is None:
            arguments["k"] = k
            return Drafts(*self._ops.ngram_propose(tokens, lengths, **arguments))
        del arguments["k"]
        batch, dtype = len(num_sampled), torch.int64 if int64 else torch.int32
        drafts = torch.empty(batch, k, dtype=dtype, device=self.device)
        counts = torch.empty(2, batch, dtype=torch.int32, device=self.device)
        num_draft_tokens, match_len = counts[0], counts[1]
        self._ops.ngram_propose_(
            tokens,
            lengths,
            draft_token_ids=drafts,
            num_draft_tokens=num_draft_tokens,
            match_len=match_len,
            workspace=self._workspace,
            **arguments,
        )
        return Drafts(drafts, num_draft_tokens, match_len)

    def _draft_from_store(
        self,
        tokens: Any,
        lengths: Any,
        rows: Any,
        num_sampled: Any,
        scopes: Any,
        drafts: Drafts[Any],
    ) -> Drafts[Any]:
        """Stores the text of a step, and replaces drafts by text of the store that follows a longer
        n-gram."""
        if not drafts.draft_token_ids.shape[1]:
            self.store_text(tokens, lengths, rows, num_sampled, scopes)
            return drafts
        agreement: Any = (
            np.empty_like(drafts.match_len)
            if self.device is None
            else torch.empty_like(drafts.match_len)
        )
        assert self.shared_store is not None
        self.shared_store.contents.append_and_propose(
            tokens,
            lengths,
            num_sampled,
            row_indices=rows,
            scopes=scopes,
            max_new=self._max_new,
            hold_back=self._holds_back,
            draft_token_ids=drafts.draft_token_ids,
            num_draft_tokens=drafts.num_draft_tokens,
            match_len=drafts.match_len,
            agreement=agreement,
            **self._limit_arguments,
        )
        self.shared_store.copy_if_due()
        return drafts._replace(agreement=agreement)


def log_start(options: Options, label: str, device: torch.device | None) -> None:
    """Logs the settings of a drafter."""
    config, threads = options.ngram, options.num_threads
    ends = ""
    if config.min_draft_probability is not None:
        ends = f"min_draft_probability={config.min_draft_probability:g} "
    logger.info(
        f"ngram_npu {_C.__version__} drafts for this engine (method {label}): "
        f"lookup={options.lookup} (n-grams of {config.min_n} to {config.max_n} tokens, "
        f"{config.match_policy} match, overlap={config.overlap}) "
        f"num_speculative_tokens={config.k} {ends}max_model_len={options.max_model_len} "
        f"device={device or 'cpu'} num_threads={threads or 'as torch'} "
        f"instruction_set={_C.instruction_set()} keep_drafting={options.keep_drafting}; "
        f"options from {' and '.join(options.sources) or 'the defaults'}"
    )
    cores = os.environ.get("OMP_NUM_THREADS", "")
    if cores.isdigit() and 0 < int(cores) < threads:
        logger.warning(
            f"ngram_npu: num_threads={threads} has no effect beyond OMP_NUM_THREADS={cores}"
        )
