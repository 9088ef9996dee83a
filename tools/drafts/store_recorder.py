"""What a store drafts at every place of recorded completions, as the kernel itself finds it.

The table of costs is an argument of the operator, and a draft's costs are its result. So a table
whose entries are the numbers of their rows tells the row of every drafted token, and one of the
numbers of columns the column. Conversations come one after the other, and each in pieces of one
token, as if no draft had been right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramStore
from ngram_npu.replay import TokenRequest

from tools.drafts.simulator import MAX_K, IntArray

SHAPE = (16, 56)
ROWS, COLUMNS = np.indices(SHAPE).astype(np.uint8)
NO_LIMIT = 2**31 - 1
NO_SLOT = np.array([-1], np.int32)  # which drafts and enters nothing
SLOT = np.array([0], np.int32)


@dataclass(frozen=True)
class StoreDrafts:
    """The N places of some completions at which the store has a draft, and that of `MAX_K` tokens.

    Attributes:
        row, column: [N, K], the cell of the table for each token.
        reached: [N, K], where a draft token meets the recording after none that was wrong.
        right: [N, K], those of them that agree.
    """

    row: IntArray
    column: IntArray
    reached: npt.NDArray[np.bool_]
    right: npt.NDArray[np.bool_]


def store_drafts(requests: Sequence[TokenRequest]) -> StoreDrafts:
    """Of all completions of these conversations, with a store that none of them is too much for."""
    store = NgramStore(1, max(4096, 2 * sum(request.num_tokens for request in requests)))
    parts = [_drafts_of(request, store) for request in requests]
    columns = zip(*parts, strict=True)
    return StoreDrafts(*(np.concatenate(list(column)) for column in columns))


def _drafts_of(
    request: TokenRequest, store: NgramStore
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    tokens = np.ascontiguousarray(request.tokens())[None]
    # A completion's first token comes from prefill.
    ends = [(x, end) for start, end in request.spans() for x in range(start + 1, end)]
    n = len(ends)
    rows, columns = np.zeros((2, n, MAX_K), np.uint8)
    drafts, counts = np.full((n, MAX_K), -1, np.int32), np.zeros(n, np.int32)
    scratch, one = np.zeros_like(drafts[:1]), np.ones(1, np.int32)
    for i, (x, _) in enumerate(ends):
        length, place = np.array([x], np.int32), slice(i, i + 1)
        passes = (NO_SLOT, ROWS, scratch, rows), (SLOT, COLUMNS, drafts[place], columns)
        for slot, table, found, costs in passes:
            counts[i] = 0
            _C.ngram_store_step_(
                tokens,
                length,
                one,
                store.tensor,
                row_indices=SLOT,
                slot_indices=slot,
                draft_token_ids=found,
                num_draft_tokens=counts[place],
                match_len=np.zeros(1, np.int32),
                draft_costs=costs[place],
                costs=table,
                cost_limit=NO_LIMIT,
            )
    store.finish(SLOT)
    j = np.arange(MAX_K)
    at, end = np.array(ends, np.int64).reshape(-1, 2).T
    truth = tokens[0, np.minimum(at[:, None] + j, tokens.size - 1)]
    drafted = (j < counts[:, None]) & (j < (end - at)[:, None])
    right = np.logical_and.accumulate(drafted & (drafts == truth), axis=1)
    reached = drafted & np.pad(right[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return rows.astype(np.int64), columns.astype(np.int64), reached, right
