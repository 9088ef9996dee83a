"""The reference of lookups and steps, by scan and by index: docs/ops, docs/design/drafts.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from ops.reference.bookkeeping import Array
from ops.reference.ladder import draft

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


def scan(
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    match_costs: Array | None,
    cost_limit: int,
    fill: bool,
) -> LookUp:
    """Returns the lookup of the operators without an index."""
    lookup = min_n, max_n, k, match_policy, overlap

    def look_up(tokens: list[int]) -> LookupResult:
        draft, match = draft_for(tokens, *lookup, max_len)
        if not draft:
            return NO_DRAFT
        count, costs = len(draft), []
        if match_costs is not None:
            costs = [int(match_costs[min(match + j, 15)]) for j in range(len(draft))]
            count = affordable(costs, cost_limit)
        output = draft_for(tokens, *lookup, UNLIMITED)[0] if fill else draft[:count]
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


def propose(
    token_ids: Array,
    num_tokens: Array,
    row_indices: Array | None,
    num_sampled: Array | None,
    fill: bool,
    look_up: LookUp,
    drafts: Drafts,
) -> None:
    """Looks up each request and writes its draft."""
    num_rows, capacity = token_ids.shape
    for i in range(len(drafts.counts)):
        row = i if row_indices is None else int(row_indices[i])
        if not 0 <= row < num_rows or not 1 <= num_tokens[row] <= capacity:
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        tokens = [int(token) for token in token_ids[row, : num_tokens[row]]]
        wants_draft = len(tokens) >= 2 and (num_sampled is None or num_sampled[i] > 0)
        drafts.write(
            i, look_up(tokens) if wants_draft else NO_DRAFT, tokens[-1] if fill else NO_TOKEN
        )


def ngram_propose_(
    token_ids: Array,
    num_tokens: Array,
    row_indices: Array | None,
    num_sampled: Array | None,
    min_n: int,
    max_n: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    match_costs: Array | None,
    cost_limit: int,
    fill: bool,
    draft_token_ids: Array,
    num_draft_tokens: Array,
    match_len: Array,
    draft_costs: Array | None,
    workspace: Array | None,
) -> None:
    """Same as ``ngram_propose``; draft_token_ids [B,k] int32 or int64, num_draft_tokens and
    match_len [B], and draft_costs [B,k] uint8 are written; no results."""
    k = draft_token_ids.shape[1]
    look_up = scan(
        min_n, max_n, k, match_policy, overlap, max_len, match_costs, cost_limit, fill,
    )  # fmt: skip
    drafts = Drafts(draft_token_ids, num_draft_tokens, match_len, draft_costs)
    propose(token_ids, num_tokens, row_indices, num_sampled, fill, look_up, drafts)


def ngram_propose(
    token_ids: Array,
    num_tokens: Array,
    row_indices: Array | None,
    num_sampled: Array | None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    match_costs: Array | None = None,
    cost_limit: int = 40,
    fill: bool = False,
) -> tuple[Array, Array, Array]:
    """token_ids [R,S], num_tokens [R], row_indices and num_sampled [B], match_costs [16] uint8 ->
    draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    drafts = new_drafts(len(token_ids if row_indices is None else row_indices), k, None)
    ngram_propose_(
        token_ids, num_tokens, row_indices, num_sampled, min_n, max_n, match_policy, overlap,
        max_len, match_costs, cost_limit, fill, *drafts, None,
    )  # fmt: skip
    return drafts[:3]


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
    """``ngram_step_`` with any lookup."""
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
            drafts.write(i, NO_DRAFT, NO_TOKEN)
            continue
        length = int(num_tokens[row])
        known = [*(int(token) for token in token_ids[row, :length]), *valid]
        next_token_ids[i] = known[-1] if known else 0
        grown = min(len(known), capacity)
        token_ids[row, length:grown] = known[length:grown]
        if advance:
            num_tokens[row] = grown
        result = look_up(known[:grown]) if valid and grown >= 2 else NO_DRAFT
        drafts.write(i, result, known[-1] if fill and known else NO_TOKEN)
    return next_token_ids, num_sampled, *drafts[:3]


def select_lookup(
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    fill: bool,
    token_logits: Array | None = None,
) -> LookUp:
    """Returns the lookup of the operators with an index: a scan, or a ladder."""
    if not ladder:
        return scan(min_n, max_n, k, match_policy, overlap, max_len, None, cost_limit, fill)
    table = [] if costs is None else costs.tolist()
    limit = None if costs is None else cost_limit

    def look_up(tokens: list[int]) -> LookupResult:
        if k == 0 or max_len <= len(tokens):
            return NO_DRAFT
        ids, token_costs, match = draft(tokens, k, table, limit, overlap, max_len, token_logits)
        output = draft(tokens, k, [], None, overlap, UNLIMITED)[0] if fill else ids
        return LookupResult(output, len(ids), token_costs, match if ids else 0)

    return look_up


def ngram_index_propose_(
    token_ids: Array,
    num_tokens: Array,
    index: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    num_sampled: Array | None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    draft_costs: Array | None,
    fill: bool = False,
    token_logits: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Same as ``ngram_propose``. index [W] is not written: its contents are specific to the
    implementation."""
    lookup = min_n, max_n, k, match_policy, overlap, max_len
    look_up = select_lookup(*lookup, ladder, costs, cost_limit, fill, token_logits)
    batch = len(token_ids if row_indices is None else row_indices)
    drafts = new_drafts(batch, k, draft_costs)
    propose(token_ids, num_tokens, row_indices, num_sampled, fill, look_up, drafts)
    return drafts[:3]


def ngram_index_step_(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    index: Array,
    discard: Array | None,
    row_indices: Array | None,
    slot_indices: Array | None,
    advance: bool,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    draft_costs: Array | None,
    fill: bool = False,
    token_logits: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Same as ``ngram_step_``. index [W] is not written: its contents are specific to the
    implementation."""
    lookup = min_n, max_n, k, match_policy, overlap, max_len
    look_up = select_lookup(*lookup, ladder, costs, cost_limit, fill, token_logits)
    appended = token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size
    return append_and_draft(*appended, k, fill, look_up, draft_costs)


def ngram_index_append_(
    token_ids: Array,
    num_tokens: Array,
    index: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    min_n: int,
    max_n: int,
    match_policy: int,
    ladder: bool,
    outcomes: bool,
) -> None:
    """token_ids [R,S], num_tokens [R], row_indices and slot_indices [B], index [W]; no results."""


def ngram_index_reset_(index: Array, slot_indices: Array) -> None:
    """index [W], slot_indices [N]; no results."""
