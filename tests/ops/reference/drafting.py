"""References of lookups and steps, defined in docs/ops and docs/design/drafts.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array, get_valid_tokens, row_of
from ops.reference.ladder import make_ladder_draft
from ops.schema import Arguments, reference_operator

__all__ = [
    "ngram_index_append_",
    "ngram_index_propose_",
    "ngram_index_reset_",
    "ngram_index_step_",
    "ngram_propose",
    "ngram_propose_",
    "ngram_step_",
]

LATEST = 1
UNLIMITED = 2**63 - 1
NO_TOKEN = -1
NO_COST = 255


def measure_common_suffix(tokens: list[int], end: int, max_length: int) -> int:
    """Returns L(end): the length of the longest common suffix of tokens[0..end] and of all
    tokens, at most ``max_length``."""
    length = 0
    while length < min(max_length, end + 1) and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


def compute_draft(
    tokens: list[int],
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
) -> tuple[list[int], int]:
    """Returns a row's draft, without costs, and the match length; ([], 0) without a match."""
    lengths = [measure_common_suffix(tokens, end, max_n) for end in range(len(tokens) - 1)]
    match_len = max(lengths, default=0)
    budget = min(k, max_len - len(tokens))
    if match_len < min_n or budget <= 0:
        return [], 0
    ends = [end for end, length in enumerate(lengths) if length == match_len]
    start = (ends[-1] if match_policy == LATEST else ends[0]) + 1
    sequence = list(tokens)  # with overlap, followed by the draft, which then repeats itself
    draft: list[int] = []
    while len(draft) < budget and start + len(draft) < len(sequence):
        draft.append(sequence[start + len(draft)])
        if overlap:
            sequence.append(draft[-1])
    return draft, match_len


def count_affordable_tokens(costs: list[int], limit: int) -> int:
    """Returns how many of the first tokens a draft has whose costs add up to at most the limit."""
    count = 0
    while count < len(costs) and sum(costs[: count + 1]) <= limit:
        count += 1
    return count


class LookupResult(NamedTuple):
    """The result of a lookup in one row."""

    tokens: list[int]
    """The draft; with `fill` also the tokens that continue the draft."""
    num_drafts: int
    """The number of draft tokens."""
    costs: list[int]
    """Costs of the draft tokens; empty without costs."""
    match_len: int


NO_DRAFT = LookupResult([], 0, [], 0)
LookupFunction = Callable[[list[int]], LookupResult]


def make_scan(args: Arguments, k: int) -> LookupFunction:
    """Returns the lookup function of the operators without an index."""
    options = args.min_n, args.max_n, k, args.match_policy, args.overlap
    match_costs = getattr(args, "match_costs", None)  # operators with an index have none

    def look_up(tokens: list[int]) -> LookupResult:
        draft, match_len = compute_draft(tokens, *options, args.max_len)
        if not draft:
            return NO_DRAFT
        count, costs = len(draft), []
        if match_costs is not None:
            costs = [int(match_costs[min(match_len + j, 15)]) for j in range(len(draft))]
            count = count_affordable_tokens(costs, args.cost_limit)
        output = compute_draft(tokens, *options, UNLIMITED)[0] if args.fill else draft[:count]
        return LookupResult(output, count, costs[:count], match_len if count else 0)

    return look_up


class Drafts(NamedTuple):
    """The tensors that a lookup writes: [B,k], [B], [B], and [B,k] uint8."""

    token_ids: Array
    counts: Array
    match_len: Array
    costs: Array | None

    def write(self, i: int, result: LookupResult, unused: int) -> None:
        """Writes the result of request ``i``, and ``unused`` to the positions without a token."""
        self.token_ids[i] = unused
        self.token_ids[i, : len(result.tokens)] = result.tokens
        self.counts[i] = result.num_drafts
        self.match_len[i] = result.match_len
        if self.costs is not None:
            self.costs[i] = NO_COST
            self.costs[i, : result.num_drafts] = result.costs


def make_drafts(batch: int, k: int, costs: Array | None) -> Drafts:
    tokens, counts = np.empty((batch, k), np.int32), np.empty(batch, np.int32)
    return Drafts(tokens, counts, np.empty_like(counts), costs)


def propose_drafts(args: Arguments, look_up: LookupFunction, drafts: Drafts) -> None:
    """Looks up each request and writes its draft."""
    num_rows, capacity = args.token_ids.shape
    for i in range(len(drafts.counts)):
        row = row_of(args, i)
        if not 0 <= row < num_rows or not 1 <= args.num_tokens[row] <= capacity:
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        tokens = [int(token) for token in args.token_ids[row, : args.num_tokens[row]]]
        wants_draft = len(tokens) >= 2 and (args.num_sampled is None or args.num_sampled[i] > 0)
        result = look_up(tokens) if wants_draft else NO_DRAFT
        drafts.write(i, result, tokens[-1] if args.fill else NO_TOKEN)


