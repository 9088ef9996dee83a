"""References of the bookkeeping operators of speculative decoding, defined in docs/ops."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
from ops.schema import Arguments, reference_operator

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


@reference_operator
def prepare_next_token_ids(args: Arguments) -> tuple[Array, Array]:
    """sampled_token_ids [B,M], discard [B], and either backup_token_ids [B] or token_ids [R,S],
    num_tokens [R], row_indices [B] -> next_token_ids [B], num_sampled [B]; both int32."""
    batch = len(args.sampled_token_ids)
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    for i in range(batch):
        tokens = get_valid_tokens(args, i)
        num_sampled[i] = len(tokens)
        if tokens:
            next_token_ids[i] = tokens[-1]
        elif args.backup_token_ids is not None:
            next_token_ids[i] = args.backup_token_ids[i]
        else:
            num_rows, capacity = args.token_ids.shape
            row = row_of(args, i)
            if 0 <= row < num_rows and 1 <= int(args.num_tokens[row]) <= capacity:
                next_token_ids[i] = args.token_ids[row, args.num_tokens[row] - 1]
    return next_token_ids, num_sampled


def row_of(args: Arguments, i: int) -> int:
    """Returns the row of request ``i``, which may not exist."""
    return i if args.row_indices is None else int(args.row_indices[i])


def get_valid_tokens(args: Arguments, i: int) -> list[int]:
    """Returns the sampled tokens of request ``i`` before the first invalid one."""
    if args.discard is not None and args.discard[i]:
        return []
    sampled = (int(token) for token in args.sampled_token_ids[i])
    return list(takewhile(lambda token: 0 <= token < args.vocab_size, sampled))


@reference_operator
def prepare_inputs_padded(args: Arguments) -> tuple[Array, Array]:
    """cu_num_draft_tokens and num_sampled [B], query_start_loc [B+1] ->
    token_indices_to_sample [B], num_rejected [B]; both int32."""
    batch = len(args.cu_num_draft_tokens)
    token_indices_to_sample = np.zeros(batch, np.int32)
    num_rejected = np.zeros(batch, np.int32)
    for i in range(batch):
        previous_sum = int(args.cu_num_draft_tokens[i - 1]) if i > 0 else 0
        drafts = wrap32(int(args.cu_num_draft_tokens[i]) - previous_sum)
        rejected = max(wrap32(drafts + 1 - int(args.num_sampled[i])), 0) if drafts > 0 else 0
        num_rejected[i] = rejected
        token_indices_to_sample[i] = wrap32(int(args.query_start_loc[i + 1]) - 1 - rejected)
    return token_indices_to_sample, num_rejected


@reference_operator
def prepare_inputs(args: Arguments) -> tuple[Array, Array, Array]:
    """query_start_loc [B+1], seq_lens and num_rejected [B] -> query_start_loc_out [B+1],
    seq_lens_out [B], token_indices [total_tokens]; all int32."""
    batch = len(args.seq_lens)
    query_start_loc_out = np.zeros(batch + 1, np.int32)
    seq_lens_out = np.zeros(batch, np.int32)
    kept_positions: list[int] = []
    num_kept = 0
    for i in range(batch):
        start = int(args.query_start_loc[i])
        length = max(0, wrap32(int(args.query_start_loc[i + 1]) - start))
        rejected = min(max(int(args.num_rejected[i]), 0), length)
        kept = length - rejected
        num_kept += kept
        query_start_loc_out[i + 1] = wrap32(num_kept)
        seq_lens_out[i] = wrap32(int(args.seq_lens[i]) - rejected)
        num_free = args.total_tokens - len(kept_positions)
        kept_positions += [wrap32(start + j) for j in range(min(kept, num_free))]
    token_indices = np.full(args.total_tokens, -1, np.int32)
    token_indices[: len(kept_positions)] = kept_positions
    return query_start_loc_out, seq_lens_out, token_indices


@reference_operator
def prepare_input_ids_(args: Arguments) -> None:
    """input_ids is written; query_start_loc [B+1], prev_positions and num_scheduled_drafts [B],
    next_token_ids [Q], draft_token_ids [Q,K]."""
    width = args.draft_token_ids.shape[1]
    for i, previous in enumerate(map(int, args.prev_positions)):
        if not 0 <= previous < len(args.next_token_ids):
            continue
        begin, end = int(args.query_start_loc[i]), int(args.query_start_loc[i + 1])
        first_draft = end - int(args.num_scheduled_drafts[i])  # position of the first draft token
        for position in range(max(begin, 0), min(end, len(args.input_ids))):
            if position == first_draft - 1:
                args.input_ids[position] = args.next_token_ids[previous]
            elif position >= first_draft:
                j = position - first_draft
                draft = int(args.draft_token_ids[previous, j]) if j < width else -1
                args.input_ids[position] = draft if draft >= 0 else args.pad_token
