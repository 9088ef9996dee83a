"""The words of an index's tensor, to look at and to break (csrc/core/ngram_index_layout.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ngram_npu import _C, IntegrityError, NgramIndex

Int32Array = npt.NDArray[np.int32]

HEADER, SLOT = 64, 48

Harm = Callable[[Int32Array], Any]


def random_tokens(rows: int, length: int, alphabet: int) -> Int32Array:
    return np.random.default_rng(4).integers(0, alphabet, (rows, length), dtype=np.int32)


def slot_of(words: Int32Array, slot: int) -> Int32Array:
    return words[HEADER + slot * SLOT :][:SLOT]


def owners_of(words: Int32Array) -> Int32Array:
    """Of each page, the slot that has it."""
    return words[HEADER + int(words[1]) * SLOT :][: int(words[2])]


def page_of(words: Int32Array, page: int) -> Int32Array:
    """Pages lie at the tensor's end."""
    first = HEADER + int(words[1]) * SLOT + int(words[2])
    first = -(-first // _C.INDEX_PAGE_WORDS) * _C.INDEX_PAGE_WORDS
    return words[first + page * _C.INDEX_PAGE_WORDS :][: _C.INDEX_PAGE_WORDS]


def put(at: int, value: Callable[[int], int]) -> Harm:
    """The word at that place becomes another."""

    def harm(words: Int32Array) -> None:
        words[at] = value(int(words[at]))

    return harm


def check_told(index: NgramIndex, tokens: Int32Array, harm: Harm, message: str) -> None:
    """A sound index is broken, and the integrity check says how."""
    index.check_integrity(dict(enumerate(tokens)))
    harm(index.tensor)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match=message):
        index.check_integrity({0: tokens[0]})
