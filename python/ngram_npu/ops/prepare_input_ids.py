"""``prepare_input_ids_``: copy the last step's tokens to this step's input. Semantics:
docs/ops/prepare_input_ids.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake


@with_empty_fake
def prepare_input_ids_(
    input_ids: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    prev_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_scheduled_drafts: torch.Tensor,
    pad_token: int = 0,
) -> None:
    """Writes each request's newest token and its drafts over the end of its tokens.

    Args:
        input_ids: [any size] int32; written.
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.
        prev_positions: [B] int32 or int64, batch position -> position in the previous step; a value
            outside [0, Q) means a new request, whose tokens the host has written.
        next_token_ids: [Q] int32, by previous position.
        draft_token_ids: [Q, K] int32, by previous position, < 0 in unused places.
        num_scheduled_drafts: [B] int32, drafts of each request in this step.
        pad_token: token for a scheduled draft that does not exist.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.prepare_input_ids_(
        input_ids,
        query_start_loc=query_start_loc,
        prev_positions=prev_positions,
        next_token_ids=next_token_ids,
        draft_token_ids=draft_token_ids,
        num_scheduled_drafts=num_scheduled_drafts,
        pad_token=pad_token,
    )
