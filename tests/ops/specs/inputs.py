"""Inputs for the samples of several operators: rows of tokens, flat batches (the tokens of all
requests in one array, with query_start_loc)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .spec import Args, Array, BadCall, Sample, in_buffer

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UNLIMITED = 2**63 - 1
HOSTILE_INT32 = [INT32_MIN, INT32_MIN + 1, -2, -1, 0, 1, INT32_MAX - 1, INT32_MAX]
HOSTILE_INT64 = [-(2**63), -(2**32), *HOSTILE_INT32, 2**32, 2**32 + 1, 2**63 - 1]
HOSTILE_INDICES = ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64))
"""Hostile values for both dtypes that indices may have."""

# Row lengths close to multiples of a vector (4, 8 or 16 lanes) and of a block of four vectors.
EDGE_LENGTHS = sorted(
    {0, 1, 2, 3} | {b + d for b in (4, 8, 16, 32, 64, 128, 192) for d in (-1, 0, 1, 2)}
)

# The same for device kernels: a warp reads 128 tokens at once, a block up to 8192 tokens of a row,
# or all of a row of at most 16384 tokens if the batch is small.
TILE_CAPACITY = 8211
LONG_CAPACITY = 24591
TILE_LENGTHS = [8193, 8211, 8210, 8209, 8191, 8192, 4099, 4097]

# Row lengths of small batches of LONG_CAPACITY tokens: several blocks share a row.
FEW_LONG_ROWS = ([24591], [24579, 24578], [24591, 16385, 24577])
# Row lengths of a batch of LONG_CAPACITY tokens that is so large that each row has one block.
MANY_LONG_ROWS = [24591, 24579, 16385, 8193, 8192, 100, 6, 24577, 16384]

# Row capacities for a single request with a short row. If the capacity is small, a device uses one
# block and no workspace. If the capacity is large, a device uses more blocks than the row needs.
ONE_REQUEST_CAPACITIES = (90, TILE_CAPACITY, LONG_CAPACITY)

# Batch sizes close to and above 256, the number of threads of some blocks on a GPU.
LARGE_BATCHES = (255, 256, 257, 600)

# By row length: match ends at the borders of the pieces, of at least 1024 ends, into which devices
# split a row.
PIECE_ENDS = {
    2300: (1023, 1024, 1025, 2047, 2048, 2049),
    LONG_CAPACITY: (8191, 8192, 8193, 16383, 16384, 16385),
}

POLICIES = [(match_policy, overlap) for match_policy in (0, 1) for overlap in (False, True)]


def draw_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    return rng.integers(0, alphabet, (rows, capacity), dtype=np.int32)


def sample_tokens(rng: np.random.Generator, batch: int, width: int, alphabet: int) -> Array:
    """Returns the result of a rejection sampler: each row has 0 to ``width`` token ids, then -1."""
    tokens = rng.integers(0, alphabet, (batch, width), dtype=np.int32)
    num_kept = rng.integers(0, width + 1, (batch, 1))
    tokens[np.arange(width) >= num_kept] = -1
    return tokens


def make_structured_rows(capacity: int) -> list[tuple[str, Array]]:
    """Returns rows with a structure that is difficult for a lookup, each with a label."""
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
        "rising-matches": _make_rising_matches(capacity),
        "hostile-tokens": np.resize(HOSTILE_INT32, capacity),
    }
    return [(name, values.astype(np.int32)) for name, values in rows.items()]


def _make_rising_matches(capacity: int) -> Array:
    """Returns a row with suffixes of its last 16 tokens, of rising and then falling lengths,
    each followed by another token. A search in either direction finds a longer match many times."""
    tail = list(range(1000, 1016))
    row: list[int] = []
    separator = 0
    for n in [*range(1, 16), *range(15, 0, -1)]:
        row += [*tail[-n:], separator]
        separator -= 1
    return np.array((row * (capacity // len(row) + 1))[: max(0, capacity - 16)] + tail)[-capacity:]


def make_copy_rows(
    rng: np.random.Generator, lengths: list[int], capacity: int, first_pattern: int = 0
) -> Array:
    """Returns rows of distinct tokens, except for copies of the row's last tokens.

    The pattern of the copies alternates from row to row, beginning with ``first_pattern``. The
    copies are near the borders of vectors, warps and tiles; or 128 tokens apart, so that one thread
    reads all of them, or 2176 tokens apart, so that each copy is read by the next warp, with
    rising, falling or equal lengths; or of equal length at both ends of the row.
    """
    borders = np.array([4, 128, 256, 512, 1024, 2048, 3968, 4096, 4224, 8064, 8192, 16384])
    same_thread, next_warp = (np.arange(100, capacity, distance) for distance in (128, 2176))
    rows = np.tile(np.arange(capacity, dtype=np.int32), (len(lengths), 1))
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        near_ends = rng.choice(borders[borders < length], 7) + rng.integers(-2, 4, 7)
        patterns = [
            zip(near_ends, rng.permutation([1, 2, 3, 5, 5, 8, 8]), strict=True),
            zip(same_thread, range(1, 9), strict=False),
            zip(same_thread, range(8, 0, -1), strict=False),
            zip(next_warp, range(1, 9), strict=False),
            zip(next_warp, range(8, 0, -1), strict=False),
            zip(same_thread, [5] * 8, strict=False),
            [(2, 1), (960, 1), (length - 961, 1), (length - 1, 1)],
        ]
        for end, n in patterns[(first_pattern + i) % len(patterns)]:
            if n <= end < length:
                row[end - n : end] = row[length - n : length]
    return rows


def make_match_rows(ends: Sequence[int], n: int, length: int) -> Array:
    """Returns one row for each of ``ends``. The row's last n tokens also end at this position
    and about 40 positions later; all other tokens differ. With ends at the borders at which a
    kernel splits the row, the matches contain tokens of two pieces."""
    rows = np.tile(np.arange(length, dtype=np.int32), (len(ends), 1))
    suffix = np.arange(INT32_MAX - n, INT32_MAX)
    for row, end in zip(rows, ends, strict=True):
        for copy_end in (end, end + n + 40):
            assert n - 1 <= copy_end < length - n
            row[copy_end - n + 1 : copy_end + 1] = suffix
        row[length - n :] = suffix
    return rows


# Flat batches.

NO_OFFSET = BadCall({"query_start_loc": lambda a: a[:0]}, r"size >= 1 \(batch \+ 1\), got size 0")


def make_offsets(lengths: Sequence[int] | Array, first: int = 0) -> list[int]:
    """Returns query_start_loc of requests with these numbers of tokens."""
    return [first, *(first + np.cumsum(lengths, dtype=np.int64)).tolist()]


def make_hostile_offsets(offsets: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yields labels and ascending offsets that do not begin at 0 or end at the token count."""
    last_offset, size = offsets[-1], len(offsets)
    for first in (INT32_MIN, -100, -1, 1, 2):
        yield f"first-{first}", [min(first, offsets[1]), *offsets[1:]]
    for last in (last_offset - 1, last_offset + 1, last_offset + 100, INT32_MAX):
        yield f"last-{last}", [*offsets[:-1], max(last, offsets[-2])]
    yield "all-after-the-tokens", [INT32_MAX - 1] * size
    yield "all-before-the-tokens", [INT32_MIN] * size
    yield "no-tokens-scheduled", [0] * size
    yield "first-request-has-all-tokens", [0] + [last_offset] * (size - 1)
    yield "range-of-int32", [INT32_MIN, *[INT32_MAX] * (size - 1)]


