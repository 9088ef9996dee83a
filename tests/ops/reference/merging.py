"""The reference of ``merge_drafts_``; the definition is in docs/ops/merge_drafts.md."""

from __future__ import annotations

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.reference.store import promise
from ops.schema import Arguments, reference_operator

__all__ = [
    "merge_drafts_",
]

UNIT = 65536


def measured(mean: int, accepted: int) -> int:
    """Returns the mean after one more step, which has weight 1/8. Rounds towards the old mean."""
    difference = accepted * UNIT - mean
    return mean + abs(difference) // 8 * (1 if difference > 0 else -1)


@reference_operator
def merge_drafts_(a: Arguments) -> tuple[Array, Array, Array]:
    """neural_draft_token_ids [B,Kn], ngram_draft_token_ids [B,k], num_ngram_draft_tokens,
    match_len, num_neural_draft_tokens, row_indices, num_sampled and num_scheduled_drafts [B],
    draft_costs [B,k], neural_draft_costs [B,Kn] and match_costs [16] uint8; neural_acceptance [R,2]
    is written -> draft_token_ids [B,k], num_draft_tokens [B], draft_source [B]."""
    batch, width = a.neural_draft_token_ids.shape
    k = a.ngram_draft_token_ids.shape[1]
    tokens = np.full((batch, k), -1, a.neural_draft_token_ids.dtype)
    counts, sources = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for i in range(batch):
        n = width
        if a.num_neural_draft_tokens is not None:
            n = min(max(int(a.num_neural_draft_tokens[i]), 0), width)
        g = min(max(int(a.num_ngram_draft_tokens[i]), 0), k)
        neural = [int(token) for token in a.neural_draft_token_ids[i]]
        ngram = [int(token) for token in a.ngram_draft_token_ids[i]]
        match = int(a.match_len[i])

        promised = None
        if a.draft_costs is not None:
            promised = promise([int(cost) for cost in a.draft_costs[i, :g]])
        elif a.match_costs is not None:
            promised = promise([int(a.match_costs[min(max(match, 0) + j, 15)]) for j in range(g)])

        row = None
        mean = None
        if a.neural_acceptance is not None:
            at = row_of(a, i)
            if 0 <= at < len(a.neural_acceptance):
                row = a.neural_acceptance[at]
                mean, last = (int(value) for value in row)
                verified = last - 1
                if a.num_scheduled_drafts is not None:
                    verified = min(verified, int(a.num_scheduled_drafts[i]))
                if last <= 0:
                    mean = width * UNIT
                elif verified > 0 and a.num_sampled[i] > 0:
                    accepted = min(int(a.num_sampled[i]) - 1, verified, 64)
                    after = measured(mean, accepted)
                    mean = after if accepted < verified or verified >= width else max(mean, after)

        expected = None
        if a.neural_draft_costs is not None:
            expected = promise([int(cost) for cost in a.neural_draft_costs[i, :n]])
        elif mean is not None:
            expected = min(mean, n * UNIT)

        prefers_ngram = match >= a.min_match_len
        if promised is not None:
            is_better = expected is None or promised > expected
            prefers_ngram = prefers_ngram and promised >= a.threshold and is_better

        if g > 0 and (n == 0 or prefers_ngram):
            sources[i] = 2
        elif a.extend and 0 < n < g and neural[:n] == ngram[:n]:
            sources[i] = 3
        elif n > 0:
            sources[i] = 1
        if sources[i] >= 2:
            tokens[i], counts[i] = ngram, g
        else:
            tokens[i, :n], counts[i] = neural[:n], n
        if row is not None and a.num_sampled[i] > 0:
            row[0] = mean
            row[1] = 1 + (0 if sources[i] == 2 else n)
    return tokens, counts, sources
