"""``ngram_index_step_``: ngram_step_ with an index. Semantics: docs/ops/ngram_index_step.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ngram_npu.config import ANY_TOKEN, UNLIMITED
from ngram_npu.ops._register import register_fake
from ngram_npu.ops.ngram_step import NgramStepResult, fake_step

if TYPE_CHECKING:
    from torch import SymInt


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
def _fake(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    index: torch.Tensor,
    *,
    k: int | SymInt,
    **_: object,
) -> NgramStepResult:
    return fake_step(token_ids, sampled_token_ids, k)
