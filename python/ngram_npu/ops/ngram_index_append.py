"""``ngram_index_append_``: index the tokens of rows. Semantics: docs/ops/ngram_index_append.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake


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
