"""The learning curve as a loop over the operators' references, one token list at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ngram_npu import NgramStore
from ngram_npu.config import UNLIMITED, default_costs, default_store_costs
from ngram_npu.scopes import scope_of
from ops import reference

SLOT = np.zeros(1, np.int32)
Turn = tuple[list[int], list[int]]
Talk = tuple[Any, list[Turn]]
"""A scope and turns of a prompt and an answer."""


def draft(row: list[int], store: Any, scope: int, sampled: int, k: int, limit: int) -> list[int]:
    rows, length = np.array([row], np.int32), np.array([len(row)], np.int32)
    costs = np.zeros((1, k), np.uint8)
    of_row = reference.ngram_index_propose_(
        rows,
        length,
        np.zeros(0, np.int32),
        None,
        None,
        None,
        *(1, 16, k, 1, True, UNLIMITED, True),
        default_costs(),
        limit,
        costs,
    )
    if store is not None:
        drafts = [np.array(part) for part in of_row]
        asked = rows, length, np.array([sampled], np.int32), store, None, SLOT
        table = default_store_costs()
        reference.ngram_store_step_(
            *asked, np.array([scope], np.int64), *drafts, costs, UNLIMITED, table, limit
        )
        of_row = tuple(drafts)
    return [int(token) for token in of_row[0][0][: of_row[1][0]]]


def remember(store: Any, text: list[int], scope: int) -> None:
    """As a request that says the text in one step, and ends."""
    draft(text, store, scope, len(text), 0, 0)
    reference.ngram_store_finish_(store, SLOT)


def replayed(
    talks: Sequence[Talk],
    known: Sequence[tuple[Any, list[int]]] | None,
    store_tokens: int,
    k: int = 8,
    limit: int = 40,
) -> tuple[int, int, int]:
    """Tokens, steps and drafted tokens; ``known``: scopes and texts, None: without a store."""
    store = None if known is None else NgramStore(1, store_tokens).tensor
    for scope, text in known or ():
        remember(store, text, scope_of(scope))
    tokens = steps = drafted = 0
    for scope, turns in talks:
        context: list[int] = []
        for prompt, answer in turns:
            context = context + prompt
            at, sampled = 1, 1
            while at < len(answer):
                row = context + answer[:at]
                guess = draft(row, store, scope_of(scope), sampled, k, limit)
                rest = answer[at:]
                right = 0
                while right < min(len(guess), len(rest)) and guess[right] == rest[right]:
                    right += 1
                sampled = min(right + 1, len(rest))
                at += sampled
                tokens, steps, drafted = tokens + sampled, steps + 1, drafted + len(guess)
            context = context + answer
            if store is not None:
                reference.ngram_store_finish_(store, SLOT)
    return tokens, steps, drafted
