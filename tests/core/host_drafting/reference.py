"""A reference of a drafter with a store, which runs each step with the reference operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ngram_npu import NgramConfig, NgramStore
from ops.reference.drafting import ngram_index_propose_
from ops.reference.store import MASK32, Store, ngram_store_step_

UNLIMITED = 2**63 - 1


@dataclass
class _Request:
    text: list[int]
    scope: int
    num_stored: int  # including the prompt, which the store does not contain


@dataclass
class Reference:
    """Drafts after each step, and then stores the text of the step."""

    config: NgramConfig
    store: NgramStore | None
    shape: tuple[int, int]
    """Number of rows and row capacity."""
    rows: dict[int, _Request] = field(default_factory=dict)

    def begin(self, row: int, text: list[int], scope: int = 0) -> None:
        self.rows[row] = _Request(list(text), scope, len(text))

    def end(self, row: int) -> None:
        del self.rows[row]
        if self.store is not None:
            Store(self.store.tensor).close_slot(row)  # type: ignore[arg-type]

    def step(self, rows: list[int], sampled: list[list[int]]) -> list[Any]:
        for row, tokens in zip(rows, sampled, strict=True):
            text = self.rows[row].text
            text += tokens[: self.shape[1] - len(text)]
        drafts = self._draft(rows, [len(tokens) for tokens in sampled])
        for row in rows:
            self._store_text(row)
        return drafts

    def _draft(self, rows: list[int], counts: list[int]) -> list[Any]:
        config, k = self.config, self.config.k
        token_ids, lengths = np.zeros(self.shape, np.int32), np.zeros(self.shape[0], np.int32)
        for row, request in self.rows.items():
            token_ids[row, : len(request.text)] = request.text
            lengths[row] = len(request.text)
        costs = np.zeros((len(rows), k), np.uint8)
        num_sampled = np.array(counts, np.int32)
        no_index = np.zeros(0, np.int32)
        inputs = token_ids, lengths, no_index, np.array(rows), None, num_sampled
        lookup = 1, 16, k, 1, config.overlap, UNLIMITED
        cost_options = config.cost_table, config.cost_limit, costs, False, config.token_logits
        results = ngram_index_propose_(*inputs, *lookup, True, *cost_options)
        if self.store is not None:
            store_options = UNLIMITED, config.store_cost_table, config.cost_limit, False
            drafts = *results, costs, *store_options, config.token_logits
            scratch = np.array(self.store.tensor)  # a copy, because the operator also inserts text
            scopes = np.array([self.rows[row].scope for row in rows])
            requests = np.array(rows), None, scopes
            ngram_store_step_(token_ids, lengths, num_sampled, scratch, *requests, *drafts)
        return [array.tolist() for array in (*results, costs)]

    def _store_text(self, row: int) -> None:
        request = self.rows[row]
        if self.store is None or len(request.text) == request.num_stored:
            return
        store = Store(self.store.tensor)  # type: ignore[arg-type]
        text = [token & MASK32 for token in request.text]
        if not store.slot_matches(row, text, request.scope):
            store.close_slot(row)
            store.set_slot(row, 0, request.num_stored)
        store.append_to_slot(row, text[request.num_stored :], request.scope)
        request.num_stored = len(text)
