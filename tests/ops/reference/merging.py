"""Reference of ``merge_drafts_``. The definition is in docs/ops/merge_drafts.md."""

from __future__ import annotations

from itertools import accumulate, repeat

import numpy as np
from ops.reference.bookkeeping import Array, row_of
from ops.schema import Arguments, reference_operator

__all__ = [
    "merge_drafts_",
]

UNIT = 65536
PROBABILITIES = list(accumulate(repeat(62757, 255), lambda p, x: p * x // UNIT, initial=UNIT))
"""2^(-cost/16) for each cost, in 1/65536."""


def update_mean(mean: int, accepted: int) -> int:
    """Returns the mean, in 1/65536 token, after a step with this number of accepted tokens. The
    step has weight 1/8. Rounds towards the old mean."""
    difference = accepted * UNIT - mean
    return mean + abs(difference) // 8 * (1 if difference > 0 else -1)


def compute_expected_tokens(costs: list[int]) -> int:
    """Returns the expected number of accepted tokens of a draft, in 1/65536 token."""
    return sum(PROBABILITIES[total] for total in accumulate(costs) if total <= 255)


@reference_operator
def merge_drafts_(args: Arguments) -> tuple[Array, Array, Array]:
    """neural_draft_token_ids [B,Kn], ngram_draft_token_ids [B,k], num_ngram_draft_tokens,
    match_len, num_neural_draft_tokens, row_indices, num_sampled and num_scheduled_drafts [B],
    draft_costs [B,k] and neural_draft_costs [B,Kn] uint8; neural_acceptance [R,2] is written ->
    draft_token_ids [B,k], num_draft_tokens [B], draft_source [B]."""
    batch, width = args.neural_draft_token_ids.shape
    k = args.ngram_draft_token_ids.shape[1]
    tokens = np.full((batch, k), -1, args.neural_draft_token_ids.dtype)
    counts, sources = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for i in range(batch):
        num_neural = width
        if args.num_neural_draft_tokens is not None:
            num_neural = min(max(int(args.num_neural_draft_tokens[i]), 0), width)
        num_ngram = min(max(int(args.num_ngram_draft_tokens[i]), 0), k)
        neural_draft = [int(token) for token in args.neural_draft_token_ids[i]]
        ngram_draft = [int(token) for token in args.ngram_draft_token_ids[i]]
        match_len = int(args.match_len[i])

        ngram_expected = None
        if args.draft_costs is not None:
            costs = [int(cost) for cost in args.draft_costs[i, :num_ngram]]
            ngram_expected = compute_expected_tokens(costs)

        row = None
        mean = None
        if args.neural_acceptance is not None:
            row_index = row_of(args, i)
            if 0 <= row_index < len(args.neural_acceptance):
                row = args.neural_acceptance[row_index]
                mean, last_length = (int(value) for value in row)
                verified = last_length - 1
                if args.num_scheduled_drafts is not None:
                    verified = min(verified, int(args.num_scheduled_drafts[i]))
                if last_length <= 0:
                    mean = width * UNIT
                elif verified > 0 and args.num_sampled[i] > 0:
                    accepted = min(int(args.num_sampled[i]) - 1, verified, 64)
                    new_mean = update_mean(mean, accepted)
                    was_cut = accepted == verified < width
                    mean = max(mean, new_mean) if was_cut else new_mean

        neural_expected = None
        if args.neural_draft_costs is not None:
            costs = [int(cost) for cost in args.neural_draft_costs[i, :num_neural]]
            neural_expected = compute_expected_tokens(costs)
        elif mean is not None:
            neural_expected = min(mean, num_neural * UNIT)

        prefers_ngram = match_len >= args.min_match_len
        if ngram_expected is not None:
            is_better = neural_expected is None or ngram_expected > neural_expected
            prefers_ngram = prefers_ngram and ngram_expected >= args.threshold and is_better

        extends_neural = neural_draft[:num_neural] == ngram_draft[:num_neural]
        if num_ngram > 0 and (num_neural == 0 or prefers_ngram):
            sources[i] = 2
        elif args.extend and 0 < num_neural < num_ngram and extends_neural:
            sources[i] = 3
        elif num_neural > 0:
            sources[i] = 1
        if sources[i] >= 2:
            tokens[i], counts[i] = ngram_draft, num_ngram
        else:
            tokens[i, :num_neural], counts[i] = neural_draft[:num_neural], num_neural
        if row is not None and args.num_sampled[i] > 0:
            row[0] = mean
            row[1] = 1 + (0 if sources[i] == 2 else num_neural)
    return tokens, counts, sources
