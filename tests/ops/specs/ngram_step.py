from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from ops import reference

from .batches import int32_vectors
from .costs import RISING, any_costs, costs_in_turn, fills_in_turn, paid_in_turn
from .ngram_propose import COST_BAD_CALLS, K_BAD_CALLS, LOOKUP_BAD_CALLS, PAID_BAD_CALLS
from .rows import (
    EDGE_LENGTHS,
    FEW_LONG,
    HOSTILE_INT32,
    HOSTILE_INT64,
    INT32_MAX,
    MANY,
    ONE_REQUEST,
    PIECE_ENDS,
    POLICIES,
    TILE_CAPACITY,
    TILE_LENGTHS,
    lookup_options,
    matches_ending_at,
    matrices,
    planted_rows,
    random_rows,
    structured_rows,
    token_rows,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer

UNLIMITED = 2**63 - 1
K = 9
"""The place of ``k`` in a call."""


def _sampled(rng: np.random.Generator, batch: int, width: int, alphabet: int) -> Array:
    """A rejection sampler's result: a run of ids, then -1."""
    tokens = rng.integers(0, alphabet, (batch, width), dtype=np.int32)
    kept = rng.integers(0, width + 1, (batch, 1))
    tokens[np.arange(width) >= kept] = -1
    return tokens


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_steps(rng)):
        *args, workspace = sample.args
        named, costs = costs_in_turn(sample.label, i + 1)
        paid = paid_in_turn(costs, i // 5, len(args[2]), args[K])
        for label, fill in fills_in_turn(named, i):
            yield replace(sample, label=label, args=(*args, *costs, fill, paid, workspace))


def _steps(rng: np.random.Generator) -> Iterator[Sample]:
    """All arguments up to ``max_len``, and the workspace."""
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    sampled = in_buffer(_sampled(rng, 3, 6, 3), gap=2)
    discard = in_buffer([False, True, False], dtype=np.bool_)
    indices = in_buffer([1, 0, 4], gap=2, dtype=np.int64)
    head = (tokens, lengths, sampled, discard, indices)
    yield Sample("ordinary", (*head, True, 1000, 2, 4, 5, 0, False, 4096, None))

    workspace = np.zeros(96, np.int32)
    for advance in (False, True):
        for policy in POLICIES:
            label = f"{policy}-advance-{advance}"
            tail = (1, 3, 4, *policy, 64, workspace)
            yield Sample(f"workspace-{label}", (*head, advance, 1000, *tail))
            for width in (1, 2, 5, 64, 65):
                rows = in_buffer(random_rows(rng, 9, 120, 2), before=1, gap=1)
                ragged = in_buffer(rng.integers(0, 121, 9))
                new = in_buffer(_sampled(rng, 7, width, 2), gap=1)
                args = (rows, ragged, new, None, None, advance, 7, 1, 4, 6, *policy, 118, None)
                yield Sample(f"width-{width}-{label}", args)
            rows = in_buffer(random_rows(rng, len(EDGE_LENGTHS), 200, 2), gap=2)
            new = in_buffer(_sampled(rng, len(EDGE_LENGTHS), 4, 2))
            edge = in_buffer(EDGE_LENGTHS)
            args = (rows, edge, new, None, None, advance, 9, 2, 5, 6, *policy, UNLIMITED, None)
            yield Sample(f"edge-lengths-{label}", args)
            for name, row in structured_rows(150):
                rows = in_buffer(np.tile(row, (5, 1)), gap=3)
                at = [150, 148, 100, 64, 9]
                new = np.stack([np.resize(row[t:], 3) if t < 150 else row[:3] for t in at])
                args = (rows, in_buffer(at), in_buffer(new), None, None, advance, INT32_MAX)
                yield Sample(f"{name}-{label}", (*args, 2, 8, 10, *policy, 152, None))
    for before, policy in enumerate(POLICIES):
        # The appended tokens equal the row's end, so that the copies match the grown row.
        ends = TILE_LENGTHS * (1 + before // 2)  # a large batch has fewer blocks for each row
        grown = planted_rows(rng, ends, TILE_CAPACITY)
        new = np.stack([row[t - 3 : t] for row, t in zip(grown, ends, strict=True)])
        at = in_buffer([t - 3 for t in ends])
        head = (in_buffer(grown, before=before), at, in_buffer(new), None, None, True, INT32_MAX)
        memory = workspace if before % 2 else None
        yield Sample(f"tile-edges-{policy}", (*head, 1, 8, 5, *policy, UNLIMITED, memory))
        for few in FEW_LONG:
            grown = planted_rows(rng, few, 12303, 2 * before)
            new = np.stack([row[t - 3 : t] for row, t in zip(grown, few, strict=True)])
            at = in_buffer([t - 3 for t in few])
            head = (in_buffer(grown, before=2), at, in_buffer(new), None, None, True, INT32_MAX)
            tail = (1, 8, 5, *policy, UNLIMITED, workspace)
            yield Sample(f"few-long-{len(few)}-{policy}", (*head, *tail))
    for capacity in ONE_REQUEST:
        one = (random_rows(rng, 1, capacity, 2), in_buffer([60]), in_buffer([[1, 0, -1]]))
        tail = (None, None, True, 2, 1, 3, 4, 0, False, UNLIMITED, None)
        yield Sample(f"one-request-{capacity}", (*one, *tail))
    for batch, policy in zip(MANY, POLICIES, strict=True):
        rows, many = random_rows(rng, batch, 20, 2), in_buffer(rng.integers(0, 21, batch))
        args = (rows, many, _sampled(rng, batch, 3, 2), None, None, True, 2)
        yield Sample(f"many-{batch}", (*args, 1, 3, 4, *policy, 22, None))
    for match_policy, n in ((0, 3), (1, 64)):
        grown = matches_ending_at(PIECE_ENDS, n, 2300)
        for width in (1, 2, 64):  # of which none, some, all of the suffix are in the row already
            old = 2300 - width
            rows = in_buffer(np.where(np.arange(2300) < old, grown, -7), gap=1)
            args = (rows, in_buffer([old] * len(rows)), in_buffer(grown[:, old:]), None, None)
            tail = (True, UNLIMITED, 2, n, 4, match_policy, False, UNLIMITED, None)
            yield Sample(f"pieces-{n}-{match_policy}-{width}", (*args, *tail))
    yield from _empty_samples()
    yield from _hostile_samples(rng)


def _empty_samples() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, 0), (0, 9, 3), (3, 0, 3), (3, 1, 2), (2, 2, 2), (4, 8, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = np.arange(batch, dtype=np.int32)
        for length in {0, capacity}:
            lengths = np.full(rows, length, np.int32)
            sampled = np.zeros((batch, 3), np.int32)
            args = (tokens, lengths, sampled, None, indices, True, 5, 1, 2, 3, 0, False, 10, None)
            yield Sample(f"empty-{rows}x{capacity}-{batch}-{length}", args)


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 2), gap=4)
    new = in_buffer(_sampled(rng, len(lengths), 4, 2))
    tail = (1, 3, 4, 0, False, UNLIMITED, None)
    for advance in (False, True):
        args = (rows, in_buffer(lengths), new, None, None, advance, 10, *tail)
        yield Sample(f"hostile-lengths-{advance}", args)
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        # 0 and 1 are good rows; every other index is out of range.
        indices = in_buffer([i for i in bad if not 2 <= i < 2**31 - 2], dtype=dtype)
        sampled = in_buffer(_sampled(rng, len(indices), 4, 2))
        good = in_buffer([20] * len(lengths))
        args = (rows, good, sampled, None, indices, True, 10, *tail)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    values = in_buffer([[v, 1, -1] for v in HOSTILE_INT32] + [[0, v, 1] for v in HOSTILE_INT32])
    room = in_buffer(random_rows(rng, len(values), 40, 2))
    for vocab_size in (-(2**63), -1, 0, 1, 2, INT32_MAX, UNLIMITED):
        length = in_buffer([30] * len(values))
        args = (room, length, values, None, None, True, vocab_size, *tail)
        yield Sample(f"hostile-tokens-{vocab_size}", args)
    holes = in_buffer([[0, -1, 1, 1], [-1, 0, 0, 0], [99, 0, 0, 0], [0, 0, 99, 0]])
    four = in_buffer([38, 38, 40, 38])
    args = (rows[:4], four, holes, None, None, True, 10, *tail)
    yield Sample("holes", args)
    twice = in_buffer([2, 2, 0, 2])
    args = (rows[:4], four, holes, None, twice, True, 10, *tail)
    yield Sample("repeated-rows", args, compare=False)
    # Requests append to one row, which is longer then than it was when it was searched: with a
    # max_len that the first of them reaches, and in a row that several blocks share.
    for capacity, length, batch in ((40, 20, 12), (2300, 2278, 3)):
        rows = in_buffer(random_rows(rng, 3, capacity, 2), before=1, gap=2)
        at = in_buffer([length, capacity - 1, 2], gap=1)
        new = in_buffer(rng.integers(0, 2, (batch, 3)), gap=1)
        shared = in_buffer(np.resize([0, 0, 0, 0, 1, 2], batch), dtype=np.int64)
        for advance in (False, True):
            for policy in POLICIES:
                for max_len in (length + 2, length + 4, UNLIMITED):
                    args = (rows, at, new, None, shared, advance, 10, 1, 3, 4, *policy)
                    label = f"shared-rows-{capacity}-{advance}-{policy}-{max_len}"
                    yield Sample(label, (*args, max_len, None), compare=False)


