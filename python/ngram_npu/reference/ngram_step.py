"""Reference of ``ngram_step_``; the definition is in docs/ops/ngram_step.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np

from ngram_npu.reference.ngram_propose import Array, draft_for


def ngram_step_(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    discard: Array | None,
    row_indices: Array | None,
    advance: bool,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    workspace: Array | None,
) -> tuple[Array, Array, Array, Array, Array]:
    """token_ids [R,S] and num_tokens [R] are written; sampled_token_ids [B,M], discard and
    row_indices [B] -> next_token_ids [B], num_sampled [B], draft_token_ids [B,k],
    num_draft_tokens [B], match_len [B]; all int32."""
    return append_and_draft(
        token_ids,
        num_tokens,
        sampled_token_ids,
        discard,
        row_indices,
        advance,
        vocab_size,
        k,
        lambda _, tokens: draft_for(tokens, min_n, max_n, k, match_policy, overlap, max_len),
    )


def append_and_draft(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    discard: Array | None,
    row_indices: Array | None,
    advance: bool,
    vocab_size: int,
    k: int,
    draft_of: Callable[[int, list[int]], tuple[list[int], int]],
) -> tuple[Array, Array, Array, Array, Array]:
    """The same with any drafter: from a batch position and its row, the draft and its match."""
    num_rows, capacity = token_ids.shape
    batch = sampled_token_ids.shape[0]
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    draft_token_ids = np.full((batch, k), -1, np.int32)
    num_draft_tokens = np.zeros(batch, np.int32)
    match_len = np.zeros(batch, np.int32)
    for i in range(batch):
        row = i if row_indices is None else int(row_indices[i])
        sampled = [int(token) for token in sampled_token_ids[i]]
        if discard is not None and discard[i]:
            sampled = []
        valid = list(takewhile(lambda token: 0 <= token < vocab_size, sampled))
        num_sampled[i] = len(valid)
        if not 0 <= row < num_rows or not 0 <= int(num_tokens[row]) <= capacity:
            continue
        length = int(num_tokens[row])
        if valid:
            next_token_ids[i] = valid[-1]
        elif length > 0:
            next_token_ids[i] = token_ids[row, length - 1]
        grown = min(length + len(valid), capacity)
        token_ids[row, length:grown] = valid[: grown - length]
        if advance:
            num_tokens[row] = grown
        if valid and grown >= 2:
            tokens = [int(token) for token in token_ids[row, :grown]]
            draft, best = draft_of(i, tokens)
            draft_token_ids[i, : len(draft)] = draft
            num_draft_tokens[i] = len(draft)
            match_len[i] = best
    return next_token_ids, num_sampled, draft_token_ids, num_draft_tokens, match_len
