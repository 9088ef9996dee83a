"""Contains the inputs and results of a step. Tensors are on the device, arrays on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.tensors import Int32Array


def _concatenate_ranges(begins: Int32Array, ends: Int32Array) -> Int32Array:
    """Returns the integers of all ranges [begins[i], ends[i]), one range after the other."""
    counts = ends - begins
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before, counts) + np.arange(counts.sum(), dtype=np.int32)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward pass.

    All tensors are views of buffers with fixed addresses, as device graphs require. The next
    begin_step overwrites them.

    Attributes:
        num_step_tokens: N, number of tokens of the step.
        input_ids: [max_step_tokens] int32; the first N are used.
        positions: [max_step_tokens] int64: index of each token in its request; the first N are
            used.
        rope_positions: [D,max_step_tokens] int64, the first N columns are used; None without
            `position_dims`.
        slot_mappings: [max_step_tokens] for each KV group; `pad_slot` from N on.
        query_start_loc: [R+1] int32, first token of each request in the step; N from entry B on.
        seq_lens: [R] int32, number of computed tokens before this step plus the step's tokens,
            including drafts; 0 from entry B on.
        num_computed_tokens: [B] int32, exact number of computed tokens before this step.
        num_accepted_tokens: [B] int32, tokens sampled in the last step by requests that had drafts
            in it, otherwise 1.
        discard: [B] bool, whether the request is still in prefill, so that its sampled tokens are
            ignored.
        slot_indices: [B] int32, each request's slot: its row in the state's `token_ids`,
            `num_tokens_on_device` and `block_tables`. It is not the row of the batch.
        num_scheduled_drafts: [B] int32, including padding.
        cu_num_scheduled_drafts: [B] int32, inclusive cumulative sum of `num_scheduled_drafts`.
        draft_spans: [B,2], begin and end of each request's drafts in `input_ids`, including
            padding.
        upper_seq_lens: [B], upper bounds of `seq_lens` on the host, for attention backends that
            read lengths there. A request's bound is exact unless the last step is not reconciled
            and contained drafts of the request: then the bound assumes that all of them are
            accepted.
        max_seq_len: The largest of `upper_seq_lens`, 0 without requests: an upper bound of all
            `seq_lens`. It is exact if every earlier step was reconciled when the step began.
    """

    num_step_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    rope_positions: torch.Tensor | None
    slot_mappings: tuple[torch.Tensor, ...]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_computed_tokens: torch.Tensor
    num_accepted_tokens: torch.Tensor
    discard: torch.Tensor
    slot_indices: torch.Tensor
    num_scheduled_drafts: torch.Tensor
    cu_num_scheduled_drafts: torch.Tensor
    draft_spans: npt.NDArray[np.int32]
    upper_seq_lens: Int32Array
    max_seq_len: int

    @property
    def sample_indices(self) -> Int32Array:
        """[B+D] int32, positions in `input_ids` of each request's newest token and drafts, which
        need logits."""
        return _concatenate_ranges(self.draft_spans[:, 0] - 1, self.draft_spans[:, 1])

    @property
    def draft_indices(self) -> Int32Array:
        """[D] int32, positions of the drafts in `input_ids`, which the sampler verifies."""
        return _concatenate_ranges(self.draft_spans[:, 0], self.draft_spans[:, 1])

    @property
    def request_indices(self) -> Int32Array:
        """[N] int32, batch position of each token's request."""
        ends = self.draft_spans[:, 1]
        requests = np.arange(len(ends), dtype=np.int32)
        return np.repeat(requests, np.diff(ends, prepend=np.int32(0)))


