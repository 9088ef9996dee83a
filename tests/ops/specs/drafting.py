"""The OpSpecs of the lookups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from ops import reference

from .inputs import (
    ANY_TOKEN,
    EDGE_LENGTHS,
    FEW_LONG_ROWS,
    HOSTILE_INDICES,
    HOSTILE_INT32,
    INT32_MAX,
    INT32_MIN,
    LARGE_BATCHES,
    LONG_CAPACITY,
    MANY_LONG_ROWS,
    ONE_REQUEST_CAPACITIES,
    PIECE_ENDS,
    POLICIES,
    TILE_CAPACITY,
    TILE_LENGTHS,
    UNLIMITED,
    draw_rows,
    make_copy_rows,
    make_match_rows,
    make_structured_rows,
    make_workspace,
    sample_tokens,
    select_fill,
)
from .spec import Args, BadCall, OpSpec, Sample, contiguous, in_buffer

VOCAB_SIZES = (ANY_TOKEN, 2, ANY_TOKEN, 1, 8192, ANY_TOKEN, 3, 0, UNLIMITED, 13)
"""The samples of lookups alternate between these values of ``vocab_size``."""


def _make_propose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_make_proposals(rng)):
        vocab_size = VOCAB_SIZES[i % len(VOCAB_SIZES)]
        for name, fill in select_fill(sample.label, i):
            yield replace(sample, label=name, args=(*sample.args, vocab_size, fill))
    yield from _make_vocabulary_proposals()


def _make_vocabulary_proposals() -> Iterator[Sample]:
    """Yields calls in which one token of a row is invalid: the first, a middle or the last token of
    the draft, a token of the fill, or the newest token."""
    both = False, True
    for length, k, positions, overlaps, fills, extra_lengths in (
        (10, 14, range(10), both, both, (0, 3, UNLIMITED)),
        # A warp writes 32 tokens.
        (70, 64, (0, 1, 30, 31, 32, 33, 62, 63, 64, 69), both[1:], both, (40, UNLIMITED)),
    ):
        row = [11, 12, *(1 + i % 9 for i in range(length)), 11, 12]
        for vocab_size, invalid_ids in (
            (13, (13, 14, INT32_MAX, -1, INT32_MIN)),
            (ANY_TOKEN, (INT32_MAX, -1)),
            (UNLIMITED, (-1,)),
            (0, (3,)),
            (-(2**63), (3,)),
        ):
            rows = [row]
            for token in invalid_ids:
                for position in positions:
                    changed = list(row)
                    changed[2 + position] = token
                    rows.append(changed)
                rows.append([11, token, *row[2:-1], token])
            tokens = in_buffer(rows, before=1, gap=2)
            lengths = in_buffer([len(row)] * len(rows))
            for overlap, fill, extra_length in product(overlaps, fills, extra_lengths):
                max_len = min(len(row) + extra_length, UNLIMITED)
                lookup = 1, 2, k, 0, overlap, max_len, vocab_size, fill
                label = f"vocabulary-{length}-{vocab_size}-{overlap}-{fill}-{max_len}"
                yield Sample(label, (tokens, lengths, None, None, *lookup))


def _make_proposals(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls of ngram_propose with the arguments up to ``max_len``."""
    tokens = in_buffer(draw_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2])
    indices = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    num_sampled = in_buffer([3, 1, 0], gap=1)
    yield Sample("ordinary", (tokens, lengths, indices, num_sampled, 2, 4, 5, 0, False, 4096))

    for policy in POLICIES:
        yield Sample(f"all-rows-{policy}", (tokens, lengths, None, None, 1, 3, 4, *policy, 64))
        for max_n in (1, 2, 3, 4, 5, 6, 7, 8, 33, 64):
            for min_n in sorted({1, (max_n + 1) // 2, max_n}):
                rows = in_buffer(draw_rows(rng, 12, 200, int(rng.integers(1, 5))), gap=1)
                ragged = in_buffer(rng.integers(0, 201, 12))
                k = int(rng.integers(1, 65))
                args = (rows, ragged, None, None, min_n, max_n, k, *policy, 190)
                yield Sample(f"n-{min_n}-{max_n}-{policy}", args)
        for alphabet in (1, 2, 4):
            rows = in_buffer(draw_rows(rng, len(EDGE_LENGTHS), 200, alphabet), before=1, gap=2)
            args = (rows, in_buffer(EDGE_LENGTHS), None, None, 2, 5, 6, *policy, UNLIMITED)
            yield Sample(f"edge-lengths-{alphabet}-{policy}", args)
        for name, row in make_structured_rows(180):
            lengths_of_one = in_buffer([180, 179, 100, 67, 66, 65, 64, 63, 18, 3])
            rows = in_buffer(np.tile(row, (10, 1)), gap=3)
            args = (rows, lengths_of_one, None, None, 2, 8, 10, *policy, 182)
            yield Sample(f"{name}-{policy}", args)

    for i, policy in enumerate(POLICIES):
        row_lengths = TILE_LENGTHS * (
            1 + i % 2
        )  # a device has fewer cores per row of a larger batch
        rows = in_buffer(make_copy_rows(rng, row_lengths, TILE_CAPACITY), before=i)
        args = (rows, in_buffer(row_lengths), None, None, 1, 8, 5, *policy, UNLIMITED)
        yield Sample(f"tile-edges-{policy}", args)
        for row_lengths in FEW_LONG_ROWS:
            rows = in_buffer(make_copy_rows(rng, row_lengths, LONG_CAPACITY, 2 * i), before=1)
            args = (rows, in_buffer(row_lengths), None, None, 1, 8, 5, *policy, UNLIMITED)
            yield Sample(f"few-long-{len(row_lengths)}-{policy}", args)
        rows = in_buffer(make_copy_rows(rng, MANY_LONG_ROWS, LONG_CAPACITY, i), before=3 - i)
        args = (rows, in_buffer(MANY_LONG_ROWS), None, None, 1, 8, 5, *policy, UNLIMITED)
        yield Sample(f"many-long-{policy}", args)
    for capacity in ONE_REQUEST_CAPACITIES:
        head = (draw_rows(rng, 1, capacity, 2), in_buffer([60]), None, None)
        yield Sample(f"one-request-{capacity}", (*head, 1, 3, 4, 0, False, UNLIMITED))
    for batch, policy in zip(LARGE_BATCHES, POLICIES, strict=True):
        rows, num_tokens = draw_rows(rng, batch, 20, 2), in_buffer(rng.integers(0, 21, batch))
        yield Sample(f"many-{batch}", (rows, num_tokens, None, None, 1, 3, 4, *policy, 22))
    for (length, ends), max_n, match_policy in product(PIECE_ENDS.items(), (3, 64), (0, 1)):
        rows = in_buffer(make_match_rows(ends, max_n, length), before=1, gap=1)
        num_tokens = in_buffer([length] * len(ends))
        args = (rows, num_tokens, None, None, 2, max_n, 4, match_policy, False, UNLIMITED)
        yield Sample(f"pieces-{length}-{max_n}-{match_policy}", args)

    for k in (0, 1, 64):
        for max_len in (-(2**63), -1, 0, 89, 90, 91, 95, UNLIMITED):
            args = (tokens, lengths, None, None, 1, 2, k, 0, True, max_len)
            yield Sample(f"max-len-{max_len}-k-{k}", args)
    yield from _make_empty_proposals()
    yield from _make_hostile_proposals(rng)


def _make_empty_proposals() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, None), (0, 9, 3), (3, 0, None), (3, 1, 2), (1, 1, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = None if batch is None else np.zeros(batch, np.int32)
        for lengths in (np.full(rows, capacity, np.int32), np.arange(rows, dtype=np.int32)):
            args = (tokens, lengths, indices, None, 1, 2, 3, 0, False, 10)
            yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _make_hostile_proposals(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(draw_rows(rng, len(lengths), 40, 2), gap=4)
    for policy in POLICIES:
        args = (rows, in_buffer(lengths), None, None, 1, 3, 4, *policy, UNLIMITED)
        yield Sample(f"hostile-lengths-{policy}", args)
    num_tokens = in_buffer([40] * len(lengths))
    for dtype, hostile in HOSTILE_INDICES:
        indices = in_buffer([*hostile, len(lengths) - 1, len(lengths)], dtype=dtype)
        args = (rows, num_tokens, indices, None, 1, 3, 4, 0, False, UNLIMITED)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    num_sampled = in_buffer([*HOSTILE_INT32, 2, 3, 65])
    args = (rows, num_tokens, None, num_sampled, 1, 3, 4, 0, False, UNLIMITED)
    yield Sample("hostile-counts", args)
    indices = in_buffer([2, 2, 2, 0])
    yield Sample("repeated-rows", (rows, num_tokens, indices, None, 1, 3, 4, 0, False, UNLIMITED))


def _make_propose_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, k, *n_range in ((12, 50, 3, 2, 5), (17, 61, 5, 3, 6), (20, 83, 8, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 1, dtype=np.int32)
        num_sampled = np.ones(rows - 1, np.int32)
        tokens = draw_rows(rng, rows, capacity, 3)
        options = (*n_range, k, 0, False, capacity + 3, 30 + k, False)
        yield (tokens, lengths, indices, num_sampled, *options)


RANGE_BAD_CALL = BadCall({"min_n": 5, "max_n": 4}, r"expected 1 to 4, got 5")

NGRAM_PROPOSE = OpSpec(
    name="ngram_propose",
    reference=reference.ngram_propose,
    make_samples=_make_propose_samples,
    bad_calls=(RANGE_BAD_CALL,),
    sizes=tuple(_make_propose_sizes()),
)


def _add_outputs(args: Args, number: int, dtype: Any = np.int32) -> Args:
    """Returns the arguments of ``ngram_propose_`` for those of ``ngram_propose``. ``number``
    selects the layout of the output tensors."""
    tokens, lengths, rows, sampled, min_n, max_n, k, *lookup = args
    batch = len(tokens if rows is None else rows)
    drafts = in_buffer(np.full((batch, k), -7), before=number % 3, gap=number % 4, dtype=dtype)
    counts, match_len = (in_buffer(np.full(batch, -7), before=1, gap=1) for _ in range(2))
    workspace = make_workspace(4 * batch) if number % 2 else None
    outputs = drafts, counts, match_len, workspace
    return (tokens, lengths, rows, sampled, min_n, max_n, *lookup, *outputs)


def _make_samples_with_outputs(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields the samples of ngram_propose with these labels, and a fifth of the other samples."""
    labels = ("ordinary", "max-len", "vocabulary", "empty", "hostile", "tile", "few", "one", "many")
    for i, sample in enumerate(_make_propose_samples(rng)):
        args, k = sample.args, sample.args[6]
        if i and not sample.label.startswith(labels) and i % 5:
            continue
        number = 1 if i == 0 or sample.label.startswith("few") else i // 2
        dtype = (np.int32, np.int64)[(i + k) % 2]
        yield replace(sample, args=_add_outputs(args, number, dtype))


NGRAM_PROPOSE_WITH_OUTPUTS = OpSpec(
    name="ngram_propose_",
    kernel_of="ngram_propose",
    reference=reference.ngram_propose_,
    make_samples=_make_samples_with_outputs,
    bad_calls=(
        RANGE_BAD_CALL,
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
    sizes=tuple(contiguous(_add_outputs(args, 1)) for args in NGRAM_PROPOSE.sizes),
)


def _make_step_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(_make_steps(rng)):
        *args, workspace = sample.args
        for name, fill in select_fill(sample.label, i):
            yield replace(sample, label=name, args=(*args, fill, workspace))
    yield from _make_vocabulary_steps()


def _make_vocabulary_steps() -> Iterator[Sample]:
    """Yields the steps whose rows are those of _make_vocabulary_proposals, and steps without a
    sampled token in these rows, whose newest token is not always valid."""
    for i, sample in enumerate(_make_vocabulary_proposals()):
        *args, vocab_size, fill = sample.args
        *step, workspace = _append_last_tokens(tuple(args), i, vocab_size)
        yield replace(sample, args=(*step, fill, workspace))
        tokens, lengths, _, _, *lookup = args
        sampled = in_buffer(np.full((len(tokens), 2), -1))
        step = [tokens, lengths, sampled, None, None, True, vocab_size, *lookup]
        yield replace(sample, label=f"{sample.label}-unsampled", args=(*step, fill, None))


def _make_steps(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls of ngram_step_ with the arguments up to ``max_len``, and the workspace."""
    tokens = in_buffer(draw_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    sampled = in_buffer(sample_tokens(rng, 3, 6, 3), gap=2)
    discard = in_buffer([False, True, False], dtype=np.bool_)
    indices = in_buffer([1, 0, 4], gap=2, dtype=np.int64)
    head = (tokens, lengths, sampled, discard, indices)
    yield Sample("ordinary", (*head, True, 1000, 2, 4, 5, 0, False, 4096, None))

    workspace = make_workspace(96)
    for advance in (False, True):
        for policy in POLICIES:
            label = f"{policy}-advance-{advance}"
            tail = (1, 3, 4, *policy, 64, workspace)
            yield Sample(f"workspace-{label}", (*head, advance, 1000, *tail))
            for width in (1, 2, 5, 64, 65):
                rows = in_buffer(draw_rows(rng, 9, 120, 2), before=1, gap=1)
                ragged = in_buffer(rng.integers(0, 121, 9))
                sampled = in_buffer(sample_tokens(rng, 7, width, 2), gap=1)
                # With max_n 32 and the newest token, a warp has one lane too few.
                max_n = 32 if width < 5 else 4
                lookup = 1, max_n, 6, *policy, 118
                args = (rows, ragged, sampled, None, None, advance, 7, *lookup, None)
                yield Sample(f"width-{width}-{label}", args)
    not_derived = ("ordinary", "n-", "max-len", "empty", "hostile-i", "hostile-c", "repeated")
    for i, sample in enumerate(_make_proposals(rng)):
        if not sample.label.startswith(not_derived):
            yield replace(sample, args=_append_last_tokens(sample.args, i))
    yield from _make_empty_steps()
    yield from _make_hostile_steps(rng)


def _append_last_tokens(args: Args, number: int, vocab_size: int = UNLIMITED) -> Args:
    """Returns the step that appends the last tokens of the rows of a lookup, and then looks up in
    the same rows. The memory after the shorter rows has other tokens."""
    tokens, lengths, _, _, *lookup = args
    (batch, capacity), width = tokens.shape, (3, 1, 64)[number % 3]
    fits = (lengths >= width) & (lengths <= capacity)
    begins = np.where(fits, lengths - width, 0)[:, None]
    columns = np.arange(capacity)
    positions = np.minimum(begins + np.arange(width), capacity - 1)
    sampled = np.where(fits[:, None], np.take_along_axis(tokens, positions, 1), 0)
    rows = np.where(fits[:, None] & (columns >= begins), -7, tokens)
    head = (
        in_buffer(rows, before=number % 3, gap=number % 4),
        in_buffer(np.where(fits, begins[:, 0], lengths), gap=1),
        in_buffer(sampled, gap=number % 2),
    )
    advance, workspace = number % 4 > 0, make_workspace(4 * batch)
    return (*head, None, None, advance, vocab_size, *lookup, workspace)


def _make_empty_steps() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, 0), (0, 9, 3), (3, 0, 3), (3, 1, 2), (2, 2, 2), (4, 8, 0)):
        tokens = np.zeros((rows, capacity), np.int32)
        indices = np.arange(batch, dtype=np.int32)
        for length in {0, capacity}:
            lengths = np.full(rows, length, np.int32)
            sampled = np.zeros((batch, 3), np.int32)
            args = (tokens, lengths, sampled, None, indices, True, 5, 1, 2, 3, 0, False, 10, None)
            yield Sample(f"empty-{rows}x{capacity}-{batch}-{length}", args)


def _make_hostile_steps(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(draw_rows(rng, len(lengths), 40, 2), gap=4)
    tail = (1, 3, 4, 0, False, UNLIMITED, None)
    for dtype, hostile in HOSTILE_INDICES:
        # Of these indices, only 0 and 1 are valid rows.
        indices = in_buffer([i for i in hostile if not 2 <= i < 2**31 - 2], dtype=dtype)
        sampled = in_buffer(sample_tokens(rng, len(indices), 4, 2))
        num_tokens = in_buffer([20] * len(lengths))
        args = (rows, num_tokens, sampled, None, indices, True, 10, *tail)
        yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    values = in_buffer([[v, 1, -1] for v in HOSTILE_INT32] + [[0, v, 1] for v in HOSTILE_INT32])
    token_rows = in_buffer(draw_rows(rng, len(values), 40, 2))
    for vocab_size in (-(2**63), -1, 0, 1, 2, INT32_MAX, UNLIMITED):
        length = in_buffer([30] * len(values))
        args = (token_rows, length, values, None, None, True, vocab_size, *tail)
        yield Sample(f"hostile-tokens-{vocab_size}", args)
    holes = in_buffer([[0, -1, 1, 1], [-1, 0, 0, 0], [99, 0, 0, 0], [0, 0, 99, 0]])
    num_tokens = in_buffer([38, 38, 40, 38])
    args = (rows[:4], num_tokens, holes, None, None, True, 10, *tail)
    yield Sample("holes", args)
    indices = in_buffer([2, 2, 0, 2])
    args = (rows[:4], num_tokens, holes, None, indices, True, 10, *tail)
    yield Sample("repeated-rows", args, checks_results=False)
    # Several requests append to the same row, so that the row changes while it is searched. The
    # first request reaches the smallest max_len. On devices, several blocks share the long row.
    for capacity, length, batch in ((40, 20, 12), (LONG_CAPACITY, LONG_CAPACITY - 22, 3)):
        rows = in_buffer(draw_rows(rng, 3, capacity, 2), before=1, gap=2)
        num_tokens = in_buffer([length, capacity - 1, 2], gap=1)
        sampled = in_buffer(rng.integers(0, 2, (batch, 3)), gap=1)
        indices = in_buffer(np.resize([0, 0, 0, 0, 1, 2], batch), dtype=np.int64)
        for advance in (False, True):
            for policy in POLICIES:
                for max_len in (length + 2, length + 4, UNLIMITED):
                    args = (rows, num_tokens, sampled, None, indices, advance, 10, 1, 3, 4, *policy)
                    label = f"shared-rows-{capacity}-{advance}-{policy}-{max_len}"
                    yield Sample(label, (*args, max_len, None), checks_results=False)


def _make_step_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, width, k, min_n, max_n in (
        (12, 50, 4, 3, 2, 5),
        (17, 61, 7, 5, 3, 6),
        (20, 83, 6, 8, 4, 9),
    ):
        batch = rows - 1
        tokens = draw_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        sampled = sample_tokens(rng, batch, width, 3)
        discard = np.zeros(batch, np.bool_)
        indices = np.arange(batch, dtype=np.int32)
        head = (tokens, lengths, sampled, discard, indices, True, 20 + rows)
        yield (*head, min_n, max_n, k, 0, False, capacity + 3, False, None)


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
    make_samples=_make_step_samples,
    bad_calls=(
        RANGE_BAD_CALL,
        *SAMPLED_BAD_CALLS,
    ),
    sizes=tuple(_make_step_sizes()),
    not_randomized=frozenset({"row_indices"}),  # a row must not occur twice
)
