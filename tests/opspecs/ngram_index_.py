"""Indexes to call the index operators with: fresh, warm, too small, and full of nonsense.

What an index contains is each backend's own affair, and so is making one: ``made_by``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ngram_npu import _C

from .spec import Array

PAGE_WORDS = 1024


@dataclass(frozen=True)
class IndexMaker:
    fresh: Callable[[int, int], Array]
    """An empty index of so many slots and pages of 4 KiB."""
    append: Callable[..., Any]
    """``ngram_index_append_`` on numpy arrays."""


def _cpu_index(num_slots: int, num_pages: int) -> Array:
    index = np.zeros(_C.index_words(num_slots, num_pages), np.int32)
    _C.index_init(index, num_slots)
    return index


def gpu_index(num_slots: int, num_pages: int) -> Array:
    buckets = num_pages * PAGE_WORDS // 32
    index = np.zeros(_C.device_index_words(num_slots, buckets), np.int32)
    _C.device_index_init(index[: _C.DEVICE_INDEX_HEADER_WORDS], num_slots, buckets)
    return index


CPU_INDEXES = IndexMaker(_cpu_index, _C.ngram_index_append_)
_maker = CPU_INDEXES


@contextmanager
def made_by(maker: IndexMaker) -> Iterator[None]:
    """Samples that are drawn meanwhile have that maker's indexes."""
    global _maker
    before, _maker = _maker, maker
    try:
        yield
    finally:
        _maker = before


def fresh(num_slots: int, num_pages: int = 64) -> Array:
    return _maker.fresh(num_slots, num_pages)


def warm(
    tokens: Array, lengths: Array, num_slots: int, min_n: int, max_n: int, policy: int, **size: Any
) -> Array:
    """One that has indexed those rows, row i in slot i."""
    index = fresh(num_slots, **size)
    _maker.append(tokens, lengths, None, index, None, min_n, max_n, policy)
    return index


def nonsense(rng: np.random.Generator, good: Array) -> Iterator[Array]:
    """Contents that no operator leaves behind. A kernel stays inside the tensor and, since hits are
    verified, may draft something else; tests compare nothing but safety."""
    for share in (0.001, 0.05, 1.0):
        index = good.copy()
        hit = rng.random(index.size) < share
        hit[:64] = False  # behind a good header
        index[hit] = rng.integers(-(2**31), 2**31, int(hit.sum()))
        yield index
    yield rng.integers(-(2**31), 2**31, 5000).astype(np.int32)
    yield np.full(5000, -1, np.int32)
    yield np.zeros(5000, np.int32)
    yield np.zeros(0, np.int32)
    yield good[:100].copy()
