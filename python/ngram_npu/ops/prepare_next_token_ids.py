"""``prepare_next_token_ids``: each request's newest token. Semantics:
docs/ops/prepare_next_token_ids.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ngram_npu.config import ANY_TOKEN
from ngram_npu.ops._register import register_fake


class PrepareNextTokenIdsResult(NamedTuple):
    """All int32, on the device of ``sampled_token_ids``."""

    next_token_ids: torch.Tensor
    """[B]."""
    num_sampled: torch.Tensor
    """[B], valid sampled tokens."""


def prepare_next_token_ids(
    sampled_token_ids: torch.Tensor,
    *,
    discard: torch.Tensor | None = None,
    backup_token_ids: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    row_indices: torch.Tensor | None = None,
    vocab_size: int = ANY_TOKEN,
) -> PrepareNextTokenIdsResult:
    """The last valid sampled token of each request, or its backup token if there is none.

    The backup token is either given or the last token of the request's row: pass either
    ``backup_token_ids``, or ``token_ids`` and ``num_tokens``.

    Args:
        sampled_token_ids: [B, M] int32, M 1 to 65; the leading run of ids in [0, vocab_size)
            counts.
        discard: [B] bool; sampled tokens of these requests are ignored.
        backup_token_ids: [B] int32.
        token_ids: [R, S] int32, inner stride 1.
        num_tokens: [R] int32, live lengths in tokens.
        row_indices: [B] int32 or int64, batch position -> row; None: row i = i, B <= R.
        vocab_size: ids at or above it are invalid.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, both backups or none), before
            any work.
    """
    return PrepareNextTokenIdsResult(
        *torch.ops.ngram_npu.prepare_next_token_ids(
            sampled_token_ids,
            discard=discard,
            backup_token_ids=backup_token_ids,
            token_ids=token_ids,
            num_tokens=num_tokens,
            row_indices=row_indices,
            vocab_size=vocab_size,
        )
    )


@register_fake("ngram_npu::prepare_next_token_ids")
def _fake(sampled_token_ids: torch.Tensor, **_: object) -> PrepareNextTokenIdsResult:
    size = sampled_token_ids.shape[0]
    return PrepareNextTokenIdsResult(
        sampled_token_ids.new_empty((size,)), sampled_token_ids.new_empty((size,))
    )
