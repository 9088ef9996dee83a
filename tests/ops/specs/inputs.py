"""Inputs that the samples of several operators share: rows of tokens, flat batches, and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .spec import Args, Array, BadCall, Sample, in_buffer

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UNLIMITED = 2**63 - 1
HOSTILE_INT32 = [INT32_MIN, INT32_MIN + 1, -2, -1, 0, 1, INT32_MAX - 1, INT32_MAX]
HOSTILE_INT64 = [-(2**63), -(2**32), *HOSTILE_INT32, 2**32, 2**32 + 1, 2**63 - 1]
HOSTILE_INDICES = ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64))
"""Both widths that indices may have."""

# Lengths around the edges of a vector (4, 8, 16 lanes) and of a block of four vectors.
EDGE_LENGTHS = sorted(
    {0, 1, 2, 3} | {b + d for b in (4, 8, 16, 32, 64, 128, 192) for d in (-1, 0, 1, 2)}
)

# The same for device kernels: a warp reads 128 tokens at once, a block a tile of 4096.
TILE_CAPACITY = 8211
TILE_LENGTHS = [8193, 8211, 8210, 8209, 8191, 8192, 4099, 4098, 4096, 4097]

# Batches so small that several blocks share each row of at least three tiles.
FEW_LONG = ([12303], [12291, 12290], [12303, 8193, 12289])

# One request with a short row: a device uses one block and no workspace if the row's capacity is
# small, and more blocks than there is work if the capacity is large.
ONE_REQUEST = (90, TILE_CAPACITY)

# A thread of a lookup's block on a GPU handles one of 256 requests, or several.
MANY = (255, 256, 257, 600)

# Device kernels split a row into pieces of at least 1024 ends. Matches end one off these edges.
PIECE_ENDS = (1023, 1024, 1025, 2047, 2048, 2049)

POLICIES = [(match_policy, overlap) for match_policy in (0, 1) for overlap in (False, True)]


def random_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    return rng.integers(0, alphabet, (rows, capacity), dtype=np.int32)


def sampled_tokens(rng: np.random.Generator, batch: int, width: int, alphabet: int) -> Array:
    """A rejection sampler's result: a run of ids, then -1."""
    tokens = rng.integers(0, alphabet, (batch, width), dtype=np.int32)
    num_kept = rng.integers(0, width + 1, (batch, 1))
    tokens[np.arange(width) >= num_kept] = -1
    return tokens


def structured_rows(capacity: int) -> list[tuple[str, Array]]:
    """Rows with a structure that is difficult for a lookup."""
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


