"""``prepare_inputs``: drop the rejected tokens from the flat batch. Semantics:
docs/ops/prepare_inputs.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.ops._register import register_fake

if TYPE_CHECKING:
    from torch import SymInt


class PrepareInputsResult(NamedTuple):
    """All int32, on the device of ``query_start_loc``."""

    query_start_loc_out: torch.Tensor
    """[B + 1], without the rejected tokens."""
    seq_lens_out: torch.Tensor
    """[B], without the rejected tokens."""
    token_indices: torch.Tensor
    """[total_tokens], old flat positions of the kept tokens, -1 beyond them."""


def prepare_inputs(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    total_tokens: int,
) -> PrepareInputsResult:
    """Removes each request's last ``num_rejected`` tokens from the flat batch.

    Args:
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.
        seq_lens: [B] int32, context lengths with the rejected tokens.
        num_rejected: [B] int32, clamped to each request's tokens.
        total_tokens: size of ``token_indices``; the old number of tokens is always enough.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range), before any work.
    """
    return PrepareInputsResult(
        *torch.ops.ngram_npu.prepare_inputs(
            query_start_loc, seq_lens, num_rejected, total_tokens=total_tokens
        )
    )


@register_fake("ngram_npu::prepare_inputs")
def _fake(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    total_tokens: int | SymInt,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        query_start_loc.new_empty((query_start_loc.shape[0],)),
        query_start_loc.new_empty((seq_lens.shape[0],)),
        query_start_loc.new_empty((total_tokens,)),
    )
