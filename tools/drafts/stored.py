"""Drafts from a store, recorded from its kernel at every place at which one may be asked for.

The contents of a store at a place do not depend on earlier drafts, since accepted text is always
the recording's. So one pass over the conversations, in order and token by token, gives the drafts
for any table of costs and any limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ngram_npu import _C, NgramStore
from ngram_npu.replay import TokenRequest

from tools.drafts.simulator import MAX_K, IntArray

ROWS, COLUMNS = 16, 56


@dataclass(frozen=True)
class StoreWalks:
    """The N places of some completions, and the store's draft of at most `MAX_K` tokens there.

    Attributes:
        match: [N, K], the table's row for the draft's token j.
        column: [N, K], the table's column for it.
        length: [N], tokens that the store has there, 0 without a hit.
        right: [N], how many leading draft tokens agree with the recording.
    """

    match: IntArray
    column: IntArray
    length: IntArray
    right: IntArray


def record(requests: Sequence[TokenRequest], make_store: Callable[[], NgramStore]) -> StoreWalks:
    """Of all completions of these conversations, one after the other, and of one store."""
    stores = [make_store(), make_store()]
    tables = [np.empty((ROWS, COLUMNS), np.uint8) for _ in stores]
    tables[0][:] = np.arange(ROWS)[:, None]
    tables[1][:] = np.arange(COLUMNS)
    outs = [
        {
            "draft_token_ids": np.empty((1, MAX_K), np.int32),
            "num_draft_tokens": np.empty(1, np.int32),
            "match_len": np.empty(1, np.int32),
            "draft_costs": np.empty((1, MAX_K), np.uint8),
        }
        for _ in stores
    ]
    places = sum(end - start - 1 for request in requests for start, end in request.spans())
    match, column, drafted = (np.zeros((places, MAX_K), np.int64) for _ in range(3))
    length, right = np.zeros(places, np.int64), np.zeros(places, np.int64)
    one, slot = np.ones(1, np.int32), np.zeros(1, np.int32)
    at = 0
    for request in requests:
        tokens = request.tokens()
        row = tokens[None]
        for start, end in request.spans():
            first = at
            for x in range(start + 1, end):
                for store, table, out in zip(stores, tables, outs, strict=True):
                    out["num_draft_tokens"][0] = 0
                    _C.ngram_store_step_(
                        row,
                        np.array([x], np.int32),
                        one,
                        store.tensor,
                        costs=table,
                        cost_limit=1 << 20,
                        **out,
                    )
                length[at] = outs[0]["num_draft_tokens"][0]
                match[at] = outs[0]["draft_costs"]
                column[at] = outs[1]["draft_costs"]
                drafted[at] = outs[0]["draft_token_ids"]
                at += 1
            x = np.arange(start + 1, end)
            j = np.arange(MAX_K)
            truth = tokens[np.minimum(x[:, None] + j, len(tokens) - 1)]
            agrees = (drafted[first:at] == truth) & (j < (end - x)[:, None])
            agrees &= j < length[first:at, None]
            right[first:at] = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
        for store in stores:
            _C.ngram_store_finish_(store.tensor, slot)
    none = np.arange(MAX_K) >= length[:, None]
    match[none] = column[none] = 0
    return StoreWalks(match, column, length, right)
