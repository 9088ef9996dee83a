"""Verifies drafts greedily."""

from __future__ import annotations

import torch


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_drafts: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Returns the accepted drafts of each request and the token after them.

    A draft is accepted if it is the argmax of the preceding logits and all earlier drafts are
    accepted. The function does not wait for the device. It also verifies sampled text if noise that
    depends only on the request and the position is added to the logits (Gumbel-max).

    Args:
        logits: [D+B, V] floating point: logits after the newest token and after each draft of each
            request, request by request.
        draft_token_ids: [D] integer: drafts, request by request.
        cu_num_drafts: [B] integer: inclusive cumulative draft counts
            (`StepInputs.cu_num_scheduled_drafts`).
        k: Upper bound of the draft counts; the result has k+1 columns.

    Returns:
        [B, k+1] int32, padded with -1: the argument of :meth:`AsyncSpecState.end_step`.

    Raises:
        ValueError: The shapes are inconsistent.
    """
    num_drafts, batch = len(draft_token_ids), len(cu_num_drafts)
    if logits.ndim != 2 or len(logits) != num_drafts + batch:
        raise ValueError(
            f"verify_greedy: logits: expected {num_drafts + batch} rows, one per draft and one per "
            f"request, got shape {list(logits.shape)}"
        )
    if k < 0:
        raise ValueError(f"verify_greedy: k: expected at least 0, got {k}")
    columns = torch.arange(k + 1, device=logits.device)
    end = cu_num_drafts.long()
    counts = end.diff(prepend=end.new_zeros(1))
    first_draft = (end - counts)[:, None]
    first_row = first_draft + torch.arange(batch, device=logits.device)[:, None]
    predicted = logits.argmax(-1).to(torch.int32)
    sampled = predicted[(first_row + columns).clamp(max=max(len(predicted) - 1, 0))]
    # The additional entry stands for columns without a draft.
    drafts = torch.nn.functional.pad(draft_token_ids.to(torch.int32), (0, 1), value=-1)
    drafts = drafts[(first_draft + columns[:k]).clamp(max=num_drafts)]
    accepted = (drafts == sampled[:, :k]) & (columns[:k] < counts[:, None])
    is_valid = torch.nn.functional.pad(accepted.int().cumprod(1).bool(), (1, 0), value=True)
    return torch.where(is_valid, sampled, -1)
