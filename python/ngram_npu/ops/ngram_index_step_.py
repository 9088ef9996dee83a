"""``ngram_index_step_``: ngram_step_ from an index. Semantics: docs/ops/ngram_index_step_.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ngram_npu.config import UNLIMITED
from ngram_npu.ops._register import register_fake
from ngram_npu.ops.ngram_step_ import NgramStepResult

if TYPE_CHECKING:
    from torch import SymInt


def ngram_index_step_(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    discard: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    *,
    index: torch.Tensor,
    slot_indices: torch.Tensor | None = None,
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
    """:func:`ngram_step_`, bit for bit, at a cost that hardly grows with the context.

    Args:
        index: [W] int32, made by :class:`ngram_npu.NgramIndex`, or for a GPU by
            :class:`ngram_npu.DeviceNgramIndex`; written.
        slot_indices: [B] int32 or int64, which slot of the index each request uses; None: the slot
            of a row is the row.
        others: as in :func:`ngram_step_`; max_n - min_n is at most 7.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    return NgramStepResult(
        *torch.ops.ngram_npu.ngram_index_step_(
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
            index,
            slot_indices,
            workspace,
        )
    )


@register_fake("ngram_npu::ngram_index_step_")
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
    index: torch.Tensor,
    slot_indices: torch.Tensor | None,
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
