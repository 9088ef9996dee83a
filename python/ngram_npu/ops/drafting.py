"""The operators that draft: lookups and steps, by scan and by index. Semantics: docs/ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import ANY_TOKEN, UNLIMITED
from ngram_npu.ops._register import register_fake, with_empty_fake

if TYPE_CHECKING:
    from torch import SymInt

__all__ = [
    "ngram_index_append_",
    "ngram_index_propose_",
    "ngram_index_reset_",
    "ngram_index_step_",
    "ngram_propose",
    "ngram_propose_",
    "ngram_step_",
]


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
def _fake_ngram_propose(
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
def _fake_ngram_step(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    *,
    k: int | SymInt,
    **_: object,
) -> NgramStepResult:
    return fake_step(token_ids, sampled_token_ids, k)


def ngram_index_propose_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    index: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    slot_indices: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    ladder: bool = False,
    costs: torch.Tensor | None = None,
    cost_limit: int = 40,
    draft_costs: torch.Tensor | None = None,
    fill: bool = False,
    token_logits: torch.Tensor | None = None,
) -> NgramProposeResult:
    """Same results as :func:`ngram_propose`, in a time that hardly grows with the context.

    Args:
        index: [W] int32, on the CPU, made by :class:`ngram_npu.NgramIndex`; written.
        slot_indices: [B] int32 or int64, the slot of the index that each request uses; None: the
            slot of a row is the row. No slot twice.
        ladder: n-grams of 1, 2, 4, 8 and 16 tokens; needs min_n 1, max_n 16, match_policy 1.
        costs: [16, 32] uint8, the cost of a draft token in sixteenths of a bit, by the length of
            its match and the outcome of earlier matches; a draft ends where its cost would exceed
            ``cost_limit``. Only with ``ladder``.
        token_logits: [4096, 2] int8; ``costs`` is then int16, and holds logits in 32nds of a nat,
            to which those of the drafted token and of the one before it are added.
        draft_costs: [B, k] uint8, written: the cost of each draft token, 255 in other places.
        others: as in :func:`ngram_propose`, on the CPU; max_n - min_n is at most 7.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    return NgramProposeResult(
        *torch.ops.ngram_npu.ngram_index_propose_(
            token_ids,
            num_tokens,
            index,
            row_indices=row_indices,
            slot_indices=slot_indices,
            num_sampled=num_sampled,
            min_n=min_n,
            max_n=max_n,
            k=k,
            match_policy=match_policy,
            overlap=overlap,
            max_len=max_len,
            ladder=ladder,
            costs=costs,
            cost_limit=cost_limit,
            draft_costs=draft_costs,
            fill=fill,
            token_logits=token_logits,
        )
    )


@register_fake("ngram_npu::ngram_index_propose_")
def _fake_ngram_index_propose(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    index: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    k: int | SymInt,
    **_: object,
) -> NgramProposeResult:
    return fake_drafts(token_ids, token_ids if row_indices is None else row_indices, k)


def ngram_index_step_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    index: torch.Tensor,
    *,
    discard: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    slot_indices: torch.Tensor | None = None,
    advance: bool = True,
    vocab_size: int = ANY_TOKEN,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    ladder: bool = False,
    costs: torch.Tensor | None = None,
    cost_limit: int = 40,
    draft_costs: torch.Tensor | None = None,
    fill: bool = False,
    token_logits: torch.Tensor | None = None,
) -> NgramStepResult:
    """Same results as :func:`ngram_step_`, in a time that hardly grows with the context.

    Args:
        index: [W] int32, on the CPU, made by :class:`ngram_npu.NgramIndex`; written.
        slot_indices: [B] int32 or int64, the slot of the index that each request uses; None: the
            slot of a row is the row.
        ladder, costs, cost_limit, draft_costs, token_logits: as in :func:`ngram_index_propose_`.
        others: as in :func:`ngram_step_`, on the CPU; max_n - min_n is at most 7.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    return NgramStepResult(
        *torch.ops.ngram_npu.ngram_index_step_(
            token_ids,
            num_tokens,
            sampled_token_ids,
            index,
            discard=discard,
            row_indices=row_indices,
            slot_indices=slot_indices,
            advance=advance,
            vocab_size=vocab_size,
            min_n=min_n,
            max_n=max_n,
            k=k,
            match_policy=match_policy,
            overlap=overlap,
            max_len=max_len,
            ladder=ladder,
            costs=costs,
            cost_limit=cost_limit,
            draft_costs=draft_costs,
            fill=fill,
            token_logits=token_logits,
        )
    )


@register_fake("ngram_npu::ngram_index_step_")
def _fake_ngram_index_step(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    index: torch.Tensor,
    *,
    k: int | SymInt,
    **_: object,
) -> NgramStepResult:
    return fake_step(token_ids, sampled_token_ids, k)


@with_empty_fake
def ngram_index_append_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    index: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    slot_indices: torch.Tensor | None = None,
    min_n: int,
    max_n: int,
    match_policy: int = 0,
    ladder: bool = False,
    outcomes: bool = False,
) -> None:
    """Indexes the tokens that rows hold and their slots do not: prompts or pieces of prompts.

    Args:
        token_ids: [R, S] int32, inner stride 1.
        num_tokens: [R] int32, live lengths in tokens.
        index: [W] int32, on the CPU, made by :class:`ngram_npu.NgramIndex`; written.
        row_indices: [B] int32 or int64, batch position -> row; None: B = R, row i = i.
        slot_indices: [B] int32 or int64; None: the slot of a row is the row. No slot twice.
        min_n, max_n, match_policy, ladder: as the steps will pass them.
        outcomes: whether the steps will pass ``costs``.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_index_append_(
        token_ids,
        num_tokens,
        index,
        row_indices=row_indices,
        slot_indices=slot_indices,
        min_n=min_n,
        max_n=max_n,
        match_policy=match_policy,
        ladder=ladder,
        outcomes=outcomes,
    )


@with_empty_fake
def ngram_index_reset_(index: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """Empties slots and returns their memory to the index.

    Args:
        index: [W] int32, on the CPU, made by :class:`ngram_npu.NgramIndex`; written.
        slot_indices: [N] int32 or int64; those out of range are ignored.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_index_reset_(index, slot_indices)
