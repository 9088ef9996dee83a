"""The reference of the bookkeeping of speculative decoding, padded and unpadded: docs/ops."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
from ops.schema import Arguments, reference_operator

__all__ = [
    "gather_sampled_tokens_",
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
def prepare_next_token_ids(a: Arguments) -> tuple[Array, Array]:
    """sampled_token_ids [B,M], discard [B], and either backup_token_ids [B] or token_ids [R,S],
    num_tokens [R], row_indices [B] -> next_token_ids [B], num_sampled [B]; both int32."""
    batch = len(a.sampled_token_ids)
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    for i in range(batch):
        valid = valid_tokens(a, i)
        num_sampled[i] = len(valid)
        if valid:
            next_token_ids[i] = valid[-1]
        elif a.backup_token_ids is not None:
            next_token_ids[i] = a.backup_token_ids[i]
        else:
            num_rows, capacity = a.token_ids.shape
            row = row_of(a, i)
            if 0 <= row < num_rows and 1 <= int(a.num_tokens[row]) <= capacity:
                next_token_ids[i] = a.token_ids[row, a.num_tokens[row] - 1]
    return next_token_ids, num_sampled


def row_of(a: Arguments, i: int) -> int:
    """Returns the row of request ``i``, which may not exist."""
    return i if a.row_indices is None else int(a.row_indices[i])


def valid_tokens(a: Arguments, i: int) -> list[int]:
    """Returns the sampled tokens of request ``i`` before the first invalid one."""
    if a.discard is not None and a.discard[i]:
        return []
    sampled = (int(token) for token in a.sampled_token_ids[i])
    return list(takewhile(lambda token: 0 <= token < a.vocab_size, sampled))


@reference_operator
def prepare_inputs_padded(a: Arguments) -> tuple[Array, Array]:
    """cu_num_draft_tokens and num_sampled [B], query_start_loc [B+1] ->
    token_indices_to_sample [B], num_rejected [B]; both int32."""
    batch = len(a.cu_num_draft_tokens)
    token_indices_to_sample = np.zeros(batch, np.int32)
    num_rejected = np.zeros(batch, np.int32)
    for i in range(batch):
        before = int(a.cu_num_draft_tokens[i - 1]) if i > 0 else 0
        drafts = wrap32(int(a.cu_num_draft_tokens[i]) - before)
        rejected = max(wrap32(drafts + 1 - int(a.num_sampled[i])), 0) if drafts > 0 else 0
        num_rejected[i] = rejected
        token_indices_to_sample[i] = wrap32(int(a.query_start_loc[i + 1]) - 1 - rejected)
    return token_indices_to_sample, num_rejected


@reference_operator
def prepare_inputs(a: Arguments) -> tuple[Array, Array, Array]:
    """query_start_loc [B+1], seq_lens and num_rejected [B] -> query_start_loc_out [B+1],
    seq_lens_out [B], token_indices [total_tokens]; all int32."""
    batch = len(a.seq_lens)
    query_start_loc_out = np.zeros(batch + 1, np.int32)
    seq_lens_out = np.zeros(batch, np.int32)
    kept_positions: list[int] = []
    kept_before = 0
    for i in range(batch):
        start = int(a.query_start_loc[i])
        length = max(0, wrap32(int(a.query_start_loc[i + 1]) - start))
        rejected = min(max(int(a.num_rejected[i]), 0), length)
        kept = length - rejected
        kept_before += kept
        query_start_loc_out[i + 1] = wrap32(kept_before)
        seq_lens_out[i] = wrap32(int(a.seq_lens[i]) - rejected)
        free = a.total_tokens - len(kept_positions)
        kept_positions += [wrap32(start + j) for j in range(min(kept, free))]
    token_indices = np.full(a.total_tokens, -1, np.int32)
    token_indices[: len(kept_positions)] = kept_positions
    return query_start_loc_out, seq_lens_out, token_indices


@reference_operator
def prepare_input_ids_(a: Arguments) -> None:
    """input_ids is written; query_start_loc [B+1], prev_positions and num_scheduled_drafts [B],
    next_token_ids [Q], draft_token_ids [Q,K]."""
    width = a.draft_token_ids.shape[1]
    for i, p in enumerate(map(int, a.prev_positions)):
        if not 0 <= p < len(a.next_token_ids):
            continue
        begin, end = int(a.query_start_loc[i]), int(a.query_start_loc[i + 1])
        first = end - int(a.num_scheduled_drafts[i])  # where draft 0 goes
        for n in range(max(begin, 0), min(end, len(a.input_ids))):
            if n == first - 1:
                a.input_ids[n] = a.next_token_ids[p]
            elif n >= first:
                j = n - first
                draft = int(a.draft_token_ids[p, j]) if j < width else -1
                a.input_ids[n] = draft if draft >= 0 else a.pad_token


@reference_operator
def gather_sampled_tokens_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled [B], row_indices [B]; sampled_tokens [B,1+M] is
    written."""
    num_rows, capacity = a.token_ids.shape
    for i, result in enumerate(a.sampled_tokens):
        row, newest = row_of(a, i), []
        if 0 <= row < num_rows and 1 <= int(a.num_tokens[row]) <= capacity:
            tokens = a.token_ids[row, : a.num_tokens[row]].tolist()
            wanted = min(max(int(a.num_sampled[i]), 0), len(result) - 1)
            newest = tokens[max(len(tokens) - wanted, 0) :]
        result[0] = len(newest)
        result[1:] = newest + [-1] * (len(result) - 1 - len(newest))
