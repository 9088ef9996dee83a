"""``ngram_propose`` and ``ngram_propose_``: draft for each row. Semantics:
docs/ops/ngram_propose.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import register_fake, with_empty_fake

if TYPE_CHECKING:
    from torch import SymInt


class NgramProposeResult(NamedTuple):
    """All int32, on the device of ``token_ids``."""

    draft_token_ids: torch.Tensor
    """[B, k]; behind the draft -1, or with ``fill`` what continues it."""
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
    match_costs: torch.Tensor | None = None,
    cost_limit: int = 40,
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
        k: draft tokens per request, 0 to 64.
        match_policy: 0 the earliest of the longest matches, 1 the latest.
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no row drafts past this many tokens.
        match_costs: [16] uint8, the cost of a draft token in sixteenths of a bit by the length of
            its match; None: drafts are not cut by cost.
        cost_limit: 0 to 2**31 - 1; with ``match_costs`` a draft ends where its cost would exceed
            this.
        fill: whether the places behind a draft continue it, without ``max_len`` and
            ``cost_limit``, and then hold the row's last token. Without it they are -1.

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
            match_costs=match_costs,
            cost_limit=cost_limit,
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


@with_empty_fake
def ngram_propose_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    min_n: int,
    max_n: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    match_costs: torch.Tensor | None = None,
    cost_limit: int = 40,
    fill: bool = False,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    match_len: torch.Tensor,
    draft_costs: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """:func:`ngram_propose` into the caller's tensors.

    Args:
        draft_token_ids: [B, k] int32 or int64, inner stride 1, k 0 to 64; written.
        num_draft_tokens, match_len: [B] int32, written.
        draft_costs: [B, k] uint8, written: the cost of each draft token, 255 in other places. Only
            with ``match_costs``.
        workspace: [W] int32 zeroed once, for device backends (``workspace_size`` returns W); the
            CPU ignores it.
        others: as in :func:`ngram_propose`.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.ngram_propose_(
        token_ids,
        num_tokens,
        row_indices=row_indices,
        num_sampled=num_sampled,
        min_n=min_n,
        max_n=max_n,
        match_policy=match_policy,
        overlap=overlap,
        max_len=max_len,
        match_costs=match_costs,
        cost_limit=cost_limit,
        fill=fill,
        draft_token_ids=draft_token_ids,
        num_draft_tokens=num_draft_tokens,
        match_len=match_len,
        draft_costs=draft_costs,
        workspace=workspace,
    )
