"""``ngram_step_``: accept and draft, fused. Semantics: docs/ops/ngram_step_.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import register_fake

if TYPE_CHECKING:
    from torch import SymInt


class NgramStepResult(NamedTuple):
    """All int32, on the device of ``token_ids``."""

    next_token_ids: torch.Tensor
    """[B]."""
    num_sampled: torch.Tensor
    """[B], before the clamp to the row's capacity."""
    draft_token_ids: torch.Tensor
    """[B, k], -1 in unused slots."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]; 0 without a draft."""


def ngram_step_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    discard: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    *,
    min_n: int,
    max_n: int,
    k: int,
    advance: bool = True,
    vocab_size: int = UNLIMITED,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    workspace: torch.Tensor | None = None,
) -> NgramStepResult:
    """Appends the valid sampled tokens to their rows, then drafts from the grown rows.

    Args:
        token_ids: [R, S] int32, inner stride 1; written.
        num_tokens: [R] int32, live lengths in tokens; written where ``advance``.
        sampled_token_ids: [B, M] int32, M 1 to 65; the leading run of valid ids counts.
        discard: [B] bool; these sampled nothing.
        row_indices: [B] int32 or int64, batch position -> row; None: row i = i, B <= R.
        min_n, max_n: bounds of the match length in tokens, 1 <= min_n <= max_n <= 64.
        k: draft slots, 1 to 64.
        advance: whether ``num_tokens`` grows by the appended tokens.
        match_policy: 0 the earliest of the longest matches, 1 the latest.
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no row drafts past this many tokens.
        workspace: [W] int32 zeroed once, for device backends (``workspace_size`` tells W); the
            CPU ignores it.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    return NgramStepResult(
        *torch.ops.ngram_npu.ngram_step_(
            token_ids,
            num_tokens,
            sampled_token_ids,
            discard,
            row_indices,
            advance,
            vocab_size,
            min_n,
            max_n,
            k,
            match_policy,
            overlap,
            max_len,
            workspace,
        )
    )


@register_fake("ngram_npu::ngram_step_")
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    discard: torch.Tensor | None,
    row_indices: torch.Tensor | None,
    advance: bool,
    vocab_size: int | SymInt,
    min_n: int | SymInt,
    max_n: int | SymInt,
    k: int | SymInt,
    match_policy: int,
    overlap: bool,
    max_len: int | SymInt,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = sampled_token_ids.shape[0]
    return (
        token_ids.new_empty((batch,)),
        token_ids.new_empty((batch,)),
        token_ids.new_empty((batch, k)),
        token_ids.new_empty((batch,)),
        token_ids.new_empty((batch,)),
    )
