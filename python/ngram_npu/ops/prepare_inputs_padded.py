"""``prepare_inputs_padded``: rows of logits to sample from, with rejected tokens in the batch.
Semantics: docs/ops/prepare_inputs_padded.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ngram_npu.ops._register import register_fake


class PrepareInputsPaddedResult(NamedTuple):
    """All int32, on the device of ``cu_num_draft_tokens``."""

    token_indices_to_sample: torch.Tensor
    """[B], flat position of each request's last kept token."""
    num_rejected: torch.Tensor
    """[B]."""


def prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> PrepareInputsPaddedResult:
    """Counts each request's rejected drafts and finds its last token that was not rejected.

    Args:
        cu_num_draft_tokens: [B] int32, inclusive running sum of the scheduled drafts.
        num_sampled: [B] int32, valid sampled tokens (accepted drafts and one more).
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride), before any work.
    """
    return PrepareInputsPaddedResult(
        *torch.ops.ngram_npu.prepare_inputs_padded(
            cu_num_draft_tokens, num_sampled, query_start_loc
        )
    )


@register_fake("ngram_npu::prepare_inputs_padded")
def _fake(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = cu_num_draft_tokens.shape[0]
    return cu_num_draft_tokens.new_empty((batch,)), cu_num_draft_tokens.new_empty((batch,))
