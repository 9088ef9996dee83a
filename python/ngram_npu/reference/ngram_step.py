"""Reference of ``ngram_step_``; the definition is in docs/ops/ngram_step.md."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from ngram_npu.reference.ngram_propose import (
    NO_TOKEN,
    NOTHING,
    Array,
    LookUp,
    new_drafts,
    scan,
)


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
    match_costs: Array | None = None,
    cost_limit: int = 40,
    fill: bool = False,
    draft_costs: Array | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """token_ids [R,S], num_tokens [R] and draft_costs [B,k] uint8 are written; sampled_token_ids
    [B,M], discard and row_indices [B], match_costs [16] uint8 -> next_token_ids [B], num_sampled
    [B], draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    look_up = scan(
        min_n, max_n, k, match_policy, overlap, max_len, match_costs, cost_limit, fill,
    )  # fmt: skip
    appended = token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size
    return append_and_draft(*appended, k, fill, look_up, draft_costs)


def append_and_draft(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    discard: Array | None,
    row_indices: Array | None,
    advance: bool,
    vocab_size: int,
    k: int,
    fill: bool,
    look_up: LookUp,
    draft_costs: Array | None,
) -> tuple[Array, Array, Array, Array, Array]:
    """The same with any lookup."""
    num_rows, capacity = token_ids.shape
    batch = sampled_token_ids.shape[0]
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    drafts = new_drafts(batch, k, draft_costs)
    for i in range(batch):
        row = i if row_indices is None else int(row_indices[i])
        sampled = [int(token) for token in sampled_token_ids[i]]
        if discard is not None and discard[i]:
            sampled = []
        valid = list(takewhile(lambda token: 0 <= token < vocab_size, sampled))
        num_sampled[i] = len(valid)
        if not 0 <= row < num_rows or not 0 <= int(num_tokens[row]) <= capacity:
            drafts.put(i, NOTHING, NO_TOKEN)
            continue
        length = int(num_tokens[row])
        known = [*(int(token) for token in token_ids[row, :length]), *valid]
        next_token_ids[i] = known[-1] if known else 0
        grown = min(len(known), capacity)
        token_ids[row, length:grown] = known[length:grown]
        if advance:
            num_tokens[row] = grown
        found = look_up(known[:grown]) if valid and grown >= 2 else NOTHING
        drafts.put(i, found, known[-1] if fill and known else NO_TOKEN)
    return next_token_ids, num_sampled, *drafts[:3]
