"""``ngram_index_propose_``: ngram_propose with an index. Semantics:
docs/ops/ngram_index_propose.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import register_fake
from ngram_npu.ops.ngram_propose import NgramProposeResult, fake_drafts

if TYPE_CHECKING:
    from torch import SymInt


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
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    index: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    k: int | SymInt,
    **_: object,
) -> NgramProposeResult:
    return fake_drafts(token_ids, token_ids if row_indices is None else row_indices, k)
