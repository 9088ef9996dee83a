"""The reference of lookups and steps, by scan and by index: docs/ops, docs/design/drafts.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array, row_of, valid_tokens
from ops.reference.ladder import draft
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


def common_suffix(tokens: list[int], end: int, cap: int) -> int:
    """L(end): length of the longest common suffix of tokens[0..end] and of all tokens, capped."""
    length = 0
    while length < min(cap, end + 1) and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


def draft_for(
    tokens: list[int],
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
) -> tuple[list[int], int]:
    """Returns the draft of one row, without costs, and the length of its match; ([], 0) if there is
    none."""
    lengths = [common_suffix(tokens, end, max_n) for end in range(len(tokens) - 1)]
    best = max(lengths, default=0)
    budget = min(k, max_len - len(tokens))
    if best < min_n or budget <= 0:
        return [], 0
    ends = [end for end, length in enumerate(lengths) if length == best]
    start = (ends[-1] if match_policy == LATEST else ends[0]) + 1
    grown = list(tokens)  # with overlap, a draft continues in its own tokens
    draft: list[int] = []
    while len(draft) < budget and start + len(draft) < len(grown):
        draft.append(grown[start + len(draft)])
        if overlap:
            grown.append(draft[-1])
    return draft, best


def affordable(costs: list[int], limit: int) -> int:
    """Returns the largest number of first costs whose sum does not exceed the limit."""
    count = 0
    while count < len(costs) and sum(costs[: count + 1]) <= limit:
        count += 1
    return count


class LookupResult(NamedTuple):
    """The result of a lookup in one row."""

    tokens: list[int]
    """The draft; with `fill` also the tokens that continue it."""
    num_drafts: int
    """The number of draft tokens."""
    costs: list[int]
    """Costs of the draft tokens; empty without costs."""
    match_len: int


NO_DRAFT = LookupResult([], 0, [], 0)
LookUp = Callable[[list[int]], LookupResult]


def scan(a: Arguments, k: int) -> LookUp:
    """Returns the lookup of the operators without an index."""
    lookup = a.min_n, a.max_n, k, a.match_policy, a.overlap
    match_costs = getattr(a, "match_costs", None)  # operators with an index have none

    def look_up(tokens: list[int]) -> LookupResult:
        draft, match = draft_for(tokens, *lookup, a.max_len)
        if not draft:
            return NO_DRAFT
        count, costs = len(draft), []
        if match_costs is not None:
            costs = [int(match_costs[min(match + j, 15)]) for j in range(len(draft))]
            count = affordable(costs, a.cost_limit)
        output = draft_for(tokens, *lookup, UNLIMITED)[0] if a.fill else draft[:count]
        return LookupResult(output, count, costs[:count], match if count else 0)

    return look_up


class Drafts(NamedTuple):
    """The tensors that a lookup writes: [B,k], [B], [B], and [B,k] uint8."""

    token_ids: Array
    counts: Array
    match_len: Array
    costs: Array | None

    def write(self, i: int, result: LookupResult, unused: int) -> None:
        """Writes the result of request ``i``, and ``unused`` to the other places."""
        self.token_ids[i] = unused
        self.token_ids[i, : len(result.tokens)] = result.tokens
        self.counts[i] = result.num_drafts
        self.match_len[i] = result.match_len
        if self.costs is not None:
            self.costs[i] = NO_COST
            self.costs[i, : result.num_drafts] = result.costs


def new_drafts(batch: int, k: int, costs: Array | None) -> Drafts:
    tokens, counts = np.empty((batch, k), np.int32), np.empty(batch, np.int32)
    return Drafts(tokens, counts, np.empty_like(counts), costs)


def propose(a: Arguments, look_up: LookUp, drafts: Drafts) -> None:
    """Looks up each request and writes its draft."""
    num_rows, capacity = a.token_ids.shape
    for i in range(len(drafts.counts)):
        row = row_of(a, i)
        if not 0 <= row < num_rows or not 1 <= a.num_tokens[row] <= capacity:
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        tokens = [int(token) for token in a.token_ids[row, : a.num_tokens[row]]]
        wants_draft = len(tokens) >= 2 and (a.num_sampled is None or a.num_sampled[i] > 0)
        result = look_up(tokens) if wants_draft else NO_DRAFT
        drafts.write(i, result, tokens[-1] if a.fill else NO_TOKEN)


@reference_operator
def ngram_propose_(a: Arguments) -> None:
    """Same as ``ngram_propose``; draft_token_ids [B,k] int32 or int64, num_draft_tokens and
    match_len [B], and draft_costs [B,k] uint8 are written; no results."""
    drafts = Drafts(a.draft_token_ids, a.num_draft_tokens, a.match_len, a.draft_costs)
    propose(a, scan(a, a.draft_token_ids.shape[1]), drafts)


@reference_operator
def ngram_propose(a: Arguments) -> tuple[Array, Array, Array]:
    """token_ids [R,S], num_tokens [R], row_indices and num_sampled [B], match_costs [16] uint8 ->
    draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    drafts = new_drafts(len(a.token_ids if a.row_indices is None else a.row_indices), a.k, None)
    propose(a, scan(a, a.k), drafts)
    return drafts[:3]