@dataclass(frozen=True)
class RaggedDrafterBatch:
    """A neural drafter's batch without the rejected tokens (``prepare_inputs``).

    Attributes:
        query_start_loc: [B+1] int32, first kept token per request. Drafts continue a request's last
            token.
        seq_lens: [B] int32.
        token_indices: [N] int32, positions of the kept tokens in `input_ids`, in order; then -1.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_indices: torch.Tensor


@dataclass(frozen=True)
class PaddedDrafterBatch:
    """A neural drafter's batch that includes the rejected tokens (``prepare_inputs_padded``).

    Attributes:
        token_indices_to_sample: [B] int32, position in `input_ids` of each request's last accepted
            token.
        num_rejected: [B] int32, number of rejected drafts of each request.
    """

    token_indices_to_sample: torch.Tensor
    num_rejected: torch.Tensor


@dataclass(frozen=True)
class StepOutputs:
    """Results of a step on the device; all tensors are int32 unless stated otherwise.

    The first three tensors are views of buffers with fixed addresses; the next end_step overwrites
    them.

    Attributes:
        next_token_ids: [B], newest token of each request.
        num_sampled: [B], number of new tokens of each request.
        draft_token_ids: [B,k], -1 in unused positions. The shape is constant, as device graphs
            require.
        num_draft_tokens: [B], number of draft tokens of each request.
        match_len: [B], length of the match that the n-gram draft continues; 0 without a match.
        drafter_batch: The batch of a neural drafter; ragged with `disable_padded_drafter_batch`.
        draft_costs: [B,k] uint8, cost of each n-gram draft token in sixteenths of a bit, also where
            the neural draft was chosen; 255 behind the draft. Present with `AsyncConfig.merge`.
        draft_source: [B], source of the draft. 0: no draft, 1: neural, 2: n-grams, 3: neural,
            extended by n-grams. Present with `AsyncConfig.merge`.
    """

    next_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    draft_token_ids: torch.Tensor
    num_draft_tokens: torch.Tensor
    match_len: torch.Tensor
    drafter_batch: PaddedDrafterBatch | RaggedDrafterBatch
    draft_costs: torch.Tensor | None = None
    draft_source: torch.Tensor | None = None


@dataclass(frozen=True)
class NeuralDrafts:
    """Drafts of a neural drafter for the requests of a step, on the device.

    Attributes:
        token_ids: [B,Kn] int32 or int64, Kn at most k.
        num_tokens: [B] int32, number of draft tokens of each request, 0 to Kn (default: Kn for each
            request). The number must not depend on which drafts were sampled.
        costs: [B,Kn] uint8, costs of greedy drafts in sixteenths of a bit. By default, the
            acceptance of earlier neural drafts of the request is used instead.
    """

    token_ids: torch.Tensor
    num_tokens: torch.Tensor | None = None
    costs: torch.Tensor | None = None


NeuralDrafter = Callable[[StepOutputs], NeuralDrafts]
"""Drafts from the newest tokens and the drafter batch of a step. The drafts in the StepOutputs are
the n-gram drafts."""


@dataclass(frozen=True)
class HostDrafts:
    """Drafts of the last ended step. The arrays are copies that stay valid.

    Attributes:
        draft_token_ids: [B,k], -1 in unused positions.
        num_draft_tokens: [B], number of drafts found. A step that schedules at most this number
            needs no padding.
        draft_source: [B], as in StepOutputs.
    """

    draft_token_ids: Int32Array
    num_draft_tokens: Int32Array
    draft_source: Int32Array | None = None

    def ragged(self) -> tuple[Int32Array, Int32Array]:
        """Returns the drafts of all requests in one array, and the offset of each request,
        [B+1]."""
        used = np.arange(self.draft_token_ids.shape[1]) < self.num_draft_tokens[:, None]
        starts = np.zeros(len(self.num_draft_tokens) + 1, np.int32)
        np.cumsum(self.num_draft_tokens, out=starts[1:])
        return self.draft_token_ids[used], starts


@dataclass(frozen=True)
class Reconciled:
    """Exact results of one step. The arrays are [B] by batch position, copies that stay valid.

    Attributes:
        step: Number of the step, counted from 0.
        rows: The rows of the scheduled step.
        alive: False if the request has left since. The host state then ignores its results, but its
            `num_sampled` tokens are valid.
        sampled_token_ids: [B,M]. The first `num_sampled` tokens of each request are its new tokens.
        num_sampled: Number of new tokens.
        num_scheduled_drafts: Number of scheduled and verified drafts, including padding.
        num_valid_drafts: Number of scheduled drafts without padding: the denominator of an
            acceptance rate.
        num_accepted_drafts: Number of valid drafts that were accepted.
        num_computed_tokens: Number of computed tokens after the step; 0 unless alive.
        num_tokens: Number of tokens after the step; 0 unless alive.
        faults: Reason for each live request that cannot continue, by batch position: the sampler
            returned no valid token for it, or more than its drafts plus one. Its `num_sampled` is
            0, and its counts are those before the step. The runner must remove the request before
            the next step.
        draft_source: Source of the scheduled drafts as in StepOutputs; 0 for requests without
            scheduled drafts.
    """

    step: int
    rows: Int32Array
    alive: npt.NDArray[np.bool_]
    sampled_token_ids: Int32Array
    num_sampled: Int32Array
    num_scheduled_drafts: Int32Array
    num_valid_drafts: Int32Array
    num_accepted_drafts: Int32Array
    num_computed_tokens: Int32Array
    num_tokens: Int32Array
    faults: Mapping[int, str]
    draft_source: Int32Array | None = None
