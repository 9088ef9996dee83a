"""The OpSpecs of the lookups without an index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from ops import reference

from .inputs import (
    EDGE_LENGTHS,
    FEW_LONG,
    HOSTILE_INDICES,
    HOSTILE_INT32,
    INT32_MAX,
    LIMITS,
    MANY,
    ONE_REQUEST,
    PIECE_ENDS,
    POLICIES,
    RISING,
    TABLES,
    TILE_CAPACITY,
    TILE_LENGTHS,
    UNLIMITED,
    alternate_costs,
    alternate_draft_costs,
    alternate_fill,
    matches_ending_at,
    planted_rows,
    random_rows,
    sampled_tokens,
    structured_rows,
)
from .spec import Args, BadCall, OpSpec, Sample, contiguous, in_buffer


def _propose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_proposals(rng)):
        label, match_costs, limit = alternate_costs(sample.label, i)
        for name, fill in alternate_fill(label, i):
            args = (*sample.args, match_costs, limit, fill)
            yield replace(sample, label=name, args=args)
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
    for limit in (1500, 2500):  # reached within 32 tokens, and later
        args = (rows, lengths, None, None, 1, 6, 64, 1, True, 122, RISING, limit, False)
        yield Sample(f"costs-of-64-{limit}", args)


def _proposals(rng: np.random.Generator) -> Iterator[Sample]:
    """Calls of ngram_propose without the arguments after ``max_len``."""
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
        at = TILE_LENGTHS * (1 + before // 2)  # a large batch has fewer blocks per row
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
        full = in_buffer([2300] * len(PIECE_ENDS))
        args = (rows, full, None, None, 2, n, 4, match_policy, False, UNLIMITED)
        yield Sample(f"pieces-{n}-{match_policy}", args)

    for k in (0, 1, 64):
        for max_len in (-(2**63), -1, 0, 89, 90, 91, 95, UNLIMITED):
            args = (tokens, lengths, None, None, 1, 2, k, 0, True, max_len)
            yield Sample(f"max-len-{max_len}-k-{k}", args)
    yield from _empty_proposals()
    yield from _hostile_proposals(rng)


def _empty_proposals() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, None), (0, 9, 3), (3, 0, None), (3, 1, 2), (1, 1, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = None if batch is None else np.zeros(batch, np.int32)
        for lengths in (np.full(rows, capacity, np.int32), np.arange(rows, dtype=np.int32)):
            args = (tokens, lengths, indices, None, 1, 2, 3, 0, False, 10)
            yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _hostile_proposals(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 2), gap=4)
    for policy in POLICIES:
        args = (rows, in_buffer(lengths), None, None, 1, 3, 4, *policy, UNLIMITED)
        yield Sample(f"hostile-lengths-{policy}", args)
    good = in_buffer([40] * len(lengths))
    for dtype, bad in HOSTILE_INDICES:
        indices = in_buffer([*bad, len(lengths) - 1, len(lengths)], dtype=dtype)
        args = (rows, good, indices, None, 1, 3, 4, 0, False, UNLIMITED)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    args = (rows, good, None, in_buffer([*HOSTILE_INT32, 2, 3, 65]), 1, 3, 4, 0, False, UNLIMITED)
    yield Sample("hostile-counts", args)
    repeated = in_buffer([2, 2, 2, 0])
    yield Sample("repeated-rows", (rows, good, repeated, None, 1, 3, 4, 0, False, UNLIMITED))


def _propose_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, k, low, high in ((12, 50, 3, 2, 5), (17, 61, 5, 3, 6), (20, 83, 8, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 1, dtype=np.int32)
        num_sampled = np.ones(rows - 1, np.int32)
        tokens = random_rows(rng, rows, capacity, 3)
        costs = RISING.copy(), 40 + 2 * k
        options = (low, high, k, 0, False, capacity + 3, *costs, False)
        yield (tokens, lengths, indices, num_sampled, *options)


RANGE_BAD_CALL = BadCall({"min_n": 5, "max_n": 4}, r"expected 1 to 4, got 5")
DRAFT_COST_BAD_CALLS = (
    BadCall(
        {"draft_costs": np.zeros((3, 5), np.uint8), "match_costs": None},
        r"None \(draft_costs require match_costs\), got a tensor",
    ),
    BadCall(
        {"draft_costs": np.zeros((3, 4), np.uint8), "match_costs": RISING},
        r"shape \[3, 5\], got shape \[3, 4\]",
    ),
)

NGRAM_PROPOSE = OpSpec(
    name="ngram_propose",
    reference=reference.ngram_propose,
    samples=_propose_samples,
    bad_calls=(RANGE_BAD_CALL,),
    sizes=tuple(_propose_sizes()),
)


def _into(args: Args, number: int, dtype: Any = np.int32) -> Args:
    """The call of ``ngram_propose_`` that corresponds to one of ``ngram_propose``. The number
    selects the layout of the tensors."""
    tokens, lengths, rows, num_sampled, low, high, k, policy, overlap, max_len, *costs, fill = args
    batch = len(tokens if rows is None else rows)
    drafts = in_buffer(np.full((batch, k), -7), before=number % 3, gap=number % 4, dtype=dtype)
    counts, match_len = (in_buffer(np.full(batch, -7), before=1, gap=1) for _ in range(2))
    draft_costs = alternate_draft_costs(costs[0], number, batch, k)
    workspace = np.zeros(4 * batch, np.int32) if number % 2 else None
    lookup = low, high, policy, overlap, max_len, *costs, fill
    outputs = drafts, counts, match_len, draft_costs, workspace
    return (tokens, lengths, rows, num_sampled, *lookup, *outputs)


def _samples_into(rng: np.random.Generator) -> Iterator[Sample]:
    """The samples of ngram_propose that differ in more than their rows, and a fifth of the rest."""
    head = ("ordinary", "max-len", "costs", "empty", "hostile", "tile", "few", "one", "many")
    for i, sample in enumerate(_propose_samples(rng)):
        args, k = sample.args, sample.args[6]
        if i == 0:
            args = (*args[:10], RISING, 75, args[12])
        elif not sample.label.startswith(head) and i % 5:
            continue
        number = 1 if i == 0 or sample.label.startswith("few") else i // 2
        dtype = (np.int32, np.int64)[(i + k) % 2]
        yield replace(sample, args=_into(args, number, dtype))


NGRAM_PROPOSE_INTO = OpSpec(
    name="ngram_propose_",
    kernel_of="ngram_propose",
    reference=reference.ngram_propose_,
    samples=_samples_into,
    bad_calls=(
        RANGE_BAD_CALL,
        *DRAFT_COST_BAD_CALLS,
        BadCall(
            {"draft_token_ids": np.zeros((3, 65), np.int32)},
            r"expected 0 to 64, got 65",
            "draft_token_ids width",
        ),
        BadCall(
            {"draft_token_ids": np.ndarray((3, 5), np.int32, np.zeros(9, np.int32), 0, (4, 4))},
            r"rows that do not overlap",
        ),
    ),
    sizes=tuple(contiguous(_into(args, 1)) for args in NGRAM_PROPOSE.sizes),
)


STEP_K = 9
"""The place of ``k`` in a call of ``ngram_step_``."""


def _step_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_steps(rng)):
        *args, workspace = sample.args
        label, match_costs, limit = alternate_costs(sample.label, i + 1)
        batch, k = len(args[2]), args[STEP_K]
        draft_costs = alternate_draft_costs(match_costs, i // 5, batch, k)
        for name, fill in alternate_fill(label, i):
            more = match_costs, limit, fill, draft_costs, workspace
            yield replace(sample, label=name, args=(*args, *more))


def _steps(rng: np.random.Generator) -> Iterator[Sample]:
    """Calls of ngram_step_ without the arguments after ``max_len``, but with the workspace."""
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    sampled = in_buffer(sampled_tokens(rng, 3, 6, 3), gap=2)
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
                new = in_buffer(sampled_tokens(rng, 7, width, 2), gap=1)
                args = (rows, ragged, new, None, None, advance, 7, 1, 4, 6, *policy, 118, None)
                yield Sample(f"width-{width}-{label}", args)
            rows = in_buffer(random_rows(rng, len(EDGE_LENGTHS), 200, 2), gap=2)
            new = in_buffer(sampled_tokens(rng, len(EDGE_LENGTHS), 4, 2))
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
        # The appended tokens equal the end of the planted row, so the copies match the grown row.
        ends = TILE_LENGTHS * (1 + before // 2)  # a large batch has fewer blocks per row
        grown = planted_rows(rng, ends, TILE_CAPACITY)
        new = np.stack([row[t - 3 : t] for row, t in zip(grown, ends, strict=True)])
        at = in_buffer([t - 3 for t in ends])
        head = (in_buffer(grown, before=before), at, in_buffer(new), None, None, True, INT32_MAX)
        odd_workspace = workspace if before % 2 else None
        yield Sample(f"tile-edges-{policy}", (*head, 1, 8, 5, *policy, UNLIMITED, odd_workspace))
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
        args = (rows, many, sampled_tokens(rng, batch, 3, 2), None, None, True, 2)
        yield Sample(f"many-{batch}", (*args, 1, 3, 4, *policy, 22, None))
    for match_policy, n in ((0, 3), (1, 64)):
        grown = matches_ending_at(PIECE_ENDS, n, 2300)
        for width in (1, 2, 64):  # none, some or all of the suffix is appended
            old = 2300 - width
            rows = in_buffer(np.where(np.arange(2300) < old, grown, -7), gap=1)
            args = (rows, in_buffer([old] * len(rows)), in_buffer(grown[:, old:]), None, None)
            tail = (True, UNLIMITED, 2, n, 4, match_policy, False, UNLIMITED, None)
            yield Sample(f"pieces-{n}-{match_policy}-{width}", (*args, *tail))
    yield from _empty_steps()
    yield from _hostile_steps(rng)


def _empty_steps() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, 0), (0, 9, 3), (3, 0, 3), (3, 1, 2), (2, 2, 2), (4, 8, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = np.arange(batch, dtype=np.int32)
        for length in {0, capacity}:
            lengths = np.full(rows, length, np.int32)
            sampled = np.zeros((batch, 3), np.int32)
            args = (tokens, lengths, sampled, None, indices, True, 5, 1, 2, 3, 0, False, 10, None)
            yield Sample(f"empty-{rows}x{capacity}-{batch}-{length}", args)


def _hostile_steps(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 2), gap=4)
    new = in_buffer(sampled_tokens(rng, len(lengths), 4, 2))
    tail = (1, 3, 4, 0, False, UNLIMITED, None)
    for advance in (False, True):
        args = (rows, in_buffer(lengths), new, None, None, advance, 10, *tail)
        yield Sample(f"hostile-lengths-{advance}", args)
    for dtype, bad in HOSTILE_INDICES:
        # Only 0 and 1 are valid rows.
        indices = in_buffer([i for i in bad if not 2 <= i < 2**31 - 2], dtype=dtype)
        sampled = in_buffer(sampled_tokens(rng, len(indices), 4, 2))
        good = in_buffer([20] * len(lengths))
        args = (rows, good, sampled, None, indices, True, 10, *tail)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    values = in_buffer([[v, 1, -1] for v in HOSTILE_INT32] + [[0, v, 1] for v in HOSTILE_INT32])
    token_rows = in_buffer(random_rows(rng, len(values), 40, 2))
    for vocab_size in (-(2**63), -1, 0, 1, 2, INT32_MAX, UNLIMITED):
        length = in_buffer([30] * len(values))
        args = (token_rows, length, values, None, None, True, vocab_size, *tail)
        yield Sample(f"hostile-tokens-{vocab_size}", args)
    holes = in_buffer([[0, -1, 1, 1], [-1, 0, 0, 0], [99, 0, 0, 0], [0, 0, 99, 0]])
    four = in_buffer([38, 38, 40, 38])
    args = (rows[:4], four, holes, None, None, True, 10, *tail)
    yield Sample("holes", args)
    twice = in_buffer([2, 2, 0, 2])
    args = (rows[:4], four, holes, None, twice, True, 10, *tail)
    yield Sample("repeated-rows", args, compare=False)
    # Several requests append to one row, so that the row grows while it is searched: with a max_len
    # that the first request reaches, and in a row that several blocks share.
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


def _step_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, width, k, low, high in (
        (12, 50, 4, 3, 2, 5),
        (17, 61, 7, 5, 3, 6),
        (20, 83, 6, 8, 4, 9),
    ):
        batch = rows - 1
        tokens = random_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        sampled = sampled_tokens(rng, batch, width, 3)
        discard = np.zeros(batch, np.bool_)
        indices = np.arange(batch, dtype=np.int32)
        head = (tokens, lengths, sampled, discard, indices, True, 20 + rows)
        draft_costs = np.zeros((batch, k), np.uint8)
        lookup = low, high, k, 0, False, capacity + 3
        yield (*head, *lookup, RISING.copy(), 45 + 2 * k, False, draft_costs, None)


SAMPLED_BAD_CALLS = (
    BadCall(
        {"sampled_token_ids": lambda a: a[:, :0]},
        r"expected 1 to 65, got 0",
        "sampled_token_ids width",
    ),
    BadCall(
        {"sampled_token_ids": np.zeros((6, 2), np.int32), "discard": None, "row_indices": None},
        r"batch <= 5 .*got 6",
    ),
)

NGRAM_STEP = OpSpec(
    name="ngram_step_",
    reference=reference.ngram_step_,
    samples=_step_samples,
    bad_calls=(
        RANGE_BAD_CALL,
        *DRAFT_COST_BAD_CALLS,
        *SAMPLED_BAD_CALLS,
    ),
    sizes=tuple(_step_sizes()),
    fixed=frozenset({"row_indices"}),  # a row must not occur twice
)