@st.composite
def sampled_and_discard(draw: st.DrawFn, batch: int) -> tuple[Array, Array | None]:
    sampled = draw(matrices(batch, draw(st.integers(1, 6)), st.integers(-2, 6)))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=batch, max_size=batch))
    return in_buffer(sampled, gap=1), None if mask is None else in_buffer(mask, dtype=np.bool_)


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), before=draw(st.integers(0, 3)), gap=2)
    rows, capacity = tokens.shape
    lengths = draw(int32_vectors(rows, 0, capacity))
    order = draw(st.permutations(range(-1, rows + 1)))
    batch = draw(st.integers(0, rows))
    indices = None
    if draw(st.booleans()):
        indices = in_buffer(order[:batch], dtype=draw(st.sampled_from([np.int32, np.int64])))
    sampled, discard = draw(sampled_and_discard(batch))
    head = (tokens, lengths, sampled, discard, indices, draw(st.booleans()))
    vocab_size = draw(st.sampled_from([0, 2, 6, UNLIMITED]))
    lookup, costs = draw(lookup_options()), draw(any_costs())
    paid = paid_in_turn(costs, draw(st.integers(0, 1)), batch, lookup[2])
    return (*head, vocab_size, *lookup, *costs, draw(st.booleans()), paid, None)


