"""``merge_drafts_``: each request's draft from a neural drafter or from n-grams. Semantics:
docs/ops/merge_drafts.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ngram_npu.ops._register import register_fake

__all__ = [
    "merge_drafts_",
]


class MergeDraftsResult(NamedTuple):
    """On the device of the drafts."""

    draft_token_ids: torch.Tensor
    """[B, k], of the dtype of ``neural_draft_token_ids``."""
    num_draft_tokens: torch.Tensor
    """[B] int32."""
    draft_source: torch.Tensor
    """[B] int32: 0 no draft, 1 neural, 2 n-grams, 3 neural and then n-grams."""


def merge_drafts_(
    neural_draft_token_ids: torch.Tensor,
    ngram_draft_token_ids: torch.Tensor,
    num_ngram_draft_tokens: torch.Tensor,
    match_len: torch.Tensor,
    *,
    num_neural_draft_tokens: torch.Tensor | None = None,
    draft_costs: torch.Tensor | None = None,
    neural_draft_costs: torch.Tensor | None = None,
    match_costs: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    num_scheduled_drafts: torch.Tensor | None = None,
    neural_acceptance: torch.Tensor | None = None,
    min_match_len: int = 1,
    threshold: int = 0,
    extend: bool = False,
) -> MergeDraftsResult:
    """Chooses each request's draft: n-grams if they promise more, otherwise the neural drafter's.

    Args:
        neural_draft_token_ids: [B, Kn] int32 or int64, inner stride 1, Kn <= k.
        ngram_draft_token_ids, num_ngram_draft_tokens, match_len: [B, k], [B], [B] int32, results
            of a lookup; k is 0 to 64.
        num_neural_draft_tokens: [B] int32, clamped to 0 to Kn; None: Kn each.
        draft_costs: [B, k] uint8, the cost of each n-gram draft token in sixteenths of a bit.
        neural_draft_costs: [B, Kn] uint8, the same for the neural drafter. None: the promise of a
            neural draft follows from ``neural_acceptance``.
        match_costs: [16] uint8, instead of ``draft_costs``: the cost of a token by the length of
            its match.
        row_indices: [B] int32 or int64, batch position -> row of ``neural_acceptance``; None: row
            i = i. No row twice.
        num_sampled: [B] int32, tokens that this step sampled; with ``neural_acceptance``.
        num_scheduled_drafts: [B] int32, draft tokens that this step verified; None: all that were
            given. If it is 0, the step does not count for ``neural_acceptance``.
        neural_acceptance: [R, 2] int32, acceptance of each request's neural drafts; written. Zero
            the row of a new request.
        min_match_len: n-grams of a shorter match leave the neural draft, 0 to 2**31 - 1.
        threshold: n-grams that promise less leave the neural draft, in 65536ths of an accepted
            token, 0 to 2**31 - 1; 0 without costs.
        extend: whether an n-gram draft that begins with a shorter neural draft continues it.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    return MergeDraftsResult(
        *torch.ops.ngram_npu.merge_drafts_(
            neural_draft_token_ids,
            ngram_draft_token_ids,
            num_ngram_draft_tokens,
            match_len,
            num_neural_draft_tokens=num_neural_draft_tokens,
            draft_costs=draft_costs,
            neural_draft_costs=neural_draft_costs,
            match_costs=match_costs,
            row_indices=row_indices,
            num_sampled=num_sampled,
            num_scheduled_drafts=num_scheduled_drafts,
            neural_acceptance=neural_acceptance,
            min_match_len=min_match_len,
            threshold=threshold,
            extend=extend,
        )
    )


@register_fake("ngram_npu::merge_drafts_")
def _fake(
    neural_draft_token_ids: torch.Tensor,
    ngram_draft_token_ids: torch.Tensor,
    num_ngram_draft_tokens: torch.Tensor,
    match_len: torch.Tensor,
    **_: object,
) -> MergeDraftsResult:
    batch = neural_draft_token_ids.shape[0]
    return MergeDraftsResult(
        neural_draft_token_ids.new_empty((batch, ngram_draft_token_ids.shape[1])),
        ngram_draft_token_ids.new_empty((batch,)),
        ngram_draft_token_ids.new_empty((batch,)),
    )
