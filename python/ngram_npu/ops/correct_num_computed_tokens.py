"""``correct_num_computed_tokens_``: correct the host's counts for rejected drafts. Semantics:
docs/ops/correct_num_computed_tokens.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake


@with_empty_fake
def correct_num_computed_tokens_(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    *,
    prev_positions: torch.Tensor,
    num_sampled_prev: torch.Tensor,
    num_draft_prev: torch.Tensor,
    host_num_computed_tokens: torch.Tensor,
) -> None:
    """Corrects the host's counts, which assume that every draft was accepted.

    Args:
        num_computed_tokens: [N] int32, N >= B; in the order of the previous step; written in the
            order of this step.
        num_accepted_tokens: [at least B] int32; written.
        prev_positions: [B] int32 or int64, batch position -> position in the previous step; a value
            outside the previous arrays means a new request.
        num_sampled_prev: int32, valid sampled tokens of the previous step, by its positions.
        num_draft_prev: int32, scheduled drafts of the previous step, by its positions.
        host_num_computed_tokens: [B] int32, exact for requests without previous drafts.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, overlapping memory), before
            anything is written.
    """
    torch.ops.ngram_npu.correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=num_sampled_prev,
        num_draft_prev=num_draft_prev,
        host_num_computed_tokens=host_num_computed_tokens,
    )
