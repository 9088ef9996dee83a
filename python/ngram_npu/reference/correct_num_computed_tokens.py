"""Reference of ``correct_num_computed_tokens_``; the definition is in
docs/ops/correct_num_computed_tokens.md."""

from __future__ import annotations

from ngram_npu.reference.integers import wrap32
from ngram_npu.reference.ngram_propose import Array


def correct_num_computed_tokens_(
    num_computed_tokens: Array,
    num_accepted_tokens: Array,
    prev_positions: Array,
    num_sampled_prev: Array,
    num_draft_prev: Array,
    host_num_computed_tokens: Array,
) -> None:
    """num_computed_tokens [N] and num_accepted_tokens [at least B] are written; prev_positions and
    host_num_computed_tokens [B]; num_sampled_prev and num_draft_prev of any length."""
    old = num_computed_tokens.copy()
    previous = min(len(old), len(num_sampled_prev), len(num_draft_prev))
    for i in range(len(prev_positions)):
        p = int(prev_positions[i])
        if 0 <= p < previous and num_draft_prev[p] > 0:
            sampled = min(int(num_sampled_prev[p]), int(num_draft_prev[p]) + 1)
            num_computed_tokens[i] = wrap32(int(old[p]) + sampled)
            num_accepted_tokens[i] = sampled
        else:
            num_computed_tokens[i] = host_num_computed_tokens[i]
