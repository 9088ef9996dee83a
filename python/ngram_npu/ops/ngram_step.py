"""``ngram_step_``: append the sampled tokens and draft. Semantics: docs/ops/ngram_step.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import ANY_TOKEN, UNLIMITED
from ngram_npu.ops._register import register_fake
from ngram_npu.ops.ngram_propose import fake_drafts

if TYPE_CHECKING:
    from torch import SymInt


class NgramStepResult(NamedTuple):
    """All int32, on the device of ``token_ids``."""

    next_token_ids: torch.Tensor
    """[B]."""
    num_sampled: torch.Tensor
    """[B], before the clamp to the row's capacity."""
    draft_token_ids: torch.Tensor
    """[B, k]; behind the draft -1, or with ``fill`` what continues it."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]; 0 without a draft."""


def fake_step(
    token_ids: torch.Tensor, sampled_token_ids: torch.Tensor, k: int | SymInt
) -> NgramStepResult:
    """The fake result of a step."""
    size = sampled_token_ids.shape[0]
    return NgramStepResult(
        token_ids.new_empty((size,)),
        token_ids.new_empty((size,)),
        *fake_drafts(token_ids, sampled_token_ids, k),
    )


def ngram_step_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    *,
    discard: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    advance: bool = True,
    vocab_size: int = ANY_TOKEN,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    match_costs: torch.Tensor | None = None,
    cost_limit: int = 40,
    fill: bool = False,
    draft_costs: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> NgramStepResult:
    """Appends the valid sampled tokens to their rows, then drafts from the grown rows.

    Args:
        token_ids: [R, S] int32, inner stride 1; written.
        num_tokens: [R] int32, live lengths in tokens; written if ``advance``.
        sampled_token_ids: [B, M] int32, M 1 to 65; the leading run of valid ids counts.
        discard: [B] bool; sampled tokens of these requests are ignored.
        row_indices: [B] int32 or int64, batch position -> row; None: row i = i, B <= R.
        advance: whether ``num_tokens`` grows by the appended tokens.
        vocab_size: ids at or above it are invalid.
        min_n, max_n: bounds of the match length in tokens, 1 <= min_n <= max_n <= 64.
        k: draft tokens per request, 0 to 64.
        match_policy, overlap, max_len, match_costs, cost_limit: as in :func:`ngram_propose`.
        fill: whether the places behind a draft continue it and then hold the request's newest
            token, as in :func:`ngram_propose`.
        draft_costs: [B, k] uint8, written: the cost of each draft token, 255 in other places. Only
            with ``match_costs``.
        workspace: [W] int32 zeroed once, for device backends (``workspace_size`` returns W); the
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
            discard=discard,
            row_indices=row_indices,
            advance=advance,
            vocab_size=vocab_size,
            min_n=min_n,
            max_n=max_n,
            k=k,
            match_policy=match_policy,
            overlap=overlap,
            max_len=max_len,
            match_costs=match_costs,
            cost_limit=cost_limit,
            fill=fill,
            draft_costs=draft_costs,
            workspace=workspace,
        )
    )


@register_fake("ngram_npu::ngram_step_")
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    *,
    k: int | SymInt,
    **_: object,
) -> NgramStepResult:
    return fake_step(token_ids, sampled_token_ids, k)
