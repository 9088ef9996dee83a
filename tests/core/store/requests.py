"""Requests that use a store by calling the operators directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ngram_npu import _C, NgramStore

COSTS = np.full((16, 56), 8, np.uint8)


class Request:
    """A row that grows, in one slot of a store."""

    def __init__(
        self, store: NgramStore, slot: int, scope: int = 0, prompt: Sequence[int] = (1,)
    ) -> None:
        self.store, self.slot, self.scope, self.row = store, slot, scope, list(prompt)

    def say(self, tokens: Sequence[int], k: int = 4) -> list[int]:
        """Appends the tokens in one step and returns the draft."""
        self.row += tokens
        return step(self.store, [self], [len(tokens)], k)[0]

    def finish(self) -> None:
        self.store.finish(np.array([self.slot], np.int32))


def step(
    store: NgramStore, requests: Sequence[Request], sampled: Sequence[int], k: int
) -> list[list[int]]:
    """Runs one step of several requests and returns the drafts."""
    rows = np.zeros((len(requests), max(len(r.row) for r in requests)), np.int32)
    for row, request in zip(rows, requests, strict=True):
        row[: len(request.row)] = request.row
    drafts = np.full((len(requests), k), -1, np.int32)
    counts = np.zeros(len(requests), np.int32)
    words: Any = store.tensor
    _C.ngram_store_step_(
        rows,
        np.array([len(r.row) for r in requests], np.int32),
        np.array(sampled, np.int32),
        np.asarray(words),
        slot_indices=np.array([r.slot for r in requests], np.int32),
        scopes=np.array([r.scope for r in requests], np.int64),
        draft_token_ids=drafts,
        num_draft_tokens=counts,
        match_len=np.zeros(len(requests), np.int32),
        draft_costs=np.full((len(requests), k), 255, np.uint8),
        costs=COSTS,
    )
    return [draft[:n].tolist() for draft, n in zip(drafts, counts.tolist(), strict=True)]