def _rising_matches(capacity: int) -> Array:
    """Ever longer suffixes of the tail, each followed by a different token: the longest match so
    far is exceeded again and again, in both directions."""
    tail = list(range(1000, 1016))
    row: list[int] = []
    stop = 0
    for n in [*range(1, 16), *range(15, 0, -1)]:
        row += [*tail[-n:], stop]
        stop -= 1
    return np.array((row * (capacity // len(row) + 1))[: max(0, capacity - 16)] + tail)[-capacity:]


def planted_rows(
    rng: np.random.Generator, lengths: list[int], capacity: int, first_kind: int = 0
) -> Array:
    """Rows of distinct tokens, except for copies of their last tokens ("plants").

    The kinds alternate from row to row, beginning with ``first_kind``: copies near the edges of
    vectors and tiles; 1024 tokens apart, where one warp meets all of them, or 1152, where the next
    warp does, of rising, falling or equal length; equal copies at both ends of the row.
    """
    edges = np.array([4, 128, 256, 512, 1024, 3968, 4096, 4224, 8064, 8192])
    same_warp, next_warp = (np.arange(100, capacity, distance) for distance in (1024, 1152))
    rows = np.tile(np.arange(capacity, dtype=np.int32), (len(lengths), 1))
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        near = rng.choice(edges[edges < length], 7) + rng.integers(-2, 4, 7)
        plants = [
            zip(near, rng.permutation([1, 2, 3, 5, 5, 8, 8]), strict=True),
            zip(same_warp, range(1, 9), strict=False),
            zip(same_warp, range(8, 0, -1), strict=False),
            zip(next_warp, range(1, 9), strict=False),
            zip(next_warp, range(8, 0, -1), strict=False),
            zip(same_warp, [5] * 8, strict=False),
            [(2, 1), (960, 1), (length - 961, 1), (length - 1, 1)],
        ]
        for end, n in plants[(first_kind + i) % len(plants)]:
            if n <= end < length:
                row[end - n : end] = row[length - n : length]
    return rows


def matches_ending_at(ends: Sequence[int], n: int, length: int) -> Array:
    """One row for each end: the last n tokens occur there and again 40 ends later. All other
    tokens differ. So a match lies across the border at which a kernel splits the row."""
    rows = np.tile(np.arange(length, dtype=np.int32), (len(ends), 1))
    suffix = np.arange(INT32_MAX - n, INT32_MAX)
    for row, end in zip(rows, ends, strict=True):
        for at in (end, end + n + 40):
            assert n - 1 <= at < length - n
            row[at - n + 1 : at + 1] = suffix
        row[length - n :] = suffix
    return rows


# Flat batches.

NO_OFFSET = BadCall({"query_start_loc": lambda a: a[:0]}, r"size >= 1 \(batch \+ 1\), got size 0")


def offsets(lengths: Sequence[int] | Array, first: int = 0) -> list[int]:
    """query_start_loc of requests with these numbers of tokens."""
    return [first, *(first + np.cumsum(lengths, dtype=np.int64)).tolist()]


def hostile_offsets(good: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Offsets that still rise, but do not begin at 0 or do not end at the number of tokens."""
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
    """Class-B input."""
    for at in range(len(good)):
        for value in HOSTILE_INT32:
            yield f"{at}-{value}", [*good[:at], value, *good[at + 1 :]]
    for i in range(8):
        yield f"random-{i}", rng.integers(-5, 2 * good[-1], len(good)).tolist()
    yield "reversed", good[::-1]


def replace_each(values: Sequence[int], hostile: Sequence[int]) -> Iterator[list[int]]:
    """The values with one of them replaced: every place, every hostile value."""
    for at in range(len(values)):
        for bad in hostile:
            yield [*values[:at], bad, *values[at + 1 :]]


def hostile_samples(
    label: str, args: Args, at: int, hostile: Sequence[int] = HOSTILE_INT32
) -> Iterator[Sample]:
    """Calls in which each item of argument number ``at`` is replaced by each hostile value."""
    for values in replace_each(args[at].tolist(), hostile):
        changed = in_buffer(values, dtype=args[at].dtype)
        yield Sample(label, (*args[:at], changed, *args[at + 1 :]))


def hostile_indices(label: str, args: Args, at: int, *more: int) -> Iterator[Sample]:
    """As ``hostile_samples``, for indices of both widths and ``more`` values."""
    for dtype, hostile in HOSTILE_INDICES:
        args_of_width = (*args[:at], args[at].astype(dtype), *args[at + 1 :])
        yield from hostile_samples(label, args_of_width, at, (*hostile, *more))


def previous_positions(batch: int, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Positions that a batch's requests may have had in the previous step."""
    order = np.arange(batch)
    yield "same", order.tolist()
    yield "reversed", order[::-1].tolist()
    yield "rotated", np.roll(order, 1).tolist()
    yield "permuted", rng.permutation(batch).tolist()
    yield "all-new", [-1] * batch
    yield "one-left", np.minimum(order + 1, batch).tolist()
    yield "all-the-same", [batch // 2] * batch
    yield "some-new", np.where(order % 3 == 0, -1, rng.permutation(batch)).tolist()


# Costs of drafts, and `fill`: the samples of the lookups alternate between these.

RISING = in_buffer(np.arange(16) * 4, before=1, gap=2, dtype=np.uint8)
FALLING = in_buffer(np.arange(16)[::-1] * 4, before=3, gap=1, dtype=np.uint8)
TABLES = {"rising": RISING, "falling": FALLING}
LIMITS = (40, 0, INT32_MAX)


def alternate_costs(label: str, number: int) -> tuple[str, Array | None, int]:
    """The label of the sample of that number, its match_costs and its cost_limit. Two of five
    samples have costs."""
    if number % 5 not in (1, 3):
        return label, None, 40
    name = "rising" if number % 5 == 1 else "falling"
    limit = LIMITS[number // 5 % len(LIMITS)]
    return f"{label}-{name}-{limit}", TABLES[name], limit


def alternate_fill(label: str, number: int) -> Iterator[tuple[str, bool]]:
    """The labels and `fill` of a sample; both values where a lookup may leave rows untouched."""
    both = label.startswith(("empty", "hostile"))
    for fill in (False, True) if both else (number // 2 % 2 == 1,):
        yield f"{label}-filled" if fill else label, fill


def alternate_draft_costs(
    match_costs: Array | None, number: int, batch: int, k: int
) -> Array | None:
    """draft_costs for every second call that has costs."""
    if match_costs is None or number % 2 == 0:
        return None
    return in_buffer(np.full((batch, k), 77), before=number % 3, gap=2, dtype=np.uint8)


def random_logits(rng: np.random.Generator, columns: int) -> dict[str, Array]:
    """Logits of all sizes, most of them as large as those of likely tokens."""
    cells = rng.integers(-100, 250, (16, columns)).astype(np.int16)
    cells[rng.random(cells.shape) < 0.1] = rng.integers(-900, -300)  # beyond the highest cost
    tokens = rng.integers(-64, 64, (4096, 2)).astype(np.int8)
    for table in (cells, tokens):
        limits = np.iinfo(table.dtype)
        table[rng.random(table.shape) < 0.02] = limits.min
        table[rng.random(table.shape) < 0.02] = limits.max
    return {"costs": cells, "token_logits": tokens}


def bad_logits(columns: int, **change: Any) -> Iterator[BadCall]:
    """Bad calls with token logits; `change`: what makes the ordinary sample accept costs."""
    cells, tokens = np.zeros((16, columns), np.int16), np.zeros((4096, 2), np.int8)
    strided = np.zeros((4096, 3), np.int8)[:, :2]
    both = change | {"costs": cells, "token_logits": tokens}
    for named, replaced, message in (
        ("costs", {"token_logits": None}, "uint8, got int16"),
        ("costs", {"costs": cells.astype(np.uint8)}, "int16, got uint8"),
        ("token_logits", {"token_logits": tokens.astype(np.int16)}, "int8"),
        ("token_logits", {"token_logits": tokens[:9]}, r"\[4096, 2\]"),
        ("token_logits", {"token_logits": strided}, "contiguous"),
    ):
        yield BadCall(both | replaced, message, named)
