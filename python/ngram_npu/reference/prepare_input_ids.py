"""Reference of ``prepare_input_ids_``; the definition is in docs/ops/prepare_input_ids.md."""

from __future__ import annotations

from ngram_npu.reference.ngram_propose import Array


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
