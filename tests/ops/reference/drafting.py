"""References of the lookups, defined in docs/ops/ngram_propose.md and docs/ops/ngram_step.md."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array, get_valid_tokens, row_of
from ops.schema import Arguments, reference_operator

__all__ = [
    "ngram_propose",
    "ngram_propose_",
    "ngram_step_",
]

LATEST = 1
NO_TOKEN = -1


def measure_common_suffix(tokens: list[int], end: int, max_length: int) -> int:
    """Returns L(end): the length of the longest common suffix of tokens[0..end] and of all
    tokens, at most ``max_length``."""
    limit = min(max_length, end + 1)
    for length in range(limit):
        if tokens[end - length] != tokens[-1 - length]:
            return length
    return limit


def compute_draft(args: Arguments, tokens: list[int], k: int) -> tuple[list[int], int]:
    """Returns at most k tokens that may follow a row, and the match length; ([], 0) for none."""
    lengths = [measure_common_suffix(tokens, end, args.max_n) for end in range(len(tokens) - 1)]
    match_len = max(lengths, default=0)
    if match_len < args.min_n:
        return [], 0
    ends = [end for end, length in enumerate(lengths) if length == match_len]
    start = (ends[-1] if args.match_policy == LATEST else ends[0]) + 1
    sequence = list(tokens)  # with overlap, followed by the draft, which then repeats itself
    draft: list[int] = []
    while len(draft) < k and start + len(draft) < len(sequence):
        draft.append(sequence[start + len(draft)])
        if args.overlap:
            sequence.append(draft[-1])
    draft = list(takewhile(lambda token: 0 <= token < args.vocab_size, draft))
    return draft, match_len if draft else 0


def padding_after(args: Arguments, newest_token: int) -> int:
    """Returns the id for the positions that are not filled from the row."""
    if not args.fill or args.vocab_size <= 0:
        return NO_TOKEN
    return newest_token if 0 <= newest_token < args.vocab_size else 0


class Drafts(NamedTuple):
    """The tensors that a lookup writes: [B,k], [B], [B]."""

    token_ids: Array
    counts: Array
    match_len: Array

    def write(self, i: int, tokens: list[int], num_drafted: int, match_len: int, pad: int) -> None:
        """Writes the tokens of request ``i``, of which the first ``num_drafted`` are its draft, and
        ``pad`` in the positions after them."""
        self.token_ids[i] = pad
        self.token_ids[i, : len(tokens)] = tokens
        self.counts[i] = num_drafted
        self.match_len[i] = match_len

    def look_up(self, args: Arguments, i: int, tokens: list[int], newest_token: int) -> None:
        """Writes the draft of request ``i`` for a row with these tokens."""
        budget = args.max_len - len(tokens)
        if budget <= 0:
            self.write_no_draft(i, padding_after(args, newest_token))
            return
        continuation, match_len = compute_draft(args, tokens, self.token_ids.shape[1])
        num_drafted = min(len(continuation), budget)
        written = continuation if args.fill else continuation[:num_drafted]
        self.write(i, written, num_drafted, match_len, padding_after(args, newest_token))

    def write_no_draft(self, i: int, pad: int) -> None:
        self.write(i, [], 0, 0, pad)


def make_drafts(batch: int, k: int) -> Drafts:
    tokens, counts = np.empty((batch, k), np.int32), np.empty(batch, np.int32)
    return Drafts(tokens, counts, np.empty_like(counts))


def propose_drafts(args: Arguments, drafts: Drafts) -> None:
    """Looks up each request and writes its draft."""
    num_rows, capacity = args.token_ids.shape
    for i in range(len(drafts.counts)):
        row = row_of(args, i)
        if not 0 <= row < num_rows or not 1 <= args.num_tokens[row] <= capacity:
            drafts.write_no_draft(i, NO_TOKEN)
            continue
        tokens = [int(token) for token in args.token_ids[row, : args.num_tokens[row]]]
        if args.num_sampled is None or args.num_sampled[i] > 0:
            drafts.look_up(args, i, tokens, tokens[-1])
        else:
            drafts.write_no_draft(i, padding_after(args, tokens[-1]))


@reference_operator
def ngram_propose_(args: Arguments) -> None:
    """Same as ``ngram_propose``; draft_token_ids [B,k] int32 or int64, num_draft_tokens and
    match_len [B] are written; no results."""
    propose_drafts(args, Drafts(args.draft_token_ids, args.num_draft_tokens, args.match_len))


@reference_operator
def ngram_propose(args: Arguments) -> tuple[Array, Array, Array]:
    """token_ids [R,S], num_tokens [R], row_indices and num_sampled [B] -> draft_token_ids [B,k],
    num_draft_tokens [B], match_len [B]; all int32."""
    batch = len(args.token_ids if args.row_indices is None else args.row_indices)
    drafts = make_drafts(batch, args.k)
    propose_drafts(args, drafts)
    return drafts


@reference_operator
def ngram_step_(args: Arguments) -> tuple[Array, Array, Array, Array, Array]:
    """token_ids [R,S] and num_tokens [R] are written; sampled_token_ids [B,M], discard and
    row_indices [B] -> next_token_ids [B], num_sampled [B], draft_token_ids [B,k], num_draft_tokens
    [B], match_len [B]; all int32."""
    num_rows, capacity = args.token_ids.shape
    batch = len(args.sampled_token_ids)
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    drafts = make_drafts(batch, args.k)
    for i in range(batch):
        row, new_tokens = row_of(args, i), get_valid_tokens(args, i)
        num_sampled[i] = len(new_tokens)
        if not 0 <= row < num_rows or not 0 <= int(args.num_tokens[row]) <= capacity:
            drafts.write_no_draft(i, NO_TOKEN)
            continue
        length = int(args.num_tokens[row])
        tokens = [*(int(token) for token in args.token_ids[row, :length]), *new_tokens]
        if not tokens:
            drafts.write_no_draft(i, NO_TOKEN)
            continue
        next_token_ids[i] = tokens[-1]
        new_length = min(len(tokens), capacity)
        args.token_ids[row, length:new_length] = tokens[length:new_length]
        if args.advance:
            args.num_tokens[row] = new_length
        if new_tokens:
            drafts.look_up(args, i, tokens[:new_length], tokens[-1])
        else:
            drafts.write_no_draft(i, padding_after(args, tokens[-1]))
    return next_token_ids, num_sampled, *drafts
