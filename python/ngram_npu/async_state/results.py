"""Inputs and results of a step. Tensors are on the device, arrays on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.tensors import Int32Array


def _concatenate_ranges(begins: Int32Array, ends: Int32Array) -> Int32Array:
    """Returns the integers of all ranges [begin, end), one range after the other."""
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
    """[max_step_tokens] int32, N used."""
    positions: torch.Tensor
    """[max_step_tokens] int64, N used."""
    slot_mappings: tuple[torch.Tensor, ...]
    """[max_step_tokens] for each KV group; `pad_slot` from N on."""
    query_start_loc: torch.Tensor
    """[R+1] int32; N after entry B."""
    seq_lens: torch.Tensor
    """[R] int32; 0 from B on."""
    num_computed_tokens: torch.Tensor
    """[B] int32, exact, before this step."""
    num_accepted_tokens: torch.Tensor
    """[B] int32, tokens sampled in the last step for requests with drafts in it, otherwise 1."""
    discard: torch.Tensor
    """[B] bool: requests still in prefill; their sampled tokens are ignored."""
    slot_indices: torch.Tensor
    """[B] int32: the row of `token_ids`, `num_tokens` and the block tables of each request."""
    num_scheduled_drafts: torch.Tensor
    """[B] int32."""
    cu_num_scheduled_drafts: torch.Tensor
    """[B] int32, inclusive."""
    draft_spans: npt.NDArray[np.int32]
    """[B,2] begin and end of each request's drafts in the flat inputs, including padding."""

    @property
    def sample_indices(self) -> Int32Array:
        """[B+D] int32 flat positions that need logits: the newest token and all drafts of each
        request."""
        return _concatenate_ranges(self.draft_spans[:, 0] - 1, self.draft_spans[:, 1])

    @property
    def draft_indices(self) -> Int32Array:
        """[D] int32 flat positions of the drafts, which the sampler verifies."""
        return _concatenate_ranges(self.draft_spans[:, 0], self.draft_spans[:, 1])

    @property
    def request_indices(self) -> Int32Array:
        """[N] int32 batch position of each token's request."""
        ends = self.draft_spans[:, 1]
        requests = np.arange(len(ends), dtype=np.int32)
        return np.repeat(requests, np.diff(ends, prepend=np.int32(0)))


@dataclass(frozen=True)
class RaggedDrafterBatch:
    """A neural drafter's batch without the rejected tokens (``prepare_inputs``)."""

    query_start_loc: torch.Tensor
    """[B+1] int32; drafts continue the last token of each request."""
    seq_lens: torch.Tensor
    """[B] int32."""
    token_indices: torch.Tensor
    """[N] int32: flat positions of the kept tokens, in order; then -1."""


@dataclass(frozen=True)
class PaddedDrafterBatch:
    """A neural drafter's batch that includes the rejected tokens (``prepare_inputs_padded``)."""

    token_indices_to_sample: torch.Tensor
    """[B] int32: the flat position of each request's last accepted token."""
    num_rejected: torch.Tensor
    """[B] int32."""


@dataclass(frozen=True)
class StepOutputs:
    """Results of a step on the device, int32 unless stated otherwise."""

    next_token_ids: torch.Tensor
    """[B] newest token of each request."""
    num_sampled: torch.Tensor
    """[B] number of new tokens of each request."""
    draft_token_ids: torch.Tensor
    """[B,k], -1 in unused places. The shape does not depend on data, as device graphs require."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]."""
    drafter_batch: PaddedDrafterBatch | RaggedDrafterBatch
    """For a neural drafter; ragged with `disable_padded_drafter_batch`."""
    draft_costs: torch.Tensor | None = None
    """[B,k] uint8, cost of each n-gram draft token in sixteenths of a bit, also where the neural
    draft was chosen. Present for a ladder with a `min_draft_probability` and a store or
    `AsyncConfig.merge`. The next end_step overwrites it."""
    draft_source: torch.Tensor | None = None
    """[B] 0: no draft, 1: neural, 2: n-grams, 3: neural extended by n-grams. Present with
    `AsyncConfig.merge`."""


@dataclass(frozen=True)
class NeuralDrafts:
    """Drafts of a neural drafter for the requests of a step, on the device."""

    token_ids: torch.Tensor
    """[B,Kn] int32 or int64, Kn at most k."""
    num_tokens: torch.Tensor | None = None
    """[B] int32, number of drafts of each request, 0 to Kn (default: Kn each). It must not depend
    on sampled drafts."""
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
    """[B,k], -1 in unused places."""
    num_draft_tokens: Int32Array
    """[B] number of drafts found. A step that schedules at most as many needs no padding."""
    draft_source: Int32Array | None = None
    """[B] as in StepOutputs."""

    def ragged(self) -> tuple[Int32Array, Int32Array]:
        """Returns all drafts in one array [sum], and their offsets by request [B+1]."""
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
    """As scheduled."""
    alive: npt.NDArray[np.bool_]
    """False if the request has left since; the host state then ignores its results."""
    sampled_token_ids: Int32Array
    """[B,M]: the first `num_sampled` tokens of each request are its new tokens."""
    num_sampled: Int32Array
    num_scheduled_drafts: Int32Array
    """Scheduled and verified drafts, including padding."""
    num_valid_drafts: Int32Array
    """Scheduled drafts without padding: the denominator of an acceptance rate."""
    num_accepted_drafts: Int32Array
    """Valid drafts that were accepted."""
    num_computed_tokens: Int32Array
    """After the step; 0 unless alive."""
    num_tokens: Int32Array
    """After the step; 0 unless alive."""
    faults: Mapping[int, str]
    """Reason for each live request that cannot continue, by batch position: the sampler returned no
    valid token for it, or more than its drafts plus one. Its `num_sampled` is 0, and its counts are
    those before the step. The runner must remove the request before the next step."""
    draft_source: Int32Array | None = None
    """Source of the scheduled drafts as in StepOutputs; 0 where none were scheduled."""
