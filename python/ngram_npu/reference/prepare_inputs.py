"""Reference of ``prepare_inputs``; the definition is in docs/ops/prepare_inputs.md."""

from __future__ import annotations

import numpy as np

from ngram_npu.reference.integers import wrap32
from ngram_npu.reference.ngram_propose import Array


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
        room = total_tokens - len(kept_positions)
        kept_positions += [wrap32(start + j) for j in range(min(kept, room))]
    token_indices = np.full(total_tokens, -1, np.int32)
    token_indices[: len(kept_positions)] = kept_positions
    return query_start_loc_out, seq_lens_out, token_indices
