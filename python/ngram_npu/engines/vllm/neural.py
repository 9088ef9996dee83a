"""n-gram drafts with a neural drafter of vLLM's V2 model runner.

Any speculator is accepted whose ``propose`` and ``draft_logits`` have the expected form. Each row
of a step gets one of two drafts: the neural one, or the n-gram draft where more accepted tokens are
expected of it. The choice depends on the request's text and on how many tokens of its drafts were
accepted, never on a token that was sampled for a draft, so rejection sampling does not change the
distribution of the text. All tensor-parallel ranks choose the same, because they get the same data.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ngram_npu.draft_costs import NO_TOKEN
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import class_mismatch, logger
from ngram_npu.engines.vllm.ranks import exit_worker_on_error
from ngram_npu.engines.vllm.v2 import RowDrafter, unsupported_state_reason
from ngram_npu.ops import merge_drafts_

OBSERVE = "observe_verification"
"""The method by which vLLM passes the outcome of drafts to a speculator. Optional."""
NGRAM = 2
"""The source of a row's draft, in ``merge_drafts_``, if it is an n-gram draft."""


class NeuralDrafterWrapper(RowDrafter):
    """Adds n-gram drafts to those of one neural speculator by replacing its ``propose``. The
    instance keeps its class, so that the runner treats it as before. ``neural_acceptance`` is that
    of ``merge_drafts_`` (docs/ops/merge_drafts.md)."""

    def __init__(
        self, vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
    ) -> None:
        move_rows_to_device(req_states, device)
        label = f"{vllm_config.speculative_config.method}, V2 runner, with n-gram drafts"
        super().__init__(vllm_config, options, device, req_states, label)
        shape = options.max_num_seqs, 2
        self.neural_acceptance = torch.zeros(shape, dtype=torch.int32, device=device)
        self._neural, self._neural_propose = neural, neural.propose
        self._steps = torch.arange(self.k, device=device)
        self._logits: torch.Tensor | None = None
        """[rows + 1, k, V]: the speculator's logits, and a spare row that absorbs writes."""
        self._one_hot: tuple[torch.Tensor, ...] | None = None
        """Indices of the logits that the last step set to 0."""
        if (logits := neural.draft_logits) is not None:
            self._logits = logits.new_zeros(len(logits) + 1, *logits.shape[1:])
            self._logits[:-1] = logits
            neural.draft_logits = self._logits[:-1]
            self._zero = logits.new_zeros(())
            self._minus_infinity = logits.new_full((), float("-inf"))
        self._adaptive = bool(getattr(neural, "enable_adaptive_verification", False))
        if hasattr(neural, OBSERVE):
            self._observe_verification = neural.observe_verification
            neural.observe_verification = self.observe_verification
        neural.propose = self.propose
        setattr(neural, ATTRIBUTE, self)

    @exit_worker_on_error
    def begin(self, row: int, request: Any) -> None:
        self.neural_acceptance[row].zero_()
        super().begin(row, request)

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
        """Returns for each row the speculator's draft, or the n-gram draft if more accepted tokens
        are expected of it."""
        hidden = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        if not dummy_run:
            self._remove_one_hot()
        kwargs |= {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens}
        neural: torch.Tensor = self._neural_propose(
            input_batch, *hidden, num_sampled, num_rejected, *args, **kwargs
        )
        if dummy_run:
            return neural
        started = time.perf_counter()
        k = self.k if num_speculative_tokens is None else num_speculative_tokens
        k = 0 if kwargs.get("skip_drafts") else k  # only newer versions pass it
        rows = input_batch.idx_mapping
        ngram = self.draft(rows, num_sampled, k)
        num_ngram, limit = ngram.num_draft_tokens, None
        if k < self.k:  # the runner verifies only k tokens
            num_ngram = num_ngram.clamp(max=k)
            limit = torch.full((len(neural),), k, dtype=torch.int32, device=self.device)
        costs = self.costs.compute_costs(ngram.match_len, num_ngram, ngram.agreement)
        drafts: torch.Tensor
        drafts, num_drafts, source = merge_drafts_(
            neural,
            ngram.draft_token_ids,
            num_ngram,
            ngram.match_len,
            num_neural_draft_tokens=limit,
            draft_costs=costs,
            neural_draft_costs=self.compute_neural_costs(neural),
            row_indices=rows,
            num_sampled=num_sampled,
            num_scheduled_drafts=(num_sampled + num_rejected).sub_(1),
            neural_acceptance=self.neural_acceptance,
        )
        replaced = source == NGRAM
        if self._logits is not None:
            self._make_one_hot(rows, drafts, replaced)
        if self._adaptive:
            probs = self._neural.draft_token_confidence_probs[: len(costs)]
            torch.where(replaced[:, None], torch.exp2(costs / -16), probs, out=probs)
        if self.stats is not None:
            self.stats.observe(started, num_sampled, num_drafts * replaced)
        return drafts

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Passes the outcome of neural drafts to the speculator, not that of n-gram drafts."""
        # vLLM's speculators have no estimator without adaptive verification.
        if getattr(self._neural, "acceptance_estimator", self) is None:
            return
        is_neural = self.neural_acceptance[idx_mapping, 1] > 1
        self._observe_verification(idx_mapping, num_sampled * is_neural, num_rejected * is_neural)

    def compute_neural_costs(self, neural: torch.Tensor) -> torch.Tensor | None:
        """Returns the costs of the neural tokens as vLLM predicts them; None if these tokens are
        sampled, since the choice would then depend on them."""
        if not self._adaptive or self._logits is not None:
            return None
        predicted = self._neural.draft_token_confidence_probs[: len(neural), : neural.shape[1]]
        costs: torch.Tensor = (predicted.log2() * -16).round_().clamp_(0, NO_TOKEN)
        return costs.to(torch.uint8)

    def _make_one_hot(
        self, rows: torch.Tensor, drafts: torch.Tensor, replaced: torch.Tensor
    ) -> None:
        """Gives n-gram draft tokens probability 1 in rejection sampling. Rows that keep their
        neural draft write to the spare row instead."""
        logits = self._logits
        assert logits is not None
        written = torch.where(replaced, rows.long(), len(logits) - 1)
        logits.index_fill_(0, written, float("-inf"))
        tokens = drafts.clamp(0, logits.shape[2] - 1)
        self._one_hot = written[:, None], self._steps, tokens
        logits.index_put_(self._one_hot, self._zero)

    def _remove_one_hot(self) -> None:
        """Removes the probabilities of the last step's n-gram drafts, which have been verified. A
        speculator may write only some tokens' logits, and expects the others to be -inf."""
        if self._one_hot is not None:
            assert self._logits is not None
            self._logits.index_put_(self._one_hot, self._minus_infinity)
            self._one_hot = None


