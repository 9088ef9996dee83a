"""N-gram drafts beside those of a neural drafter in vLLM's V2 runner; the plugin attaches them.

Each row of a step gets one of two drafts: that of the neural speculator, or the n-gram draft where
it promises more. The speculator's instance stays what it is, so that the runner treats it as it
always does; its ``propose`` is wrapped.

The choice depends on what the request has said so far and on how its drafts fared, never on a
token that was sampled for a draft: rejection sampling then leaves the text's distribution alone.
Every tensor-parallel rank chooses the same, being fed the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ngram_npu.config import default_match_costs
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import logger, unlike
from ngram_npu.engines.vllm.v2 import BESIDE, RowLookup, doubt_of_state, is_warm_up
from ngram_npu.ops import merge_drafts_

SPECULATORS = {
    "draft_model": "StandaloneARSpeculator",
    "eagle": "EagleSpeculator",
    "eagle3": "EagleSpeculator",
    "mtp": "MTPSpeculator",
}
"""Of each method that is known, the class that vLLM serves it with."""

NGRAM = 2
"""The source of a row's draft, as ``merge_drafts_`` says it, where it is from n-grams."""
NO_TOKEN = 255
"""The cost where a draft has no token."""


class Beside(RowLookup):
    """The wrapper around one neural speculator. ``neural_acceptance`` is that of ``merge_drafts_``
    (docs/ops/merge_drafts.md)."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
    ) -> None:
        on_device = device.type != "cpu" and not options.drafts_on_host(device.type)
        if on_device and options.dense_rows:
            _make_dense(req_states)
        method = vllm_config.speculative_config.method
        method = f"{method}, V2 runner, beside its drafts"
        super().__init__(vllm_config, options, device, req_states, method)
        shape = options.max_num_seqs, 2
        self.neural_acceptance = torch.zeros(shape, dtype=torch.int32, device=device)
        self._neural, self._neural_propose = neural, neural.propose
        self._gives_costs = options.ngram.cost_limit is not None
        self._steps = torch.arange(self.k, device=device)
        self._match_costs = torch.from_numpy(default_match_costs().copy()).to(device)
        self._threshold = round(options.beside_threshold * 65536)
        self._logits: torch.Tensor | None = None
        """[rows + 1, k, V]: the speculator's, which has all rows but the last, a spare one."""
        if (given := neural.draft_logits) is not None:
            self._logits = given.new_zeros(len(given) + 1, *given.shape[1:])
            self._logits[:-1] = given
            neural.draft_logits = self._logits[:-1]
            self._zero = given.new_zeros(())
        self._adaptive = bool(getattr(neural, "enable_adaptive_verification", False))
        if self._adaptive:
            self._observe_verification = neural.observe_verification
            neural.observe_verification = self.observe_verification
        neural.propose = self.propose
        setattr(neural, BESIDE, self)

    def _begin(self, row: int, given: Mapping[str, Any], longest: int) -> None:
        self.neural_acceptance[row].zero_()
        super()._begin(row, given, longest)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """What the speculator drafts, or n-grams where they promise more."""
        hidden = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        kwargs |= {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens}
        neural: torch.Tensor = self._neural_propose(
            input_batch, *hidden, num_sampled, num_rejected, *args, **kwargs
        )
        if dummy_run or is_warm_up(input_batch):
            if self._adaptive:
                self._round_trip()
            return neural
        started = time.perf_counter()
        k = self.k if num_speculative_tokens is None else num_speculative_tokens
        rows = input_batch.idx_mapping
        ngram, num_ngram, match_len = self._look_up(input_batch, num_sampled)
        limit = None
        if k < self.k:  # the runner verifies no more
            num_ngram = num_ngram.clamp(max=k)
            limit = torch.full((len(neural),), k, dtype=torch.int32, device=self.device)
        drafts: torch.Tensor
        drafts, num_drafts, source = merge_drafts_(
            neural,
            ngram,
            num_ngram,
            match_len,
            num_neural_draft_tokens=limit,
            draft_costs=self._draft_costs[: len(neural)] if self._gives_costs else None,
            neural_draft_costs=self._predicted(neural),
            match_costs=None if self._gives_costs else self._match_costs,
            row_indices=rows,
            num_sampled=num_sampled,
            num_scheduled_drafts=(num_sampled + num_rejected).sub_(1),
            neural_acceptance=self.neural_acceptance,
            threshold=self._threshold,
        )
        if self._logits is None and not self._adaptive and self._stats is None:
            return drafts
        replaced = source == NGRAM
        if self._logits is not None:
            self._make_one_hot(rows, drafts, replaced)
        if self._adaptive:
            self._say_confidence(match_len, num_ngram, replaced)
        if self._stats is not None:
            match_len = match_len * replaced  # 0: a neural draft
            num_drafts = num_drafts * (num_sampled > 0)
            values = self._state[1][rows], num_sampled, match_len, num_drafts
            self._stats.observe_tensors(started, input_batch.idx_mapping_np, *values)
        return drafts

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Tells the speculator what became of its drafts, not of those that replaced them."""
        kept = self.neural_acceptance[idx_mapping, 1] > 1
        self._observe_verification(idx_mapping, num_sampled * kept, num_rejected * kept)

    def _predicted(self, neural: torch.Tensor) -> torch.Tensor | None:
        """What vLLM predicts that each neural token costs; not where these are sampled, since the
        choice would depend on them."""
        if not self._adaptive or self._logits is not None:
            return None
        predicted = self._neural.draft_token_confidence_probs[: len(neural), : neural.shape[1]]
        costs: torch.Tensor = (predicted.log2() * -16).round_().clamp_(0, NO_TOKEN)
        return costs.to(torch.uint8)

    def _make_one_hot(
        self, rows: torch.Tensor, drafts: torch.Tensor, replaced: torch.Tensor
    ) -> None:
        """Makes rejection sampling take an n-gram draft as certain. Rows that keep their neural
        draft write to the spare row instead."""
        logits = self._logits
        assert logits is not None
        written = torch.where(replaced, rows.long(), len(logits) - 1)
        logits.index_fill_(0, written, float("-inf"))
        tokens = drafts.clamp(0, logits.shape[2] - 1)
        logits.index_put_((written[:, None], self._steps, tokens), self._zero)

    def _say_confidence(
        self, match_len: torch.Tensor, num_ngram: torch.Tensor, replaced: torch.Tensor
    ) -> None:
        """How likely n-gram drafts are to be accepted, for vLLM's choice of what to verify."""
        if self._gives_costs:
            costs = self._draft_costs[: len(match_len)]
        else:
            at = (match_len[:, None] + self._steps).clamp_(max=len(self._match_costs) - 1)
            costs = self._match_costs[at]
        costs = costs.masked_fill(self._steps >= num_ngram[:, None], NO_TOKEN)
        probs = self._neural.draft_token_confidence_probs[: len(match_len)]
        torch.where(replaced[:, None], torch.exp2(costs / -16), probs, out=probs)


