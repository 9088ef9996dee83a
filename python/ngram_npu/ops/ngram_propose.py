"""``ngram_propose``: draft from each row as it stands. Semantics: docs/ops/ngram_propose.md."""

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
    """[B, k], -1 in unused slots."""
    num_draft_tokens: torch.Tensor
    """[B]."""
    match_len: torch.Tensor
    """[B]; 0 without a draft."""


def ngram_propose(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    row_indices: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
) -> NgramProposeResult:
    """Finds the longest earlier occurrence of each row's last tokens and drafts what followed it.

    Args:
        token_ids: [R, S] int32, inner stride 1.
        num_tokens: [R] int32, live lengths in tokens.
        row_indices: [B] int32 or int64, batch position -> row; None: B = R, row i = i.
        active: [B] bool; the others draft nothing.
        min_n, max_n: bounds of the match length in tokens, 1 <= min_n <= max_n <= 64.
        k: draft slots, 1 to 64.
        match_policy: 0 the earliest of the longest matches, 1 the latest.
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no row drafts past this many tokens.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range), before any work.
    """
    return NgramProposeResult(
        *torch.ops.ngram_npu.ngram_propose(
            token_ids,
            num_tokens,
            row_indices,
            active,
            min_n,
            max_n,
            k,
            match_policy,
            overlap,
            max_len,
        )
    )


@register_fake("ngram_npu::ngram_propose")
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    row_indices: torch.Tensor | None,
    active: torch.Tensor | None,
    min_n: int | SymInt,
    max_n: int | SymInt,
    k: int | SymInt,
    match_policy: int,
    overlap: bool,
    max_len: int | SymInt,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = token_ids.shape[0] if row_indices is None else row_indices.shape[0]
    return (
        token_ids.new_empty((batch, k)),
        token_ids.new_empty((batch,)),
        token_ids.new_empty((batch,)),
    )
