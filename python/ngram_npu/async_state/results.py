"""Results of AsyncSpecState. Tensors are on the device, arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


def _ranges(begins: Int32Array, ends: Int32Array) -> Int32Array:
    """The numbers from each begin to its end."""
    counts = ends - begins
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before, counts) + np.arange(counts.sum(), dtype=np.int32)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a forward pass. All but `num_step_tokens` and the spans are views of buffers
    with fixed addresses (for device graphs), overwritten by the next begin_step."""

    num_step_tokens: int
    """N, tokens of the step."""
    input_ids: torch.Tensor
    """[max_step_tokens] int32, N used."""
    positions: torch.Tensor
    """[max_step_tokens] int64, N used."""
    slot_mappings: tuple[torch.Tensor, ...]
    """[max_step_tokens] for each KV group; `pad_slot` beyond N."""
    query_start_loc: torch.Tensor
    """[R+1] int32; N beyond B."""
    seq_lens: torch.Tensor
    """[R] int32; 0 beyond B."""
    num_computed_tokens: torch.Tensor
    """[B] int32, exact, before this step."""
    num_accepted_tokens: torch.Tensor
    """[B] int32, tokens that the last step sampled for requests with drafts in it, otherwise 1."""
    discard: torch.Tensor
    """[B] bool: requests still in prefill, whose sampled tokens are to be ignored."""
    slot_indices: torch.Tensor
    """[B] int32: the row of `token_ids`, `num_tokens` and the block tables of each request."""
    num_scheduled_drafts: torch.Tensor
    """[B] int32."""
    cu_num_scheduled_drafts: torch.Tensor
    """[B] int32, inclusive."""
    draft_spans: npt.NDArray[np.int32]
    """[B,2] first and end of each request's drafts in the flat inputs, before any trimming."""

    # Flat positions, [.] int32 on the host, request by request.

    @property
    def sample_indices(self) -> Int32Array:
        """[B+D] where the model's logits are needed: at each request's newest token and at each of
        its D drafts."""
        return _ranges(self.draft_spans[:, 0] - 1, self.draft_spans[:, 1])

    @property
    def draft_indices(self) -> Int32Array:
        """[D] where the drafts are, which the sampler verifies."""
        return _ranges(self.draft_spans[:, 0], self.draft_spans[:, 1])

    @property
    def request_indices(self) -> Int32Array:
        """[N] the request, by its place in the batch, that each token of the step belongs to."""
        ends = self.draft_spans[:, 1]
        requests = np.arange(len(ends), dtype=np.int32)
        return np.repeat(requests, np.diff(ends, prepend=np.int32(0)))


@dataclass(frozen=True)
class RaggedDrafterBatch:
    """The step without its rejected tokens (``prepare_inputs``)."""

    query_start_loc: torch.Tensor
    """[B+1] int32; each request's last token is the one to draft from."""
    seq_lens: torch.Tensor
    """[B] int32."""
    token_indices: torch.Tensor
    """[N] int32: flat positions of the kept tokens, in order; -1 beyond."""


@dataclass(frozen=True)
class PaddedDrafterBatch:
    """The step with its rejected tokens (``prepare_inputs_padded``)."""

    token_indices_to_sample: torch.Tensor
    """[B] int32: the flat position of each request's last accepted token."""
    num_rejected: torch.Tensor
    """[B] int32."""


@dataclass(frozen=True)
class StepOutputs:
    """Results of a step, all int32 on the device."""

    next_token_ids: torch.Tensor
    """[B] each request's newest token."""
    num_sampled: torch.Tensor
    """[B] tokens it gained."""
    draft_token_ids: torch.Tensor
    """[B,k], -1 in unused places; its shape does not depend on data (for device graphs)."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]."""
    drafter_batch: PaddedDrafterBatch | RaggedDrafterBatch
    """For a model-based drafter; ragged with `disable_padded_drafter_batch`."""
    draft_costs: torch.Tensor | None = None
    """[B,k] uint8, the cost of each n-gram draft token in sixteenths of a bit, also where another
    draft was chosen. With `AsyncConfig.merge` or a store, from a ladder with a
    `min_draft_probability`; overwritten by the next end_step."""
    draft_source: torch.Tensor | None = None
    """[B] 0 no draft, 1 neural, 2 n-grams, 3 neural and then n-grams; with `AsyncConfig.merge`."""


@dataclass(frozen=True)
class HostDrafts:
    """The drafts of the last ended step; copies that stay valid."""

    draft_token_ids: Int32Array
    """[B,k], -1 in unused places."""
    num_draft_tokens: Int32Array
    """[B] the number of drafts found; a step that schedules no more needs no padding."""
    draft_source: Int32Array | None = None
    """[B] as in StepOutputs."""

    def ragged(self) -> tuple[Int32Array, Int32Array]:
        """All drafts in one array [sum], and the begin of each request's [B+1]."""
        used = np.arange(self.draft_token_ids.shape[1]) < self.num_draft_tokens[:, None]
        starts = np.zeros(len(self.num_draft_tokens) + 1, np.int32)
        np.cumsum(self.num_draft_tokens, out=starts[1:])
        return self.draft_token_ids[used], starts


@dataclass(frozen=True)
class Reconciled:
    """The exact results of one step; arrays [B] by its batch positions, copies that stay valid."""

    step: int
    """Counts the steps from 0."""
    rows: Int32Array
    """As scheduled."""
    alive: npt.NDArray[np.bool_]
    """False if the request has left its row since; the mirrors then ignore its results."""
    sampled_token_ids: Int32Array
    """[B,M]: the first `num_sampled` of each request are its new tokens."""
    num_sampled: Int32Array
    num_scheduled_drafts: Int32Array
    """Drafts that were scheduled and verified, including padding."""
    num_valid_drafts: Int32Array
    """Drafts among these, without padding: the denominator of an acceptance rate."""
    num_accepted_drafts: Int32Array
    """Accepted ones of the valid drafts."""
    num_computed_tokens: Int32Array
    """After the step; 0 unless alive."""
    num_tokens: Int32Array
    """After the step; 0 unless alive."""
    faults: Mapping[int, str]
    """Batch position -> reason, of each live request that cannot go on: the sampler gave it no
    valid token, or more than the step's drafts and one. Its tokens are not returned: `num_sampled`
    is 0, the counts are those before the step. Remove it; no step may run on it again."""
    draft_source: Int32Array | None = None
    """Of the scheduled drafts, as in StepOutputs; 0 where there were none."""
