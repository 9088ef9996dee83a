"""Reads and changes the words of an index's tensor (csrc/core/ngram_index_layout.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ngram_npu import _C, IntegrityError, NgramIndex

Int32Array = npt.NDArray[np.int32]

HEADER, SLOT = 64, 48  # number of words of the header, and of a slot

Corruption = Callable[[Int32Array], Any]


def make_random_tokens(rows: int, length: int, vocab_size: int) -> Int32Array:
    return np.random.default_rng(4).integers(0, vocab_size, (rows, length), dtype=np.int32)


def slot_words(words: Int32Array, slot: int) -> Int32Array:
    return words[HEADER + slot * SLOT :][:SLOT]


def page_owners(words: Int32Array) -> Int32Array:
    """Returns the slot that owns each page."""
    return words[HEADER + int(words[1]) * SLOT :][: int(words[2])]


def page_words(words: Int32Array, page: int) -> Int32Array:
    """Returns the words of a page. The pages are at the end of the tensor."""
    begin = HEADER + int(words[1]) * SLOT + int(words[2])
    begin = -(-begin // _C.INDEX_PAGE_WORDS) * _C.INDEX_PAGE_WORDS
    return words[begin + page * _C.INDEX_PAGE_WORDS :][: _C.INDEX_PAGE_WORDS]


def make_word_edit(offset: int, new_value: Callable[[int], int]) -> Corruption:
    """Returns a function that changes the word at an offset."""

    def change_word(words: Int32Array) -> None:
        words[offset] = new_value(int(words[offset]))

    return change_word


def check_corruption_is_detected(
    index: NgramIndex, tokens: Int32Array, corrupt: Corruption, message: str
) -> None:
    """Corrupts an index, and checks that the integrity check reports the corruption."""
    index.check_integrity(dict(enumerate(tokens)))
    corrupt(index.tensor)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match=message):
        index.check_integrity({0: tokens[0]})
