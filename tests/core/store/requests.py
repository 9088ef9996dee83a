"""A request that uses a store through the operator ``ngram_store_step_``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ngram_npu import _C, NgramStore

COSTS = np.full((16, 56), 8, np.uint8)


class Request:
    """A row that grows, and its slot in a store."""

    def __init__(
        self, store: NgramStore, slot: int, scope: int = 0, prompt: Sequence[int] = (1,)
    ) -> None:
        self.store, self.slot, self.scope, self.row = store, slot, scope, list(prompt)

    def append(self, tokens: Sequence[int], k: int = 4) -> list[int]:
        """Appends the tokens in one step and returns the draft."""
        self.row += tokens
        draft, count = np.full((1, k), -1, np.int32), np.zeros(1, np.int32)
        _C.ngram_store_step_(
            np.array([self.row], np.int32),
            np.array([len(self.row)], np.int32),
            np.array([len(tokens)], np.int32),
            np.asarray(self.store.tensor),
            slot_indices=np.array([self.slot], np.int32),
            scopes=np.array([self.scope], np.int64),
            draft_token_ids=draft,
            num_draft_tokens=count,
            match_len=np.zeros(1, np.int32),
            draft_costs=np.full((1, k), 255, np.uint8),
            costs=COSTS,
        )
        drafted_tokens: list[int] = draft[0, : count[0]].tolist()
        return drafted_tokens

    def finish(self) -> None:
        self.store.finish(np.array([self.slot], np.int32))
