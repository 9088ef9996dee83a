"""Recorded sets as token ids, in halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ngram_npu.replay import ReplayError, TokenRequest, load_inputs, load_tokenizer, tokenize

PARTS = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "all": slice(None)}
"""Halves of a set's conversations, whose first has number 0."""


@dataclass(frozen=True)
class Recorded:
    """Sets by name, and the tokenizer that made their token ids, for the record."""

    sets: dict[str, list[TokenRequest]]
    tokenizer: str


def load(paths: Sequence[Path], tokenizer: str) -> Recorded:
    """Read files of conversations and folders of them; `tokenizer` is as for `load_tokenizer`.

    Raises:
        ReplayError: something cannot be read, or generates nothing in more than one step.
    """
    loaded = load_tokenizer(tokenizer)
    sets = {item.name: tokenize(item, loaded) for item in load_inputs(paths)}
    for name, requests in sets.items():
        if not any(request.spans() for request in requests):
            raise ReplayError(f"{name}: no completion of two tokens or more")
    return Recorded(sets, f"{loaded.name}: {loaded.source}")