def attach(vllm_config: Any, options: Options, device: torch.device, state: Any, made: Any) -> str:
    """Puts n-gram drafts beside those of ``made``, a speculator of vLLM's; or says in one line why
    not, and leaves it as it is."""
    doubt = _doubt(vllm_config, options, device, state, made)
    if not doubt:
        beside = Beside(vllm_config, options, device, state, made)
        if beside.speaks:
            logger.info(
                f"ngram_npu: beside=True: a request's n-gram draft replaces the one of "
                f"{type(made).__name__} where it promises more accepted tokens than that request's "
                f"neural drafts had, and at least {options.beside_threshold:g} (beside_threshold)"
            )
    return doubt


def _doubt(
    vllm_config: Any, options: Options, device: torch.device, req_states: Any, made: Any
) -> str:
    """Why nothing can be put beside this speculator; empty: it can."""
    method, name = vllm_config.speculative_config.method, type(made).__name__
    if method not in SPECULATORS:
        return f"method is {method!r}, expected one of {', '.join(SPECULATORS)}"
    if name != SPECULATORS[method]:
        return f"{method!r} is served by {name}, expected {SPECULATORS[method]}"
    if doubt := unlike(name, type(made), Beside, "propose", "observe_verification"):
        return doubt
    if getattr(made, "draft_watermarker", None) is not None:
        return "drafts are watermarked, which n-gram drafts cannot be"
    if not hasattr(made, "draft_logits"):
        return f"{name} has no draft_logits"
    if made.draft_logits is not None:
        found_shape = tuple(made.draft_logits.shape)
        tokens = vllm_config.model_config.get_vocab_size()
        if len(found_shape) != 3 or found_shape[1] != options.ngram.k or found_shape[2] < tokens:
            expected_shape = f"(rows, {options.ngram.k}, {tokens} or more)"
            return f"draft_logits have shape {found_shape}, expected {expected_shape}"
    return doubt_of_state(device, req_states, "merge_drafts_")


def _make_dense(req_states: Any) -> None:
    """Rows in the device's memory, as for vLLM's own n-gram method; nothing is in them yet."""
    rows = req_states.all_token_ids
    if getattr(rows, "write_contents", None) is not None:  # vLLM's way to tell
        shape, dtype, device = tuple(rows.gpu.shape), rows.dtype, rows.device
        req_states.all_token_ids = type(rows)(shape, dtype=dtype, device=device)
