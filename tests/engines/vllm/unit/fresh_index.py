"""A ladder's drafts for rows that are not indexed yet."""

from __future__ import annotations

from typing import Any

import numpy as np
from ngram_npu import NgramProposer
from ngram_npu.config import NgramConfig


def drafts_of(
    config: NgramConfig, token_ids: Any, num_tokens: Any, num_sampled: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """For each row of [B, S]: its draft and the costs of its tokens, from a new index."""
    proposer = NgramProposer(config)
    costs = None
    if config.cost_limit is not None:
        costs = np.zeros((len(num_tokens), config.k), np.uint8)
    found = proposer.propose(token_ids, num_tokens, num_sampled=num_sampled, draft_costs=costs)
    counts = found.num_draft_tokens.tolist()
    drafts = found.draft_token_ids.tolist()
    paid = [] if costs is None else costs.tolist()
    return [row[:n] for row, n in zip(drafts, counts, strict=True)], paid
