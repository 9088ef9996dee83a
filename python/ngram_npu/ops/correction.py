"""The operators that correct the state of asynchronous scheduling. Semantics: docs/ops."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake

__all__ = [
    "compute_slot_mapping_",
    "computed_tokens_drift",
    "correct_num_computed_tokens_",
    "correct_spec_state_",
]

PAD_SLOT_ID = -1
"""vLLM's slot of a token whose KV is not stored."""


@with_empty_fake
def correct_num_computed_tokens_(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    *,
    prev_positions: torch.Tensor,
    num_sampled_prev: torch.Tensor,
    num_draft_prev: torch.Tensor,
    host_num_computed_tokens: torch.Tensor,
) -> None:
    """Corrects the host's counts, which assume that every draft was accepted.

    Args:
        num_computed_tokens: [N] int32, N >= B; in the order of the previous step; written in the
            order of this step.
        num_accepted_tokens: [at least B] int32; written.
        prev_positions: [B] int32 or int64, batch position -> position in the previous step; a value
            outside the previous arrays means a new request.
        num_sampled_prev: int32, valid sampled tokens of the previous step, by its positions.
        num_draft_prev: int32, scheduled drafts of the previous step, by its positions.
        host_num_computed_tokens: [B] int32, exact for requests without previous drafts.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, overlapping memory), before
            anything is written.
    """
    torch.ops.ngram_npu.correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=num_sampled_prev,
        num_draft_prev=num_draft_prev,
        host_num_computed_tokens=host_num_computed_tokens,
    )


@with_empty_fake
def compute_slot_mapping_(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    block_size: int,
    blocks_per_kv_block: int = 1,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    pad_id: int = PAD_SLOT_ID,
) -> None:
    """Writes the KV slot of every token, and ``pad_id`` where it has none on this rank.

    Args:
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.
        positions: [P] int64, each token's position in its request.
        block_table: [R, NB] int32, inner stride 1.
        slot_mapping: [any size] int32 or int64; written.
        row_indices: [B] int32 or int64, batch position -> row; None: row i = i, B <= R.
        block_size: tokens in a block of the table.
        blocks_per_kv_block: blocks of the table in one block of the KV cache manager.
        cp_world, cp_rank: number of context-parallel ranks that share the positions, and this rank.
        cp_interleave: number of consecutive positions that stay on one rank.
        pad_id: value for tokens without a slot and for the end of ``slot_mapping``.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.compute_slot_mapping_(
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        row_indices=row_indices,
        block_size=block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        pad_id=pad_id,
    )


@with_empty_fake
def correct_spec_state_(
    *,
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    discard: torch.Tensor | None = None,
    prev_positions: torch.Tensor,
    num_sampled_prev: torch.Tensor,
    num_draft_prev: torch.Tensor,
    host_num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    block_table: torch.Tensor,
    row_indices: torch.Tensor | None = None,
    block_size: int,
    blocks_per_kv_block: int = 1,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    pad_id: int = PAD_SLOT_ID,
    workspace: torch.Tensor | None = None,
) -> None:
    """Corrects the computed counts, then derives positions, lengths and slots from them.

    Args:
        num_computed_tokens, num_accepted_tokens, prev_positions, num_sampled_prev, num_draft_prev,
            host_num_computed_tokens: as in ``correct_num_computed_tokens_``.
        positions: [P] int64; written.
        seq_lens: [at least B] int32; written, 0 from B on.
        discard: [at least B] bool; written: whether the request ends this step with fewer than its
            ``num_tokens`` tokens computed.
        num_tokens: [R] int32, known tokens of each row; needed with ``discard``.
        query_start_loc, slot_mapping, block_table, row_indices, block_size ... pad_id: as in
            ``compute_slot_mapping_``; ``row_indices`` also selects from ``num_tokens``.
        workspace: [W] int32 zeroed once, for device backends (``workspace_size`` returns W); the
            CPU ignores it.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.correct_spec_state_(
        num_computed_tokens=num_computed_tokens,
        num_accepted_tokens=num_accepted_tokens,
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        discard=discard,
        prev_positions=prev_positions,
        num_sampled_prev=num_sampled_prev,
        num_draft_prev=num_draft_prev,
        host_num_computed_tokens=host_num_computed_tokens,
        query_start_loc=query_start_loc,
        num_tokens=num_tokens,
        block_table=block_table,
        row_indices=row_indices,
        block_size=block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        pad_id=pad_id,
        workspace=workspace,
    )


def computed_tokens_drift(
    num_computed_tokens: torch.Tensor, host_num_computed_tokens: torch.Tensor
) -> torch.Tensor:
    """[B] int32: corrected minus assumed counts. Runners with multi-dimensional positions (M-RoPE)
    shift the positions that the host prepared by it."""
    return num_computed_tokens[: host_num_computed_tokens.shape[0]] - host_num_computed_tokens
