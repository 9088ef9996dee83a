"""The reference of the bookkeeping of speculative decoding, padded and unpadded: docs/ops."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "prepare_input_ids_",
    "prepare_inputs",
    "prepare_inputs_padded",
    "prepare_next_token_ids",
]

Array = npt.NDArray[Any]


def wrap32(value: int) -> int:
    """Returns the int32 that two's complement arithmetic makes of ``value``."""
    return (value + 2**31) % 2**32 - 2**31


def prepare_next_token_ids(
    sampled_token_ids: Array,
    discard: Array | None,
    backup_token_ids: Array | None,
    token_ids: Array | None,
    num_tokens: Array | None,
    row_indices: Array | None,
    vocab_size: int,
) -> tuple[Array, Array]:
    """sampled_token_ids [B,M], discard [B], and either backup_token_ids [B] or token_ids [R,S],
    num_tokens [R], row_indices [B] -> next_token_ids [B], num_sampled [B]; both int32."""
    batch = sampled_token_ids.shape[0]
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    for i in range(batch):
        sampled = [int(token) for token in sampled_token_ids[i]]
        if discard is not None and discard[i]:
            sampled = []
        valid = list(takewhile(lambda token: 0 <= token < vocab_size, sampled))
        num_sampled[i] = len(valid)
        if valid:
            next_token_ids[i] = valid[-1]
        elif backup_token_ids is not None:
            next_token_ids[i] = backup_token_ids[i]
        else:
            assert token_ids is not None
            assert num_tokens is not None
            num_rows, capacity = token_ids.shape
            row = i if row_indices is None else int(row_indices[i])
            if 0 <= row < num_rows and 1 <= int(num_tokens[row]) <= capacity:
                next_token_ids[i] = token_ids[row, num_tokens[row] - 1]
    return next_token_ids, num_sampled


def prepare_inputs_padded(
    cu_num_draft_tokens: Array, num_sampled: Array, query_start_loc: Array
) -> tuple[Array, Array]:
    """cu_num_draft_tokens and num_sampled [B], query_start_loc [B+1] ->
    token_indices_to_sample [B], num_rejected [B]; both int32."""
    batch = len(cu_num_draft_tokens)
    token_indices_to_sample = np.zeros(batch, np.int32)
    num_rejected = np.zeros(batch, np.int32)
    for i in range(batch):
        before = int(cu_num_draft_tokens[i - 1]) if i > 0 else 0
        drafts = wrap32(int(cu_num_draft_tokens[i]) - before)
        rejected = max(wrap32(drafts + 1 - int(num_sampled[i])), 0) if drafts > 0 else 0
        num_rejected[i] = rejected
        token_indices_to_sample[i] = wrap32(int(query_start_loc[i + 1]) - 1 - rejected)
    return token_indices_to_sample, num_rejected


def prepare_inputs(
    query_start_loc: Array, seq_lens: Array, num_rejected: Array, total_tokens: int
) -> tuple[Array, Array, Array]:
    """query_start_loc [B+1], seq_lens and num_rejected [B] -> query_start_loc_out [B+1],
    seq_lens_out [B], token_indices [total_tokens]; all int32."""
    batch = len(seq_lens)
    query_start_loc_out = np.zeros(batch + 1, np.int32)
    seq_lens_out = np.zeros(batch, np.int32)
    kept_positions: list[int] = []
    kept_before = 0
    for i in range(batch):
        start = int(query_start_loc[i])
        length = max(0, wrap32(int(query_start_loc[i + 1]) - start))
        rejected = min(max(int(num_rejected[i]), 0), length)
        kept = length - rejected
        kept_before += kept
        query_start_loc_out[i + 1] = wrap32(kept_before)
        seq_lens_out[i] = wrap32(int(seq_lens[i]) - rejected)
        free = total_tokens - len(kept_positions)
        kept_positions += [wrap32(start + j) for j in range(min(kept, free))]
    token_indices = np.full(total_tokens, -1, np.int32)
    token_indices[: len(kept_positions)] = kept_positions
    return query_start_loc_out, seq_lens_out, token_indices


def prepare_input_ids_(
    input_ids: Array,
    query_start_loc: Array,
    prev_positions: Array,
    next_token_ids: Array,
    draft_token_ids: Array,
    num_scheduled_drafts: Array,
    pad_token: int,
) -> None:
    """input_ids is written; query_start_loc [B+1], prev_positions and num_scheduled_drafts [B],
    next_token_ids [Q], draft_token_ids [Q,K]."""
    width = draft_token_ids.shape[1]
    for i in range(len(prev_positions)):
        p = int(prev_positions[i])
        if not 0 <= p < len(next_token_ids):
            continue
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        first = end - int(num_scheduled_drafts[i])  # where draft 0 goes
        for n in range(max(begin, 0), min(end, len(input_ids))):
            if n == first - 1:
                input_ids[n] = next_token_ids[p]
            elif n >= first:
                j = n - first
                draft = int(draft_token_ids[p, j]) if j < width else -1
                input_ids[n] = draft if draft >= 0 else pad_token
