from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from ngram_npu import reference

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
from .spec import Args, BadCall, OpSpec, Sample, in_buffer

UNLIMITED = 2**63 - 1


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_lookups(rng)):
        both = sample.label.startswith(("empty", "hostile"))
        for fill in (False, True) if both else (i // 2 % 2 == 1,):
            label = f"{sample.label}-filled" if fill else sample.label
            yield replace(sample, label=label, args=(*sample.args, fill))


def _lookups(rng: np.random.Generator) -> Iterator[Sample]:
    """All arguments but ``fill``."""
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2])
    indices = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    num_sampled = in_buffer([3, 1, 0], gap=1)
    yield Sample("ordinary", (tokens, lengths, indices, num_sampled, 2, 4, 5, 0, False, 4096, None))

    for policy in POLICIES:
        yield Sample(
            f"all-rows-{policy}", (tokens, lengths, None, None, 1, 3, 4, *policy, 64, None)
        )
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 33, 64):
            for low in sorted({1, (n + 1) // 2, n}):
                rows = in_buffer(random_rows(rng, 12, 200, int(rng.integers(1, 5))), gap=1)
                ragged = in_buffer(rng.integers(0, 201, 12))
                args = (
                    rows,
                    ragged,
                    None,
                    None,
                    low,
                    n,
                    int(rng.integers(1, 65)),
                    *policy,
                    190,
                    None,
                )
                yield Sample(f"n-{low}-{n}-{policy}", args)
        for alphabet in (1, 2, 4):
            rows = in_buffer(random_rows(rng, len(EDGE_LENGTHS), 200, alphabet), before=1, gap=2)
            args = (rows, in_buffer(EDGE_LENGTHS), None, None, 2, 5, 6, *policy, UNLIMITED, None)
            yield Sample(f"edge-lengths-{alphabet}-{policy}", args)
        for name, row in structured_rows(180):
            lengths_of_one = in_buffer([180, 179, 100, 67, 66, 65, 64, 63, 18, 3])
            rows = in_buffer(np.tile(row, (10, 1)), gap=3)
            args = (rows, lengths_of_one, None, None, 2, 8, 10, *policy, 182, None)
            yield Sample(f"{name}-{policy}", args)

    for before, policy in enumerate(POLICIES):
        at = TILE_LENGTHS * (1 + before // 2)  # a large batch has fewer blocks for each row
        rows = in_buffer(planted_rows(rng, at, TILE_CAPACITY), before=before)
        memory = np.zeros(4 * len(at), np.int32) if before % 2 else None
        args = (rows, in_buffer(at), None, None, 1, 8, 5, *policy, UNLIMITED, memory)
        yield Sample(f"tile-edges-{policy}", args)
        for few in FEW_LONG:
            long = in_buffer(planted_rows(rng, few, 12303, 2 * before), before=1)
            memory = np.zeros(4 * len(few), np.int32)
            args = (long, in_buffer(few), None, None, 1, 8, 5, *policy, UNLIMITED, memory)
            yield Sample(f"few-long-{len(few)}-{policy}", args)
    for capacity in ONE_REQUEST:
        one = (random_rows(rng, 1, capacity, 2), in_buffer([60]), None, None)
        yield Sample(f"one-request-{capacity}", (*one, 1, 3, 4, 0, False, UNLIMITED, None))
    for batch, policy in zip(MANY, POLICIES, strict=True):
        rows, many = random_rows(rng, batch, 20, 2), in_buffer(rng.integers(0, 21, batch))
        yield Sample(f"many-{batch}", (rows, many, None, None, 1, 3, 4, *policy, 22, None))
    for match_policy, n in ((0, 3), (1, 3), (0, 64), (1, 64)):
        rows = in_buffer(matches_ending_at(PIECE_ENDS, n, 2300), before=1, gap=1)
        whole = in_buffer([2300] * len(PIECE_ENDS))
        args = (rows, whole, None, None, 2, n, 4, match_policy, False, UNLIMITED, None)
        yield Sample(f"pieces-{n}-{match_policy}", args)

    for k in (1, 64):
        for max_len in (-(2**63), -1, 0, 89, 90, 91, 95, UNLIMITED):
            args = (tokens, lengths, None, None, 1, 2, k, 0, True, max_len, None)
            yield Sample(f"max-len-{max_len}-k-{k}", args)
    yield from _empty_samples()
    yield from _hostile_samples(rng)


def _empty_samples() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, None), (0, 9, 3), (3, 0, None), (3, 1, 2), (1, 1, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = None if batch is None else np.zeros(batch, np.int32)
        lengths = np.full(rows, capacity, np.int32)
        args = (tokens, lengths, indices, None, 1, 2, 3, 0, False, 10, None)
        yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 2), gap=4)
    for policy in POLICIES:
        args = (rows, in_buffer(lengths), None, None, 1, 3, 4, *policy, UNLIMITED, None)
        yield Sample(f"hostile-lengths-{policy}", args)
    good = in_buffer([40] * len(lengths))
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        indices = in_buffer([*bad, len(lengths) - 1, len(lengths)], dtype=dtype)
        args = (rows, good, indices, None, 1, 3, 4, 0, False, UNLIMITED, None)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    args = (rows, good, None, in_buffer([*HOSTILE_INT32, 2, 3, 65]), 1, 3, 4, 0, False, UNLIMITED)
    yield Sample("hostile-counts", (*args, None))
    repeated = in_buffer([2, 2, 2, 0])
    yield Sample("repeated-rows", (rows, good, repeated, None, 1, 3, 4, 0, False, UNLIMITED, None))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), before=draw(st.integers(0, 3)), gap=2)
    rows, capacity = tokens.shape
    length = st.one_of(st.integers(0, capacity), st.sampled_from(HOSTILE_INT32))
    lengths = in_buffer(draw(st.lists(length, min_size=rows, max_size=rows)))
    indices = None
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        indices = in_buffer(draw(st.lists(st.integers(-1, rows), max_size=5)), dtype=dtype)
    batch = rows if indices is None else len(indices)
    num_sampled = None
    if draw(st.booleans()):
        count = st.one_of(st.integers(0, 3), st.sampled_from(HOSTILE_INT32))
        num_sampled = in_buffer(draw(st.lists(count, min_size=batch, max_size=batch)))
    options = (*draw(lookup_options()), None, draw(st.booleans()))
    return (tokens, lengths, indices, num_sampled, *options)


