"""Flat batches and previous positions, shared by the samples of the bookkeeping operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .rows import HOSTILE_INT32, INT32_MAX, INT32_MIN
from .spec import Array, BadCall, in_buffer

NO_OFFSET = BadCall(
    "no offset at all",
    {"query_start_loc": lambda a: a[:0]},
    r"size >= 1 \(batch \+ 1\), got size 0",
)


def offsets(lengths: Sequence[int] | Array, first: int = 0) -> list[int]:
    """query_start_loc of requests with these numbers of tokens."""
    return [first, *(first + np.cumsum(lengths, dtype=np.int64)).tolist()]


def hostile_offsets(good: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Offsets that still rise, but do not begin at 0 or end where the tokens end."""
    for first in (INT32_MIN, -100, -1, 1, 2):
        yield f"first-{first}", [min(first, good[1]), *good[1:]]
    for last in (good[-1] - 1, good[-1] + 1, good[-1] + 100, INT32_MAX):
        yield f"last-{last}", [*good[:-1], max(last, good[-2])]
    yield "all-beyond", [INT32_MAX - 1] * len(good)
    yield "all-before", [INT32_MIN] * len(good)
    yield "none-scheduled", [0] * len(good)
    yield "the-first-has-all", [0] + [good[-1]] * (len(good) - 1)
    yield "the-whole-range", [INT32_MIN, *[INT32_MAX] * (len(good) - 1)]


def unordered_offsets(rng: np.random.Generator, good: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Class B."""
    for at in range(len(good)):
        for value in HOSTILE_INT32:
            yield f"{at}-{value}", [*good[:at], value, *good[at + 1 :]]
    for i in range(8):
        yield f"random-{i}", rng.integers(-5, 2 * good[-1], len(good)).tolist()
    yield "reversed", good[::-1]


def one_hostile(values: Sequence[int], hostile: Sequence[int]) -> Iterator[list[int]]:
    """Each value in turn replaced by each hostile one."""
    for at in range(len(values)):
        for bad in hostile:
            yield [*values[:at], bad, *values[at + 1 :]]


def previous(batch: int, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Positions that the requests of a batch may have had in the previous step."""
    order = np.arange(batch)
    yield "same", order.tolist()
    yield "reversed", order[::-1].tolist()
    yield "rotated", np.roll(order, 1).tolist()
    yield "permuted", rng.permutation(batch).tolist()
    yield "all-new", [-1] * batch
    yield "one-left", np.minimum(order + 1, batch).tolist()
    yield "all-the-same", [batch // 2] * batch
    yield "some-new", np.where(order % 3 == 0, -1, rng.permutation(batch)).tolist()


@st.composite
def lengths_lists(draw: st.DrawFn, max_batch: int = 6, max_length: int = 9) -> list[int]:
    return draw(st.lists(st.integers(0, max_length), max_size=max_batch))


@st.composite
def int32_vectors(draw: st.DrawFn, size: int, low: int, high: int) -> Array:
    """Mostly values of [low, high], some hostile."""
    value = st.one_of(
        st.integers(low, high), st.integers(low, high), st.sampled_from(HOSTILE_INT32)
    )
    values = draw(st.lists(value, min_size=size, max_size=size))
    return in_buffer(values, before=draw(st.integers(0, 2)), gap=1)


@st.composite
def index_vectors(draw: st.DrawFn, size: int, high: int) -> Array:
    """Of either width, in any order, repeated, out of range."""
    dtype: Any = draw(st.sampled_from([np.int32, np.int64]))
    far = [-(2**63), -(2**32), 2**32, 2**63 - 1] if dtype is np.int64 else HOSTILE_INT32
    value = st.one_of(st.integers(-1, high), st.integers(0, max(0, high - 1)), st.sampled_from(far))
    values = draw(st.lists(value, min_size=size, max_size=size))
    return in_buffer(values, gap=draw(st.integers(0, 2)), dtype=dtype)
