"""A reference of HostDrafting, which runs each step synchronously with the reference operators."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.host_drafting import Stop
from ops.reference.drafting import ngram_index_propose_
from ops.reference.store import HEADER_WORDS, MASK32, Store, ngram_store_step_

UNLIMITED = 2**63 - 1


@dataclass
class _Request:
    text: list[int]
    scope: int
    prompt_scope: int | None
    stop: Stop
    num_stored: int = 0  # including the prompt, which the store does not contain
    text_end: int | None = None  # number of tokens up to the stop


@dataclass
class Reference:
    """Runs steps synchronously. The text of a step is stored ``lag`` steps later. When a request
    ends, all of its text up to its stop is stored."""

    config: NgramConfig
    store: NgramStore | None
    lag: int
    shape: tuple[int, int]
    """Number of rows and row capacity."""
    fill: bool = True
    rows: dict[int, _Request] = field(default_factory=dict)
    pending_steps: deque[list[tuple[_Request, int, int]]] = field(default_factory=deque)
    """For each step whose text is not stored yet: request, row, and row length."""

    def begin(
        self,
        row: int,
        text: list[int],
        scope: int = 0,
        stop: Stop | None = None,
        prompt_scope: int | None = None,
    ) -> None:
        self.rows[row] = _Request(list(text), scope, prompt_scope, stop or Stop(), len(text))

    def end(self, row: int) -> None:
        request = self.rows.pop(row)
        if self.store is None:
            return
        if request.text_end is not None:
            self._store_texts([(request, row, request.text_end)])
        slots = [row] if request.prompt_scope is None else [row, self._prompt_slot(row)]
        for slot in slots:
            Store(self.store.tensor).close_slot(slot)  # type: ignore[arg-type]

    def step(self, rows: list[int], sampled: list[list[int]]) -> list[Any]:
        for row, tokens in zip(rows, sampled, strict=True):
            request = self.rows[row]
            for token in tokens[: self.shape[1] - len(request.text)]:
                request.text.append(token)
                is_end = (
                    token in request.stop.tokens or len(request.text) >= request.stop.max_length
                )
                if is_end and request.text_end is None:
                    request.text_end = len(request.text)
        drafts = self._draft(rows, [len(tokens) for tokens in sampled])
        if not rows:  # a dummy run does not count as a step
            return drafts
        self.pending_steps.append([(self.rows[row], row, len(self.rows[row].text)) for row in rows])
        if len(self.pending_steps) > self.lag:
            self._store_texts(
                [
                    (request, row, min(length, request.text_end or length))
                    for request, row, length in self.pending_steps.popleft()
                    if self.rows.get(row) is request
                ]
            )
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
        cost_options = config.cost_table, config.cost_limit, costs, self.fill, config.token_logits
        results = ngram_index_propose_(*inputs, *lookup, True, *cost_options)
        if self.store is None:
            return [array.tolist() for array in (*results, costs)]
        store_options = UNLIMITED, config.store_cost_table, config.cost_limit, self.fill
        drafts = *results, costs, *store_options, config.token_logits
        prompt_scopes = [self.rows[row].prompt_scope for row in rows]
        calls = [(num_sampled, [self.rows[row].scope for row in rows])]
        has_prompt_scope = np.array([scope is not None for scope in prompt_scopes], bool)
        calls.append((num_sampled * has_prompt_scope, [scope or 0 for scope in prompt_scopes]))
        for counted, scopes in calls:
            scratch = np.array(self.store.tensor)  # a copy, because the operator also inserts text
            requests = np.array(rows), None, np.array(scopes)
            ngram_store_step_(token_ids, lengths, counted, scratch, *requests, *drafts)
        return [array.tolist() for array in (*results, costs)]

    def _prompt_slot(self, row: int) -> int:
        assert self.store is not None
        return self.store.num_slots // 2 + row

    def _store_texts(self, texts: list[tuple[_Request, int, int]]) -> None:
        """Stores the text of rows up to a length: all in their scopes, then in prompt scopes."""
        if self.store is None:
            return
        texts = [text for text in texts if text[2] > text[0].num_stored]
        for request, row, length in texts:
            self._store_text(request, row, length, request.scope)
        for request, row, length in texts:
            if request.prompt_scope is not None:
                self._store_text(request, self._prompt_slot(row), length, request.prompt_scope)
            request.num_stored = length

    def _store_text(self, request: _Request, slot: int, length: int, scope: int) -> None:
        assert self.store is not None
        store = Store(self.store.tensor)  # type: ignore[arg-type]
        text = [token & MASK32 for token in request.text[:length]]
        if not store.slot_matches(slot, text, scope):
            store.close_slot(slot)
            store.set_slot(slot, 0, request.num_stored)
        store.append_to_slot(slot, text[request.num_stored :], scope)

    def has_same_text_as(self, store: NgramStore) -> bool:
        """Returns whether the stores are equal except for their headers."""
        expected, actual = (np.asarray(s.tensor)[HEADER_WORDS:] for s in (self.store, store))
        return np.array_equal(expected, actual)