def _sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for rows, capacity, k, low, high in ((12, 50, 3, 2, 5), (17, 61, 5, 3, 6), (20, 83, 8, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 1, dtype=np.int32)
        num_sampled = np.ones(rows - 1, np.int32)
        tokens = random_rows(rng, rows, capacity, 3)
        options = (low, high, k, 0, False, capacity + 3, None, False)
        made.append((tokens, lengths, indices, num_sampled, *options))
    return tuple(made)


LOOKUP_BAD_CALLS = (
    BadCall("min_n > max_n", {"min_n": 5, "max_n": 4}, r"expected 1 to 4, got 5", "min_n"),
    BadCall("min_n = 0", {"min_n": 0}, r"expected 1 to 4, got 0", "min_n"),
    BadCall("max_n = 65", {"max_n": 65}, r"expected 1 to 64, got 65", "max_n"),
    BadCall("k = 0", {"k": 0}, r"expected 1 to 64, got 0", "k"),
    BadCall("k = 65", {"k": 65}, r"expected 1 to 64, got 65", "k"),
    BadCall("match_policy = 2", {"match_policy": 2}, r"expected 0 to 1, got 2", "match_policy"),
    BadCall("R mismatch", {"num_tokens": lambda a: a[:-1]}, r"size 5, got size 4", "num_tokens"),
)

SPEC = OpSpec(
    name="ngram_propose",
    reference=reference.ngram_propose,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        *LOOKUP_BAD_CALLS,
        BadCall(
            "B mismatch", {"num_sampled": lambda a: a[:-1]}, r"size 3, got size 2", "num_sampled"
        ),
    ),
    sizes=_sizes(),
)