@reference_operator
def ngram_propose_(args: Arguments) -> None:
    """Same as ``ngram_propose``; draft_token_ids [B,k] int32 or int64, num_draft_tokens and
    match_len [B], and draft_costs [B,k] uint8 are written; no results."""
    drafts = Drafts(args.draft_token_ids, args.num_draft_tokens, args.match_len, args.draft_costs)
    propose_drafts(args, make_scan(args, args.draft_token_ids.shape[1]), drafts)


@reference_operator
def ngram_propose(args: Arguments) -> tuple[Array, Array, Array]:
    """token_ids [R,S], num_tokens [R], row_indices and num_sampled [B], match_costs [16] uint8 ->
    draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    batch = len(args.token_ids if args.row_indices is None else args.row_indices)
    drafts = make_drafts(batch, args.k, None)
    propose_drafts(args, make_scan(args, args.k), drafts)
    return drafts[:3]


@reference_operator
def ngram_step_(args: Arguments) -> tuple[Array, Array, Array, Array, Array]:
    """token_ids [R,S], num_tokens [R] and draft_costs [B,k] uint8 are written; sampled_token_ids
    [B,M], discard and row_indices [B], match_costs [16] uint8 -> next_token_ids [B], num_sampled
    [B], draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    return append_and_draft(args, make_scan(args, args.k))


def append_and_draft(
    args: Arguments, look_up: LookupFunction
) -> tuple[Array, Array, Array, Array, Array]:
    """Runs ``ngram_step_`` with the lookup function ``look_up``."""
    num_rows, capacity = args.token_ids.shape
    batch = len(args.sampled_token_ids)
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    drafts = make_drafts(batch, args.k, args.draft_costs)
    for i in range(batch):
        row, new_tokens = row_of(args, i), get_valid_tokens(args, i)
        num_sampled[i] = len(new_tokens)
        if not 0 <= row < num_rows or not 0 <= int(args.num_tokens[row]) <= capacity:
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        length = int(args.num_tokens[row])
        tokens = [*(int(token) for token in args.token_ids[row, :length]), *new_tokens]
        next_token_ids[i] = tokens[-1] if tokens else 0
        new_length = min(len(tokens), capacity)
        args.token_ids[row, length:new_length] = tokens[length:new_length]
        if args.advance:
            args.num_tokens[row] = new_length
        wants_draft = new_tokens and new_length >= 2
        result = look_up(tokens[:new_length]) if wants_draft else NO_DRAFT
        drafts.write(i, result, tokens[-1] if args.fill and tokens else NO_TOKEN)
    return next_token_ids, num_sampled, *drafts[:3]


def select_lookup(args: Arguments) -> LookupFunction:
    """Returns the lookup function of the operators with an index: a scan, or a ladder."""
    if not args.ladder:
        return make_scan(args, args.k)
    table = [] if args.costs is None else args.costs.tolist()
    limit = None if args.costs is None else args.cost_limit

    def look_up(tokens: list[int]) -> LookupResult:
        if args.k == 0 or args.max_len <= len(tokens):
            return NO_DRAFT
        options = args.overlap, args.max_len, args.token_logits
        ids, costs, match_len = make_ladder_draft(tokens, args.k, table, limit, *options)
        output = ids
        if args.fill:
            output = make_ladder_draft(tokens, args.k, [], None, args.overlap, UNLIMITED)[0]
        return LookupResult(output, len(ids), costs, match_len if ids else 0)

    return look_up


@reference_operator
def ngram_index_propose_(args: Arguments) -> tuple[Array, Array, Array]:
    """Same as ``ngram_propose``. index [W] is not written: its contents are specific to the
    implementation."""
    batch = len(args.token_ids if args.row_indices is None else args.row_indices)
    drafts = make_drafts(batch, args.k, args.draft_costs)
    propose_drafts(args, select_lookup(args), drafts)
    return drafts[:3]


@reference_operator
def ngram_index_step_(args: Arguments) -> tuple[Array, Array, Array, Array, Array]:
    """Same as ``ngram_step_``. index [W] is not written: its contents are specific to the
    implementation."""
    return append_and_draft(args, select_lookup(args))


@reference_operator
def ngram_index_append_(args: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], row_indices and slot_indices [B], index [W]; no results."""


@reference_operator
def ngram_index_reset_(args: Arguments) -> None:
    """index [W], slot_indices [N]; no results."""