@reference_operator
def ngram_step_(a: Arguments) -> tuple[Array, Array, Array, Array, Array]:
    """token_ids [R,S], num_tokens [R] and draft_costs [B,k] uint8 are written; sampled_token_ids
    [B,M], discard and row_indices [B], match_costs [16] uint8 -> next_token_ids [B], num_sampled
    [B], draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    return append_and_draft(a, scan(a, a.k))


def append_and_draft(a: Arguments, look_up: LookUp) -> tuple[Array, Array, Array, Array, Array]:
    """``ngram_step_`` with any lookup."""
    num_rows, capacity = a.token_ids.shape
    batch = len(a.sampled_token_ids)
    next_token_ids = np.zeros(batch, np.int32)
    num_sampled = np.zeros(batch, np.int32)
    drafts = new_drafts(batch, a.k, a.draft_costs)
    for i in range(batch):
        row, valid = row_of(a, i), valid_tokens(a, i)
        num_sampled[i] = len(valid)
        if not 0 <= row < num_rows or not 0 <= int(a.num_tokens[row]) <= capacity:
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        length = int(a.num_tokens[row])
        known = [*(int(token) for token in a.token_ids[row, :length]), *valid]
        next_token_ids[i] = known[-1] if known else 0
        grown = min(len(known), capacity)
        a.token_ids[row, length:grown] = known[length:grown]
        if a.advance:
            a.num_tokens[row] = grown
        result = look_up(known[:grown]) if valid and grown >= 2 else NO_DRAFT
        drafts.write(i, result, known[-1] if a.fill and known else NO_TOKEN)
    return next_token_ids, num_sampled, *drafts[:3]


def select_lookup(a: Arguments) -> LookUp:
    """Returns the lookup of the operators with an index: a scan, or a ladder."""
    if not a.ladder:
        return scan(a, a.k)
    table = [] if a.costs is None else a.costs.tolist()
    limit = None if a.costs is None else a.cost_limit

    def look_up(tokens: list[int]) -> LookupResult:
        if a.k == 0 or a.max_len <= len(tokens):
            return NO_DRAFT
        ids, costs, match = draft(tokens, a.k, table, limit, a.overlap, a.max_len, a.token_logits)
        output = draft(tokens, a.k, [], None, a.overlap, UNLIMITED)[0] if a.fill else ids
        return LookupResult(output, len(ids), costs, match if ids else 0)

    return look_up


@reference_operator
def ngram_index_propose_(a: Arguments) -> tuple[Array, Array, Array]:
    """Same as ``ngram_propose``. index [W] is not written: its contents are specific to the
    implementation."""
    batch = len(a.token_ids if a.row_indices is None else a.row_indices)
    drafts = new_drafts(batch, a.k, a.draft_costs)
    propose(a, select_lookup(a), drafts)
    return drafts[:3]


@reference_operator
def ngram_index_step_(a: Arguments) -> tuple[Array, Array, Array, Array, Array]:
    """Same as ``ngram_step_``. index [W] is not written: its contents are specific to the
    implementation."""
    return append_and_draft(a, select_lookup(a))


@reference_operator
def ngram_index_append_(a: Arguments) -> None:
    """token_ids [R,S], num_tokens [R], row_indices and slot_indices [B], index [W]; no results."""


@reference_operator
def ngram_index_reset_(a: Arguments) -> None:
    """index [W], slot_indices [N]; no results."""
