"""``ngram_propose``: draft for each row. Semantics: docs/ops/ngram_propose.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import register_fake

if TYPE_CHECKING:
    from torch import SymInt


class NgramProposeResult(NamedTuple):
    """All int32, on the device of ``token_ids``."""

    draft_token_ids: torch.Tensor
    """[B, k], -1 in unused places; with ``fill`` the row's last token."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]; 0 without a draft."""


def fake_drafts(
    token_ids: torch.Tensor, batch: torch.Tensor, k: int | SymInt
) -> NgramProposeResult:
    """The fake result of a lookup for the requests of ``batch`` [B, ...]."""
    size = batch.shape[0]
    return NgramProposeResult(
        token_ids.new_empty((size, k)), token_ids.new_empty((size,)), token_ids.new_empty((size,))
    )


def ngram_propose(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    workspace: torch.Tensor | None = None,
    fill: bool = False,
) -> NgramProposeResult:
    """Finds the longest earlier occurrence of each row's last tokens and drafts what followed it.

    Args:
        token_ids: [R, S] int32, inner stride 1.
        num_tokens: [R] int32, live lengths in tokens.
        row_indices: [B] int32 or int64, batch position -> row; None: B = R, row i = i.
        num_sampled: [B] int32, tokens that the step sampled; requests with none draft nothing.
            None: all draft.
        min_n, max_n: bounds of the match length in tokens, 1 <= min_n <= max_n <= 64.
        k: draft tokens per request, 1 to 64.
        match_policy: 0 the earliest of the longest matches, 1 the latest.
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no row drafts past this many tokens.
        workspace: [W] int32 zeroed once, for device backends (``workspace_size`` returns W); the
            CPU ignores it.
        fill: whether unused places of the drafts hold the row's last token instead of -1, also if
            ``num_sampled`` is 0. They are -1 if the row or its length is out of range.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range), before any work.
    """
    return NgramProposeResult(
        *torch.ops.ngram_npu.ngram_propose(
            token_ids,
            num_tokens,
            row_indices=row_indices,
            num_sampled=num_sampled,
            min_n=min_n,
            max_n=max_n,
            k=k,
            match_policy=match_policy,
            overlap=overlap,
            max_len=max_len,
            workspace=workspace,
            fill=fill,
        )
    )


@register_fake("ngram_npu::ngram_propose")
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    k: int | SymInt,
    **_: object,
) -> NgramProposeResult:
    return fake_drafts(token_ids, token_ids if row_indices is None else row_indices, k)