def move_rows_to_device(req_states: Any, device: torch.device) -> None:
    """Moves the runner's rows, which are still empty, from host memory to the device's, as for
    vLLM's own n-gram method."""
    rows = req_states.all_token_ids
    if device.type != "cpu" and getattr(rows, "write_contents", None) is not None:
        shape = tuple(rows.gpu.shape)
        req_states.all_token_ids = type(rows)(shape, dtype=rows.dtype, device=rows.device)


def attach_ngram_drafts(
    vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
) -> str:
    """Adds n-gram drafts to those of vLLM's speculator ``neural``. Returns why it cannot, and then
    changes nothing; empty if it did."""
    reason = unsupported_reason(vllm_config, options, device, req_states, neural)
    if not reason:
        wrapper = NeuralDrafterWrapper(vllm_config, options, device, req_states, neural)
        if wrapper.is_logging_rank:
            logger.info(
                f"ngram_npu: neural=True: a request's n-gram draft replaces the one of "
                f"{type(neural).__name__} where more accepted tokens are expected of it than that "
                "request's neural drafts had"
            )
    return reason


def unsupported_reason(
    vllm_config: Any, options: Options, device: torch.device, req_states: Any, neural: Any
) -> str:
    """Returns why n-gram drafts cannot be added to this speculator; empty if they can."""
    name = type(neural).__name__
    methods = ["propose", *([OBSERVE] if hasattr(neural, OBSERVE) else [])]
    if mismatch := class_mismatch(name, type(neural), NeuralDrafterWrapper, *methods):
        return mismatch
    if not RowDrafter.has_request_data:
        return "this vLLM has another GPUModelRunner.add_requests"
    if getattr(neural, "draft_watermarker", None) is not None:
        return "drafts are watermarked, which n-gram drafts cannot be"
    if not hasattr(neural, "draft_logits"):
        return f"{name} has no draft_logits"
    if reason := unsupported_state_reason(device, req_states, "merge_drafts_"):
        return reason
    if neural.draft_logits is not None:
        actual = tuple(neural.draft_logits.shape)
        rows, tokens = len(req_states.all_token_ids.gpu), vllm_config.model_config.get_vocab_size()
        least = rows, options.ngram.k, tokens
        fits = len(actual) == 3 and actual[1] == options.ngram.k
        if not fits or actual[0] < rows or actual[2] < tokens:
            return f"draft_logits have shape {actual}, expected {least}, or more rows or tokens"
    return ""
