from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ops import reference

from .batches import int32_vectors
from .costs import LIMITS, RISING, TABLES, any_costs, costs_in_turn, fills_in_turn, paid_in_turn
from .rows import (
    EDGE_LENGTHS,
    FEW_LONG,
    HOSTILE_INT32,
    HOSTILE_INT64,
    MANY,
    ONE_REQUEST,
    PIECE_ENDS,
    POLICIES,
    TILE_CAPACITY,
    TILE_LENGTHS,
    lookup_options,
    matches_ending_at,
    planted_rows,
    random_rows,
    structured_rows,
    token_rows,
)
from .spec import Args, BadCall, OpSpec, Sample, contiguous, in_buffer

UNLIMITED = 2**63 - 1


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_lookups(rng)):
        named, costs = costs_in_turn(sample.label, i)
        for label, fill in fills_in_turn(named, i):
            yield replace(sample, label=label, args=(*sample.args, *costs, fill))
    yield from _cost_samples(rng)


def _cost_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Every table with every limit, cut by ``max_len`` as well."""
    rows = in_buffer(random_rows(rng, 12, 90, 2), gap=1)
    lengths = in_buffer([90, 89, 88, 60, 33, 17, 9, 8, 3, 2, 1, 0])
    options = [(overlap, fill) for overlap in (False, True) for fill in (False, True)]
    for name, table in TABLES.items():
        for limit in LIMITS:
            for overlap, fill in options if limit == 40 else options[1::2]:
                args = (rows, lengths, None, None, 1, 6, 9, 1, overlap, 93, table, limit, fill)
                yield Sample(f"costs-{name}-{limit}-{overlap}-{fill}", args)
    for limit in (1500, 2500):  # reached within 32 tokens and behind them; the row's end is beside
        args = (rows, lengths, None, None, 1, 6, 64, 1, True, 122, RISING, limit, False)
        yield Sample(f"costs-of-64-{limit}", args)


def _lookups(rng: np.random.Generator) -> Iterator[Sample]:
    """All arguments up to ``max_len``."""
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2])
    indices = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    num_sampled = in_buffer([3, 1, 0], gap=1)
    yield Sample("ordinary", (tokens, lengths, indices, num_sampled, 2, 4, 5, 0, False, 4096))

    for policy in POLICIES:
        yield Sample(f"all-rows-{policy}", (tokens, lengths, None, None, 1, 3, 4, *policy, 64))
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 33, 64):
            for low in sorted({1, (n + 1) // 2, n}):
                rows = in_buffer(random_rows(rng, 12, 200, int(rng.integers(1, 5))), gap=1)
                ragged = in_buffer(rng.integers(0, 201, 12))
                k = int(rng.integers(1, 65))
                args = (rows, ragged, None, None, low, n, k, *policy, 190)
                yield Sample(f"n-{low}-{n}-{policy}", args)
        for alphabet in (1, 2, 4):
            rows = in_buffer(random_rows(rng, len(EDGE_LENGTHS), 200, alphabet), before=1, gap=2)
            args = (rows, in_buffer(EDGE_LENGTHS), None, None, 2, 5, 6, *policy, UNLIMITED)
            yield Sample(f"edge-lengths-{alphabet}-{policy}", args)
        for name, row in structured_rows(180):
            lengths_of_one = in_buffer([180, 179, 100, 67, 66, 65, 64, 63, 18, 3])
            rows = in_buffer(np.tile(row, (10, 1)), gap=3)
            args = (rows, lengths_of_one, None, None, 2, 8, 10, *policy, 182)
            yield Sample(f"{name}-{policy}", args)

    for before, policy in enumerate(POLICIES):
        at = TILE_LENGTHS * (1 + before // 2)  # a large batch has fewer blocks for each row
        rows = in_buffer(planted_rows(rng, at, TILE_CAPACITY), before=before)
        args = (rows, in_buffer(at), None, None, 1, 8, 5, *policy, UNLIMITED)
        yield Sample(f"tile-edges-{policy}", args)
        for few in FEW_LONG:
            long = in_buffer(planted_rows(rng, few, 12303, 2 * before), before=1)
            args = (long, in_buffer(few), None, None, 1, 8, 5, *policy, UNLIMITED)
            yield Sample(f"few-long-{len(few)}-{policy}", args)
    for capacity in ONE_REQUEST:
        one = (random_rows(rng, 1, capacity, 2), in_buffer([60]), None, None)
        yield Sample(f"one-request-{capacity}", (*one, 1, 3, 4, 0, False, UNLIMITED))
    for batch, policy in zip(MANY, POLICIES, strict=True):
        rows, many = random_rows(rng, batch, 20, 2), in_buffer(rng.integers(0, 21, batch))
        yield Sample(f"many-{batch}", (rows, many, None, None, 1, 3, 4, *policy, 22))
    for match_policy, n in ((0, 3), (1, 3), (0, 64), (1, 64)):
        rows = in_buffer(matches_ending_at(PIECE_ENDS, n, 2300), before=1, gap=1)
        whole = in_buffer([2300] * len(PIECE_ENDS))
        args = (rows, whole, None, None, 2, n, 4, match_policy, False, UNLIMITED)
        yield Sample(f"pieces-{n}-{match_policy}", args)

    for k in (0, 1, 64):
        for max_len in (-(2**63), -1, 0, 89, 90, 91, 95, UNLIMITED):
            args = (tokens, lengths, None, None, 1, 2, k, 0, True, max_len)
            yield Sample(f"max-len-{max_len}-k-{k}", args)
    yield from _empty_samples()
    yield from _hostile_samples(rng)


def _empty_samples() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, None), (0, 9, 3), (3, 0, None), (3, 1, 2), (1, 1, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = None if batch is None else np.zeros(batch, np.int32)
        for lengths in (np.full(rows, capacity, np.int32), np.arange(rows, dtype=np.int32)):
            args = (tokens, lengths, indices, None, 1, 2, 3, 0, False, 10)
            yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 2), gap=4)
    for policy in POLICIES:
        args = (rows, in_buffer(lengths), None, None, 1, 3, 4, *policy, UNLIMITED)
        yield Sample(f"hostile-lengths-{policy}", args)
    good = in_buffer([40] * len(lengths))
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        indices = in_buffer([*bad, len(lengths) - 1, len(lengths)], dtype=dtype)
        args = (rows, good, indices, None, 1, 3, 4, 0, False, UNLIMITED)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    args = (rows, good, None, in_buffer([*HOSTILE_INT32, 2, 3, 65]), 1, 3, 4, 0, False, UNLIMITED)
    yield Sample("hostile-counts", args)
    repeated = in_buffer([2, 2, 2, 0])
    yield Sample("repeated-rows", (rows, good, repeated, None, 1, 3, 4, 0, False, UNLIMITED))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), before=draw(st.integers(0, 3)), gap=2)
    rows, capacity = tokens.shape
    lengths = draw(int32_vectors(rows, 0, capacity))
    indices = None
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        indices = in_buffer(draw(st.lists(st.integers(-1, rows), max_size=5)), dtype=dtype)
    batch = rows if indices is None else len(indices)
    num_sampled = None
    if draw(st.booleans()):
        num_sampled = draw(int32_vectors(batch, 0, 3))
    options = (*draw(lookup_options()), *draw(any_costs()), draw(st.booleans()))
    return (tokens, lengths, indices, num_sampled, *options)


def _sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for rows, capacity, k, low, high in ((12, 50, 3, 2, 5), (17, 61, 5, 3, 6), (20, 83, 8, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 1, dtype=np.int32)
        num_sampled = np.ones(rows - 1, np.int32)
        tokens = random_rows(rng, rows, capacity, 3)
        costs = RISING.copy(), 40 + 2 * k
        options = (low, high, k, 0, False, capacity + 3, *costs, False)
        made.append((tokens, lengths, indices, num_sampled, *options))
    return tuple(made)


LOOKUP_BAD_CALLS = (
    BadCall("min_n > max_n", {"min_n": 5, "max_n": 4}, r"expected 1 to 4, got 5"),
    BadCall("min_n = 0", {"min_n": 0}, r"expected 1 to 4, got 0"),
    BadCall("max_n = 65", {"max_n": 65}, r"expected 1 to 64, got 65"),
    BadCall("match_policy = 2", {"match_policy": 2}, r"expected 0 to 1, got 2"),
)
K_BAD_CALLS = (
    BadCall("k = -1", {"k": -1}, r"expected 0 to 64, got -1"),
    BadCall("k = 65", {"k": 65}, r"expected 0 to 64, got 65"),
)
COST_BAD_CALLS = (
    BadCall("limit = -1", {"cost_limit": -1}, r"expected 0 to 2147483647, got -1"),
    BadCall("limit = 2**31", {"cost_limit": 2**31}, r"expected 0 to 2147483647, got 2147483648"),
)
PAID_BAD_CALLS = (
    BadCall(
        "costs without a table",
        {"draft_costs": np.zeros((3, 5), np.uint8), "match_costs": None},
        r"None \(without match_costs\), got a tensor",
    ),
    BadCall(
        "shape of costs",
        {"draft_costs": np.zeros((3, 4), np.uint8), "match_costs": RISING},
        r"shape \[3, 5\], got shape \[3, 4\]",
    ),
)

SPEC = OpSpec(
    name="ngram_propose",
    reference=reference.ngram_propose,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(*LOOKUP_BAD_CALLS, *K_BAD_CALLS, *COST_BAD_CALLS),
    sizes=_sizes(),
)


def _into(args: Args, number: int, dtype: Any = np.int32) -> Args:
    """The call of ``ngram_propose_`` for one of ``ngram_propose``; tensors vary with the number."""
    tokens, lengths, rows, num_sampled, low, high, k, policy, overlap, max_len, *costs, fill = args
    batch = len(tokens if rows is None else rows)
    drafts = in_buffer(np.full((batch, k), -7), before=number % 3, gap=number % 4, dtype=dtype)
    counts, match_len = (in_buffer(np.full(batch, -7), before=1, gap=1) for _ in range(2))
    paid = paid_in_turn((costs[0], costs[1]), number, batch, k)
    memory = np.zeros(4 * batch, np.int32) if number % 2 else None
    lookup = low, high, policy, overlap, max_len, *costs, fill
    outputs = drafts, counts, match_len, paid, memory
    return (tokens, lengths, rows, num_sampled, *lookup, *outputs)


def _samples_into(rng: np.random.Generator) -> Iterator[Sample]:
    """Those that differ in more than the rows, and every fifth of the others."""
    head = ("ordinary", "max-len", "costs", "empty", "hostile", "tile", "few", "one", "many")
    for i, sample in enumerate(_samples(rng)):
        args, k = sample.args, sample.args[6]
        if i == 0:
            args = (*args[:10], RISING, 75, args[12])
        elif not sample.label.startswith(head) and i % 5:
            continue
        number = 1 if i == 0 or sample.label.startswith("few") else i // 2
        dtype = (np.int32, np.int64)[(i + k) % 2]
        yield replace(sample, args=_into(args, number, dtype))


@st.composite
def _strategy_into(draw: st.DrawFn) -> Args:
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return _into(draw(SPEC.strategy), draw(st.integers(0, 5)), dtype)


SPEC_INTO = OpSpec(
    name="ngram_propose_",
    kernel_of="ngram_propose",
    reference=reference.ngram_propose_,
    samples=_samples_into,
    strategy=_strategy_into(),
    bad_calls=(
        *LOOKUP_BAD_CALLS,
        *COST_BAD_CALLS,
        *PAID_BAD_CALLS,
        BadCall(
            "k = 65",
            {"draft_token_ids": np.zeros((3, 65), np.int32)},
            r"expected 0 to 64, got 65",
            "draft_token_ids width",
        ),
        BadCall(
            "overlapping rows",
            {"draft_token_ids": np.ndarray((3, 5), np.int32, np.zeros(9, np.int32), 0, (4, 4))},
            r"rows that do not overlap",
        ),
    ),
    sizes=tuple(contiguous(_into(args, 1)) for args in SPEC.sizes),
)
