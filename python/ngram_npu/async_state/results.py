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
    """

    num_step_tokens: int
    """N, number of tokens of the step."""
    input_ids: torch.Tensor
    """[max_step_tokens] int32; the first N are used."""
    positions: torch.Tensor
    """[max_step_tokens] int64: index of each token in its request; the first N are used."""
    rope_positions: torch.Tensor | None
    """[D,max_step_tokens] int64, the first N columns are used; None without `position_dims`."""
    slot_mappings: tuple[torch.Tensor, ...]
    """[max_step_tokens] for each KV group; `pad_slot` from N on."""
    query_start_loc: torch.Tensor
    """[R+1] int32, first token of each request in the step; N from entry B on."""
    seq_lens: torch.Tensor
    """[R] int32; 0 from entry B on."""
    num_computed_tokens: torch.Tensor
    """[B] int32, exact number of computed tokens before this step."""
    num_accepted_tokens: torch.Tensor
    """[B] int32, tokens sampled in the last step by requests that had drafts in it, otherwise 1."""
    discard: torch.Tensor
    """[B] bool, whether the request is still in prefill, so that its sampled tokens are ignored."""
    slot_indices: torch.Tensor
    """[B] int32, each request's row in `token_ids`, `num_tokens` and the block tables."""
    num_scheduled_drafts: torch.Tensor
    """[B] int32, including padding."""
    cu_num_scheduled_drafts: torch.Tensor
    """[B] int32, inclusive cumulative sum of `num_scheduled_drafts`."""
    draft_spans: npt.NDArray[np.int32]
    """[B,2], begin and end of each request's drafts in `input_ids`, including padding."""
    upper_seq_lens: Int32Array
    """[B], upper bounds of `seq_lens` on the host, for attention backends that read lengths there.
    A request's bound is exact unless the last step is not reconciled and contained drafts of the
    request: then the bound assumes that all of them are accepted."""
    max_seq_len: int
    """The largest of `upper_seq_lens`, 0 without requests: an upper bound of all `seq_lens`. It is
    exact if every earlier step was reconciled when the step began."""

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
    """A neural drafter's batch without the rejected tokens (``prepare_inputs``)."""

    query_start_loc: torch.Tensor
    """[B+1] int32, first kept token per request. Drafts continue a request's last token."""
    seq_lens: torch.Tensor
    """[B] int32."""
    token_indices: torch.Tensor
    """[N] int32, positions of the kept tokens in `input_ids`, in order; then -1."""


@dataclass(frozen=True)
class PaddedDrafterBatch:
    """A neural drafter's batch that includes the rejected tokens (``prepare_inputs_padded``)."""

    token_indices_to_sample: torch.Tensor
    """[B] int32, position in `input_ids` of each request's last accepted token."""
    num_rejected: torch.Tensor
    """[B] int32, number of rejected drafts of each request."""


@dataclass(frozen=True)
class StepOutputs:
    """Results of a step on the device; all tensors are int32 unless stated otherwise.

    The first three tensors are views of buffers with fixed addresses; the next end_step overwrites
    them.
    """

    next_token_ids: torch.Tensor
    """[B], newest token of each request."""
    num_sampled: torch.Tensor
    """[B], number of new tokens of each request."""
    draft_token_ids: torch.Tensor
    """[B,k], -1 in unused positions. The shape is constant, as device graphs require."""
    num_draft_tokens: torch.Tensor
    """[B], number of draft tokens of each request."""
    match_len: torch.Tensor
    """[B], length of the match that the n-gram draft continues; 0 without a match."""
    drafter_batch: PaddedDrafterBatch | RaggedDrafterBatch
    """The batch of a neural drafter; ragged with `disable_padded_drafter_batch`."""
    draft_costs: torch.Tensor | None = None
    """[B,k] uint8, cost of each n-gram draft token in sixteenths of a bit, also where the neural
    draft was chosen; 255 behind the draft. Present with `AsyncConfig.merge`."""
    draft_source: torch.Tensor | None = None
    """[B], source of the draft. 0: no draft, 1: neural, 2: n-grams, 3: neural, extended by n-grams.
    Present with `AsyncConfig.merge`."""


@dataclass(frozen=True)
class NeuralDrafts:
    """Drafts of a neural drafter for the requests of a step, on the device."""

    token_ids: torch.Tensor
    """[B,Kn] int32 or int64, Kn at most k."""
    num_tokens: torch.Tensor | None = None
    """[B] int32, number of draft tokens of each request, 0 to Kn (default: Kn for each request).
    The number must not depend on which drafts were sampled."""
    costs: torch.Tensor | None = None
    """[B,Kn] uint8, costs of greedy drafts in sixteenths of a bit. By default, the acceptance of
    earlier neural drafts of the request is used instead."""


NeuralDrafter = Callable[[StepOutputs], NeuralDrafts]
"""Drafts from the newest tokens and the drafter batch of a step. The drafts in the StepOutputs are
the n-gram drafts."""


@dataclass(frozen=True)
class HostDrafts:
    """Drafts of the last ended step. The arrays are copies that stay valid."""

    draft_token_ids: Int32Array
    """[B,k], -1 in unused positions."""
    num_draft_tokens: Int32Array
    """[B], number of drafts found. A step that schedules at most this number needs no padding."""
    draft_source: Int32Array | None = None
    """[B], as in StepOutputs."""

    def ragged(self) -> tuple[Int32Array, Int32Array]:
        """Returns the drafts of all requests in one array, and the offset of each request,
        [B+1]."""
        used = np.arange(self.draft_token_ids.shape[1]) < self.num_draft_tokens[:, None]
        starts = np.zeros(len(self.num_draft_tokens) + 1, np.int32)
        np.cumsum(self.num_draft_tokens, out=starts[1:])
        return self.draft_token_ids[used], starts


@dataclass(frozen=True)
class Reconciled:
    """Exact results of one step. The arrays are [B] by batch position, copies that stay valid."""

    step: int
    """Number of the step, counted from 0."""
    rows: Int32Array
    """The rows of the scheduled step."""
    alive: npt.NDArray[np.bool_]
    """False if the request has left since; the host state then ignores its results."""
    sampled_token_ids: Int32Array
    """[B,M]. The first `num_sampled` tokens of each request are its new tokens."""
    num_sampled: Int32Array
    num_scheduled_drafts: Int32Array
    """Number of scheduled and verified drafts, including padding."""
    num_valid_drafts: Int32Array
    """Number of scheduled drafts without padding: the denominator of an acceptance rate."""
    num_accepted_drafts: Int32Array
    """Number of valid drafts that were accepted."""
    num_computed_tokens: Int32Array
    """Number of computed tokens after the step; 0 unless alive."""
    num_tokens: Int32Array
    """Number of tokens after the step; 0 unless alive."""
    faults: Mapping[int, str]
    """Reason for each live request that cannot continue, by batch position: the sampler returned no
    valid token for it, or more than its drafts plus one. Its `num_sampled` is 0, and its counts are
    those before the step. The runner must remove the request before the next step."""
    draft_source: Int32Array | None = None
    """Source of the scheduled drafts as in StepOutputs; 0 for requests without scheduled drafts."""
