"""Reference of ``prepare_inputs_padded``: docs/ops/prepare_inputs_padded.md defines it."""

from __future__ import annotations

import numpy as np

from ngram_npu.reference.integers import wrap32
from ngram_npu.reference.ngram_propose import Array


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
