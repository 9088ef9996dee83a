"""Generates random steps of requests that share a store.

All scopes use the same phrases, so text of another scope would match everywhere. A *mark*, which is
a token of a single request, follows each phrase. Tokens of prompts, and tokens that a row receives
after its request has ended, must never be stored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ngram_npu import PRIVATE_SCOPE, NgramStore, scope_of
from ngram_npu.tensors import Int32Array

K = 6
MAX_NEW = 64
SCOPES = (0, 7, scope_of("a"), scope_of("b"), -(2**63), 2**32 + 7, PRIVATE_SCOPE)
HOSTILE_TOKENS = (-(2**31), -1, 0, 2**31 - 1)
PHRASES = [[10 * phrase + i for i in range(1, 8)] for phrase in range(5)]
FIRST_MARK, FIRST_PROMPT, GARBAGE = 1000, 10**6, 10**7


@dataclass
class Request:
    scope: int
    mark: int
    has_ended: bool = False

    def generate(self, rng: random.Random) -> Iterator[int]:
        while True:
            yield from rng.choice(PHRASES)[rng.randrange(3) :]
            yield self.mark
            if rng.random() < 0.1:
                yield rng.choice(HOSTILE_TOKENS)


@dataclass(frozen=True)
class Step:
    rows: np.ndarray
    """[B] int64, the rows of the step's requests, which are their slots."""
    num_sampled: Int32Array
    scopes: np.ndarray


class Requests:
    """Rows of tokens, each with one request at a time. Ended requests stay in a step once more."""

    def __init__(self, seed: int, num_rows: int = 6, capacity: int = 900) -> None:
        self.rng = random.Random(seed)
        self.token_ids = np.zeros((num_rows, capacity), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.texts: list[Request] = []
        self.rows = [self._begin(row) for row in range(num_rows)]
        self.sources = [request.generate(self.rng) for request in self.rows]

    def _begin(self, row: int) -> Request:
        request = Request(self.rng.choice(SCOPES), FIRST_MARK + len(self.texts))
        self.texts.append(request)
        prompt = [FIRST_PROMPT + request.mark] * self.rng.randrange(1, 40)
        prompt += self.rng.choice(PHRASES)
        self.token_ids[row, : len(prompt)] = prompt
        self.num_tokens[row] = len(prompt)
        return request

    def next_step(self) -> Step:
        """Appends sampled tokens to a random selection of rows."""
        rows = self.rng.sample(range(len(self.rows)), self.rng.randrange(1, len(self.rows) + 1))
        counts = []
        for row in rows:
            if self.rows[row].has_ended:
                self.rows[row] = self._begin(row)
                self.sources[row] = self.rows[row].generate(self.rng)
            counts.append(self._sample(row))
        scopes = [self.rows[row].scope for row in rows]
        return Step(np.array(rows), np.array(counts, np.int32), np.array(scopes, np.int64))

    def _sample(self, row: int) -> int:
        request, begin = self.rows[row], int(self.num_tokens[row])
        count = self.rng.choice((0, 1, 3, 24))
        tokens = [next(self.sources[row]) for _ in range(count)]
        if self.rng.random() < 0.02 or begin + 2 * count + 48 > self.token_ids.shape[1]:
            # The device samples once more before it learns that the request has ended.
            tokens, request.has_ended = [GARBAGE] * count, True
        self.token_ids[row, begin : begin + count] = tokens
        self.num_tokens[row] += count
        return count


def new_drafts(batch: int) -> dict[str, Any]:
    """Returns the arrays that ``store_propose_`` updates, without drafts of the rows."""
    return {
        "draft_token_ids": np.full((batch, K), -1, np.int32),
        "num_draft_tokens": np.zeros(batch, np.int32),
        "match_len": np.zeros(batch, np.int32),
        "agreement": np.full(batch, 77, np.int32),
    }


def run_step(store: NgramStore, requests: Requests, step: Step) -> dict[str, Any]:
    """Appends the step to the store, and returns the drafts."""
    rows = requests.token_ids, requests.num_tokens, step.num_sampled
    drafts = new_drafts(len(step.rows))
    indices = {"row_indices": step.rows, "scopes": step.scopes}
    store.begin_step(len(step.rows), MAX_NEW)
    store.append(*rows, **indices, max_new=MAX_NEW)
    store.propose(*rows, **indices, **drafts)
    return drafts


def append_tokens(
    store: NgramStore, row: Sequence[int], count: int, *, slot: int = 0, hold_back: bool = False
) -> None:
    """Stores the last tokens of a single row."""
    store.begin_step(1, MAX_NEW)
    store.append(
        np.array([row], np.int32),
        np.array([len(row)], np.int32),
        np.array([count], np.int32),
        slot_indices=np.array([slot]),
        max_new=MAX_NEW,
        hold_back=hold_back,
    )


def draft_after(store: NgramStore, row: Sequence[int], scope: int = 0) -> list[int]:
    """Returns what the store drafts after a row."""
    drafts, one = new_drafts(1), np.ones(1, np.int32)
    lengths, scopes = np.array([len(row)], np.int32), np.array([scope], np.int64)
    store.propose(np.array([row], np.int32), lengths, one, scopes=scopes, **drafts)
    tokens: list[int] = drafts["draft_token_ids"][0, : drafts["num_draft_tokens"][0]].tolist()
    return tokens