def draw_offsets(rng: np.random.Generator, offsets: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yields offsets that need not ascend, for which most results are unspecified, with labels."""
    for i in range(len(offsets)):
        for value in HOSTILE_INT32:
            yield f"{i}-{value}", [*offsets[:i], value, *offsets[i + 1 :]]
    for i in range(8):
        yield f"random-{i}", rng.integers(-5, 2 * offsets[-1], len(offsets)).tolist()
    yield "reversed", offsets[::-1]


def replace_each(values: Sequence[int], hostile: Sequence[int]) -> Iterator[list[int]]:
    """Yields copies of the values in which one value is replaced by one hostile value."""
    for i in range(len(values)):
        for hostile_value in hostile:
            yield [*values[:i], hostile_value, *values[i + 1 :]]


def make_hostile_samples(
    label: str, args: Args, index: int, hostile: Sequence[int] = HOSTILE_INT32
) -> Iterator[Sample]:
    """Yields calls in which one item of ``args[index]`` is replaced by one hostile value."""
    for values in replace_each(args[index].tolist(), hostile):
        tensor = in_buffer(values, dtype=args[index].dtype)
        yield Sample(label, (*args[:index], tensor, *args[index + 1 :]))


def make_index_samples(label: str, args: Args, index: int, *more_values: int) -> Iterator[Sample]:
    """Same as ``make_hostile_samples``, for indices of both dtypes and with additional values."""
    for dtype, hostile in HOSTILE_INDICES:
        args_of_dtype = (*args[:index], args[index].astype(dtype), *args[index + 1 :])
        yield from make_hostile_samples(label, args_of_dtype, index, (*hostile, *more_values))


def make_prev_positions(batch: int, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Yields labels and batch positions in the previous step; -1 is a new request."""
    order = np.arange(batch)
    yield "same", order.tolist()
    yield "reversed", order[::-1].tolist()
    yield "rotated", np.roll(order, 1).tolist()
    yield "permuted", rng.permutation(batch).tolist()
    yield "all-new", [-1] * batch
    yield "first-request-finished", np.minimum(order + 1, batch).tolist()
    yield "all-equal", [batch // 2] * batch
    yield "some-new", np.where(order % 3 == 0, -1, rng.permutation(batch)).tolist()


ANY_TOKEN = INT32_MAX
"""The default of ``vocab_size``."""


def make_workspace(size: int) -> Array:
    """Returns a workspace with arbitrary contents, such as an earlier call may have left."""
    return np.random.default_rng(size).integers(INT32_MIN, INT32_MAX, size, dtype=np.int32)


def select_fill(label: str, number: int) -> Iterator[tuple[str, bool]]:
    """Yields the label and `fill` of sample ``number``, or both values of `fill` for samples in
    which some requests have no valid row."""
    uses_both_values = label.startswith(("empty", "hostile"))
    for fill in (False, True) if uses_both_values else (number // 2 % 2 == 1,):
        yield f"{label}-filled" if fill else label, fill
