"""Reference of ``prepare_next_token_ids``: docs/ops/prepare_next_token_ids.md defines it."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from ngram_npu.reference.ngram_propose import Array


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
