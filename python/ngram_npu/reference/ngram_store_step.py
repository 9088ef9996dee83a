"""Reference of ``ngram_store_step_``; the definition is in docs/ops/ngram_store_step.md."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, repeat

from ngram_npu.reference.ladder import SIZES, cost_of
from ngram_npu.reference.ngram_propose import NO_TOKEN, Array, Drafts, Found, affordable
from ngram_npu.reference.ngram_store import (
    BLOCK,
    DRAFT_TOKENS,
    DRAFTS,
    HITS,
    LOOKUPS,
    MASK32,
    MASK64,
    Hit,
    Store,
    Tokens,
    opened,
)

BACKLOG = 4096
FIRST_RIGHT = (1, 2, 3, 5, 9)
FIRST_WRONG = (1, 2, 4)

POWERS = [65536]
while len(POWERS) < 256:
    POWERS.append(POWERS[-1] * 62757 // 65536)


def promise(costs: list[int]) -> int:
    return sum(POWERS[c] for c in accumulate(costs) if c < 256)


def longest_hit(store: Store, row: Tokens, scope: int) -> Hit | None:
    for n in SIZES:
        if n <= len(row) and (hit := store.look_up(store.gram(row, n, scope), row)):
            return hit
    return None


def costs_of(
    store: Store, hit: Hit, text: Tokens, costs: Array, token_logits: Array | None
) -> list[int]:
    """What the tokens of a draft cost: ``text`` is the row's last token, then the draft."""
    first = 32 + 4 * bisect_right(FIRST_RIGHT, hit.right) + bisect_right(FIRST_WRONG, hit.wrong)
    columns = [store.byte(hit.place + j) % 32 if j else first for j in range(len(text) - 1)]
    cells = [int(costs[min(hit.m + j, 15), column]) for j, column in enumerate(columns)]
    return [cost_of(*given) for given in zip(cells, repeat(token_logits), text, text[1:])]


def signed(token: int) -> int:
    return token - (token >> 31 << 32)


def ngram_store_step_(
    token_ids: Array,
    num_tokens: Array,
    num_sampled: Array,
    store: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    scopes: Array | None,
    draft_token_ids: Array,
    num_draft_tokens: Array,
    match_len: Array,
    draft_costs: Array,
    max_len: int,
    costs: Array,
    cost_limit: int,
    fill: bool = False,
    token_logits: Array | None = None,
) -> None:
    """token_ids [R,S], num_tokens [R], num_sampled, row_indices, slot_indices and scopes [B], costs
    [16,56] uint8; store [W], draft_token_ids [B,k], num_draft_tokens and match_len [B] and
    draft_costs [B,k] uint8 are written; no results."""
    opened_store = opened(store) if len(num_sampled) else None
    if opened_store is None:
        return
    num_rows, capacity = token_ids.shape
    k = draft_token_ids.shape[1]
    drafts = Drafts(draft_token_ids, num_draft_tokens, match_len, draft_costs)

    def item(array: Array | None, i: int, default: int) -> int:
        return default if array is None else int(array[i])

    requests = []
    for i, sampled in enumerate(map(int, num_sampled)):
        at = item(row_indices, i, i)
        if not 0 <= at < num_rows or sampled <= 0 or not 1 <= num_tokens[at] <= capacity:
            continue
        row = [int(token) & MASK32 for token in token_ids[at, : num_tokens[at]]]
        scope = item(scopes, i, 0) & MASK64
        requests.append((i, row, sampled, item(slot_indices, i, at), scope))

    for i, row, _, _, scope in requests:
        opened_store.count(LOOKUPS)
        hit = longest_hit(opened_store, row, scope)
        if hit is None:
            continue
        opened_store.count(HITS)
        place, left = hit.place, opened_store.fill(hit.place // BLOCK) - hit.place % BLOCK
        text = [signed(opened_store.token(place + j)) for j in range(min(k, left))]
        most = max(0, min(len(text), max_len - len(row)))
        paid = costs_of(opened_store, hit, [row[-1], *text[:most]], costs, token_logits)
        count = affordable(paid, cost_limit)
        own = [int(cost) for cost in draft_costs[i, : max(0, num_draft_tokens[i])]]
        if promise(paid[:count]) <= promise(own):
            continue
        opened_store.count(DRAFTS)
        opened_store.count(DRAFT_TOKENS, count)
        found = Found(text if fill else text[:count], count, paid[:count], hit.m)
        drafts.put(i, found, signed(row[-1]) if fill else NO_TOKEN)

    backlog = BACKLOG
    for _, row, sampled, slot, scope in requests:
        if not 0 <= slot < opened_store.num_slots:
            continue
        if not opened_store.holds(slot, row, scope):
            opened_store.close(slot)
            opened_store.set_slot(slot, 0, max(0, len(row) - sampled))
        _, length = opened_store.slot(slot)
        waiting = max(0, len(row) - sampled - length)
        taken = min(waiting, backlog)
        backlog -= taken
        new = min(sampled, len(row) - length)
        opened_store.write(slot, row[length : length + taken + new], scope)
