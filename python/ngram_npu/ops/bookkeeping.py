"""The operators of the bookkeeping of speculation, padded and unpadded. Semantics: docs/ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ngram_npu.config import ANY_TOKEN
from ngram_npu.ops._register import register_fake, with_empty_fake

if TYPE_CHECKING:
    from torch import SymInt

__all__ = [
    "prepare_input_ids_",
    "prepare_inputs",
    "prepare_inputs_padded",
    "prepare_next_token_ids",
]


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
def _fake_prepare_next_token_ids(
    sampled_token_ids: torch.Tensor, **_: object
) -> PrepareNextTokenIdsResult:
    size = sampled_token_ids.shape[0]
    return PrepareNextTokenIdsResult(
        sampled_token_ids.new_empty((size,)), sampled_token_ids.new_empty((size,))
    )


class PrepareInputsPaddedResult(NamedTuple):
    """All int32, on the device of ``cu_num_draft_tokens``."""

    token_indices_to_sample: torch.Tensor
    """[B], flat position of each request's last kept token."""
    num_rejected: torch.Tensor
    """[B]."""


def prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> PrepareInputsPaddedResult:
    """Counts each request's rejected drafts and finds its last token that was not rejected.

    Args:
        cu_num_draft_tokens: [B] int32, inclusive running sum of the scheduled drafts.
        num_sampled: [B] int32, valid sampled tokens (accepted drafts and one more).
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride), before any work.
    """
    return PrepareInputsPaddedResult(
        *torch.ops.ngram_npu.prepare_inputs_padded(
            cu_num_draft_tokens, num_sampled, query_start_loc
        )
    )


@register_fake("ngram_npu::prepare_inputs_padded")
def _fake_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = cu_num_draft_tokens.shape[0]
    return cu_num_draft_tokens.new_empty((batch,)), cu_num_draft_tokens.new_empty((batch,))


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
def _fake_prepare_inputs(
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


@with_empty_fake
def prepare_input_ids_(
    input_ids: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    prev_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_scheduled_drafts: torch.Tensor,
    pad_token: int = 0,
) -> None:
    """Writes each request's newest token and its drafts over the end of its tokens.

    Args:
        input_ids: [any size] int32; written.
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.
        prev_positions: [B] int32 or int64, batch position -> position in the previous step; a value
            outside [0, Q) means a new request, whose tokens the host has written.
        next_token_ids: [Q] int32, by previous position.
        draft_token_ids: [Q, K] int32, by previous position, < 0 in unused places.
        num_scheduled_drafts: [B] int32, drafts of each request in this step.
        pad_token: token for a scheduled draft that does not exist.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.prepare_input_ids_(
        input_ids,
        query_start_loc=query_start_loc,
        prev_positions=prev_positions,
        next_token_ids=next_token_ids,
        draft_token_ids=draft_token_ids,
        num_scheduled_drafts=num_scheduled_drafts,
        pad_token=pad_token,
    )