def _sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for rows, capacity, width, k, low, high in (
        (12, 50, 4, 3, 2, 5),
        (17, 61, 7, 5, 3, 6),
        (20, 83, 6, 8, 4, 9),
    ):
        batch = rows - 1
        tokens = random_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        sampled = _sampled(rng, batch, width, 3)
        discard = np.zeros(batch, np.bool_)
        indices = np.arange(batch, dtype=np.int32)
        head = (tokens, lengths, sampled, discard, indices, True, 20 + rows)
        paid = np.zeros((batch, k), np.uint8)
        lookup = low, high, k, 0, False, capacity + 3
        made.append((*head, *lookup, RISING.copy(), 45 + 2 * k, False, paid, None))
    return tuple(made)


SAMPLED_BAD_CALLS = (
    BadCall(
        "width 0",
        {"sampled_token_ids": lambda a: a[:, :0]},
        r"expected 1 to 65, got 0",
        "sampled_token_ids width",
    ),
    BadCall(
        "more requests than rows",
        {"sampled_token_ids": np.zeros((6, 2), np.int32), "discard": None, "row_indices": None},
        r"batch <= 5 .*got 6",
    ),
)

SPEC = OpSpec(
    name="ngram_step_",
    reference=reference.ngram_step_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        *LOOKUP_BAD_CALLS,
        *K_BAD_CALLS,
        *COST_BAD_CALLS,
        *PAID_BAD_CALLS,
        *SAMPLED_BAD_CALLS,
    ),
    sizes=_sizes(),
)
