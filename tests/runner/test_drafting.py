"""Drafts in `model.generate` of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ngram_npu import NgramStore

pytest.importorskip("transformers")

import ngram_npu.transformers as ours

from runner import worlds

NEW_TOKENS = 24
PROMPT = b"> read(a41)\nread(a41) ok\n> find(c70)\nfind(c70) no\n> read(a4"
TOKENS = torch.tensor([list(PROMPT)])


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_call_that_continues_previous_text_drafts_from_store(
    plain_model: Any, monkeypatch: pytest.MonkeyPatch, visibility: Any
) -> None:
    """As a conversation's next turn does. The store would take it for the same request, whose text
    "finish" hides, and its prompt for output."""
    stores: list[NgramStore] = []
    make_store = ours.make_store
    monkeypatch.setattr(
        ours, "make_store", lambda *a, **k: stores.append(make_store(*a, **k)) or stores[0]
    )
    ngram = replace(worlds.LADDER, store=visibility, store_tokens=8192)
    with ours.drafting(plain_model, ngram):
        first = plain_model.generate(TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)
        hits = stores[0].statistics.hits
        turn = torch.cat([first, TOKENS], 1)
        plain_model.generate(turn, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert stores[0].statistics.hits > hits
    assert stores[0].statistics.tokens_held <= 2 * (NEW_TOKENS + 1)
