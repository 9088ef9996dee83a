"""Inserts the text of other engines into the store of a rank, in the order of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ngram_npu.store import NgramStore
from ngram_npu.store.contents import BLOCK_TOKENS

ATTRIBUTE = "ngram_npu_texts"
"""Attribute of a ``SchedulerOutput`` with the pieces of text for a step: the scope of each, and its
int32 tokens as bytes, because pickling arrays takes ten times as long."""


def insert_texts(store: NgramStore, scheduler_output: Any) -> None:
    """Inserts the text that the scheduler added to its output, if any. Called before each step."""
    for scope, tokens in getattr(scheduler_output, ATTRIBUTE, ()):
        store.begin_step(1, BLOCK_TOKENS)
        store.add_text(np.frombuffer(tokens, np.int32).copy(), scope)
