"""Greedy verification: accepts the drafts that the target model would have generated."""

from __future__ import annotations

import torch


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_drafts: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """The tokens that each request gains: its accepted drafts and the one after them.

    A draft is accepted if it is the argmax of the logits before it and all drafts before it are
    accepted. Nothing waits for the device. With noise added to the logits that depends on the
    request and the position only (Gumbel-max), the same rule verifies sampled text.

    Args:
        logits: [D+B, V] floating point: the logits after each request's newest token and after
            each of its drafts, request by request.
        draft_token_ids: [D] integer: the drafts, request by request.
        cu_num_drafts: [B] integer: the inclusive sum of the draft counts
            (`StepInputs.cu_num_scheduled_drafts`).
        k: at least the largest draft count; the width of the result is k+1.

    Returns:
        [B, k+1] int32, -1 beyond a request's tokens: what :meth:`AsyncSpecState.end_step` takes.

    Raises:
        ValueError: shapes that do not fit together.
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
    says = logits.argmax(-1).to(torch.int32)
    sampled = says[(first_row + columns).clamp(max=max(len(says) - 1, 0))]
    # One more entry, for places without a draft.
    drafts = torch.nn.functional.pad(draft_token_ids.to(torch.int32), (0, 1), value=-1)
    drafts = drafts[(first_draft + columns[:k]).clamp(max=num_drafts)]
    accepted = (drafts == sampled[:, :k]) & (columns[:k] < counts[:, None])
    kept = torch.nn.functional.pad(accepted.int().cumprod(1).bool(), (1, 0), value=True)
    return torch.where(kept, sampled, -1)
