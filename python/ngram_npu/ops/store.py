"""The operators of the store that requests share. Semantics: docs/ops."""

from __future__ import annotations

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import with_empty_fake

__all__ = [
    "ngram_store_finish_",
    "ngram_store_step_",
]


@with_empty_fake
def ngram_store_step_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    store: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    slot_indices: torch.Tensor | None = None,
    scopes: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    match_len: torch.Tensor,
    draft_costs: torch.Tensor,
    max_len: int = UNLIMITED,
    costs: torch.Tensor,
    cost_limit: int = 40,
    fill: bool = False,
    token_logits: torch.Tensor | None = None,
) -> None:
    """Replaces drafts by better ones from a store, then enters the tokens of this step into it.

    A draft is better if more of its tokens are expected to be accepted.

    Args:
        token_ids: [R, S] int32, inner stride 1, with the sampled tokens.
        num_tokens: [R] int32, live lengths in tokens.
        num_sampled: [B] int32, number of new tokens at each row's end; below 1: the request is
            skipped.
        store: [W] int32 on the CPU, made by :class:`ngram_npu.NgramStore`; written.
        row_indices: [B] int32 or int64, batch position -> row; None: B = R, row i = i.
        slot_indices: [B] int32 or int64, the slot of each request; None: the slot of a row is the
            row. No slot twice.
        scopes: [B] int32 or int64; requests share text only within a scope; None: all have
            scope 0.
        draft_token_ids, num_draft_tokens, match_len, draft_costs: [B, k], [B], [B] int32 and
            [B, k] uint8, as returned by :func:`ngram_index_step_` with ``costs``; written.
        max_len: no row drafts past this many tokens.
        costs: [16, 56] uint8, in sixteenths of a bit.
        token_logits: as in :func:`ngram_index_propose_`.
        cost_limit: 0 to 2**31 - 1, in sixteenths of a bit.
        fill: whether the places behind a draft from the store hold the text that follows it there,
            and then the row's last token. Without it they are -1.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_store_step_(
        token_ids,
        num_tokens,
        num_sampled,
        store,
        row_indices=row_indices,
        slot_indices=slot_indices,
        scopes=scopes,
        draft_token_ids=draft_token_ids,
        num_draft_tokens=num_draft_tokens,
        match_len=match_len,
        draft_costs=draft_costs,
        max_len=max_len,
        costs=costs,
        cost_limit=cost_limit,
        fill=fill,
        token_logits=token_logits,
    )


@with_empty_fake
def ngram_store_finish_(store: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """Makes the text of finished requests available to others and frees their slots.

    Args:
        store: [W] int32 on the CPU, made by :class:`ngram_npu.NgramStore`; written.
        slot_indices: [N] int32 or int64, finished in this order; those out of range are ignored.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_store_finish_(store, slot_indices)
