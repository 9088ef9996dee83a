"""Rows of tokens to look up in, shared by the lookup operators' samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from .spec import Array

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
HOSTILE_INT32 = [INT32_MIN, INT32_MIN + 1, -2, -1, 0, 1, INT32_MAX - 1, INT32_MAX]
HOSTILE_INT64 = [-(2**63), -(2**32), *HOSTILE_INT32, 2**32, 2**32 + 1, 2**63 - 1]

# One off every edge of a vector (4, 8, 16 lanes) and of a block of four of them.
EDGE_LENGTHS = sorted(
    {0, 1, 2, 3} | {b + d for b in (4, 8, 16, 32, 64, 128, 192) for d in (-1, 0, 1, 2)}
)

# The same for what a device reads at once: vectors of a warp (128 tokens), tiles of a block (4096).
TILE_CAPACITY = 8211
TILE_LENGTHS = [8193, 8211, 8210, 8209, 8191, 8192, 4099, 4098, 4096, 4097]

# Of so few requests that several blocks of a device share each row, of three tiles or more.
FEW_LONG = ([12303], [12291, 12290], [12303, 8193, 12289])

# Room for a short row's tokens: on a device one block, without a workspace; or more than find work.
ONE_REQUEST = (90, TILE_CAPACITY)

POLICIES = [(match_policy, overlap) for match_policy in (0, 1) for overlap in (False, True)]


def random_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    return rng.integers(0, alphabet, (rows, capacity), dtype=np.int32)


def structured_rows(capacity: int) -> list[tuple[str, Array]]:
    """Rows on which a lookup has much to go wrong with."""
    i = np.arange(capacity)
    fibonacci = "01"
    while len(fibonacci) < capacity:
        fibonacci = "".join("01" if c == "0" else "0" for c in fibonacci)
    rows = {
        "constant": np.zeros(capacity),
        "period-2": i % 2,
        "period-3": i % 3,
        "period-17": i % 17,
        "distinct": i,
        "fibonacci-word": np.array([int(c) for c in fibonacci[:capacity]]),
        "ruler": np.array([(n & -n).bit_length() for n in range(1, capacity + 1)]),
        "match-at-start": np.where(i < capacity // 2, i, i - capacity // 2),
        "rising-matches": _rising_matches(capacity),
        "hostile-tokens": np.resize(HOSTILE_INT32, capacity),
    }
    return [(name, values.astype(np.int32)) for name, values in rows.items()]


def planted_rows(
    rng: np.random.Generator, lengths: list[int], capacity: int, first_kind: int = 0
) -> Array:
    """Rows without a repetition but copies of their last tokens: next to the edges of vectors and
    tiles; or 1024 tokens apart, where the same warp sees them one after the other, or 1152, where
    the next warp does, each a better match than the one before, or a worse one, or as good; or as
    good at the row's very ends. The kinds take turns, from ``first_kind`` on."""
    edges = np.array([4, 128, 256, 512, 1024, 3968, 4096, 4224, 8064, 8192])
    strides, others = (np.arange(100, capacity, apart) for apart in (1024, 1152))
    rows = np.tile(np.arange(capacity, dtype=np.int32), (len(lengths), 1))
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        near = rng.choice(edges[edges < length], 7) + rng.integers(-2, 4, 7)
        plants = [
            zip(near, rng.permutation([1, 2, 3, 5, 5, 8, 8]), strict=True),
            zip(strides, range(1, 9), strict=False),
            zip(strides, range(8, 0, -1), strict=False),
            zip(others, range(1, 9), strict=False),
            zip(others, range(8, 0, -1), strict=False),
            zip(strides, [5] * 8, strict=False),
            [(2, 1), (960, 1), (length - 961, 1), (length - 1, 1)],
        ]
        for end, n in plants[(first_kind + i) % len(plants)]:
            if n <= end < length:
                row[end - n : end] = row[length - n : length]
    return rows


def _rising_matches(capacity: int) -> Array:
    """Ever longer suffixes of the tail, each ended by a token of its own: the bar rises again and
    again, from the front and from the back."""
    tail = list(range(1000, 1016))
    row: list[int] = []
    stop = 0
    for n in [*range(1, 16), *range(15, 0, -1)]:
        row += [*tail[-n:], stop]
        stop -= 1
    return np.array((row * (capacity // len(row) + 1))[: max(0, capacity - 16)] + tail)[-capacity:]


def matches_ending_at(ends: Sequence[int], n: int, length: int) -> Array:
    """A row for each end: the last n tokens occur once more there, and again 40 ends later; all
    else is different. Where a kernel divides rows, a match lies across."""
    rows = np.tile(np.arange(length, dtype=np.int32), (len(ends), 1))
    suffix = np.arange(INT32_MAX - n, INT32_MAX)
    for row, end in zip(rows, ends, strict=True):
        for at in (end, end + n + 40):
            assert n - 1 <= at < length - n
            row[at - n + 1 : at + 1] = suffix
        row[length - n :] = suffix
    return rows


# A thread of a lookup's block on a GPU sees to one of 256 requests, or to several.
MANY = (255, 256, 257, 600)


# Device kernels take a row in pieces of 1024 ends or more, one off which matches end here.
PIECE_ENDS = (1023, 1024, 1025, 2047, 2048, 2049)


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int, value: st.SearchStrategy[int]) -> Array:
    flat = draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    return np.array(flat, np.int32).reshape(rows, columns)


@st.composite
def token_rows(draw: st.DrawFn) -> Array:
    """Small alphabets make long and repeated matches likely."""
    alphabet = draw(st.sampled_from([0, 1, 2, 5]))
    rows, capacity = draw(st.integers(0, 4)), draw(st.integers(0, 70))
    return draw(matrices(rows, capacity, st.integers(-1, alphabet)))


@st.composite
def lookup_options(draw: st.DrawFn) -> tuple[int, int, int, int, bool, int]:
    """min_n, max_n, k, match_policy, overlap, max_len."""
    max_n = draw(st.one_of(st.integers(1, 6), st.sampled_from([33, 64])))
    min_n = draw(st.integers(1, max_n))
    max_len = draw(st.one_of(st.integers(0, 80), st.sampled_from([-(2**63), -1, 2**63 - 1])))
    return (
        min_n,
        max_n,
        draw(st.sampled_from([0, 1, 2, 4, 7, 64])),
        draw(st.integers(0, 1)),
        draw(st.booleans()),
        max_len,
    )
