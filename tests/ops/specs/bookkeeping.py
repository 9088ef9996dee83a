"""The OpSpecs of the operators for sampled tokens and for a draft model's batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ops import reference

from .drafting import SAMPLED_BAD_CALLS
from .inputs import (
    HOSTILE_INDICES,
    HOSTILE_INT32,
    INT32_MAX,
    INT32_MIN,
    NO_OFFSET,
    UNLIMITED,
    draw_offsets,
    draw_rows,
    make_hostile_offsets,
    make_hostile_samples,
    make_index_samples,
    make_offsets,
    make_prev_positions,
    sample_tokens,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer


def _make_next_token_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(draw_rows(rng, 5, 40, 90), before=3, gap=5)
    lengths = in_buffer([40, 33, 17, 2, 1], gap=1)
    sampled = in_buffer([[3, -1, -1, -1], [-1, -1, -1, -1], [7, 8, 9, -1]], gap=2)
    discard = in_buffer([False, False, True], dtype=np.bool_)
    backup = in_buffer([70, 71, 72], gap=2)
    indices = in_buffer([1, 0, 4], gap=2, dtype=np.int64)
    from_rows = (None, tokens, lengths, indices)
    from_backup = (backup, None, None, None)
    yield Sample("ordinary", (sampled, discard, *from_rows, 1000))
    yield Sample("backup", (sampled, discard, *from_backup, 1000))
    for mask in (None, discard, in_buffer([True, False, False], dtype=np.bool_)):
        for source in (from_rows, from_backup, (None, tokens, lengths, None)):
            for vocab_size in (1, 8, 1000):
                yield Sample(f"sources-{vocab_size}", (sampled, mask, *source, vocab_size))
    for width in (1, 2, 5, 64, 65):
        for batch in (1, 2, 9):
            new_tokens = in_buffer(sample_tokens(rng, batch, width, 6), before=1, gap=1)
            rows = in_buffer(draw_rows(rng, batch, 3, 90), gap=1)
            ragged = in_buffer(rng.integers(0, 4, batch))
            permuted_rows = in_buffer(rng.permutation(batch))
            label = f"width-{width}-{batch}"
            yield Sample(f"{label}-rows", (new_tokens, None, None, rows, ragged, None, 5))
            args = (new_tokens, None, None, rows, ragged, permuted_rows, UNLIMITED)
            yield Sample(f"{label}-indices", args)
            yield Sample(f"{label}-backup", (new_tokens, None, ragged, None, None, None, 5))
    for batch in (127, 128, 129):
        new_tokens = in_buffer(sample_tokens(rng, batch, 2, 6), gap=1)
        backup_tokens = np.arange(batch, dtype=np.int32)
        yield Sample(f"batch-{batch}", (new_tokens, None, backup_tokens, *[None] * 3, 5))
    yield from _make_empty_samples()
    yield from _make_hostile_samples(rng)


def _make_empty_samples() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, 0), (0, 9, 3), (3, 0, 3), (3, 1, 2), (1, 1, 0)):
        tokens = np.full((rows, capacity), 7, np.int32)
        indices = np.arange(batch, dtype=np.int32)
        sampled = np.full((batch, 2), -1, np.int32)
        for length in {0, capacity}:
            lengths = np.full(rows, length, np.int32)
            args = (sampled, None, None, tokens, lengths, indices, 5)
            yield Sample(f"empty-{rows}x{capacity}-{batch}-{length}", args)
    no_requests = np.zeros((0, 3), np.int32)
    yield Sample("no-requests", (no_requests, None, np.zeros(0, np.int32), None, None, None, 5))


def _make_hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(draw_rows(rng, len(lengths), 40, 90), gap=4)
    no_tokens = in_buffer(np.full((len(lengths), 3), -1))
    random_tokens = in_buffer(sample_tokens(rng, len(lengths), 3, 50))
    for sampled in (no_tokens, random_tokens):
        args = (sampled, None, None, rows, in_buffer(lengths), None, 60)
        yield Sample("hostile-lengths", args)
        yield Sample("hostile-backups", (sampled, None, in_buffer(lengths), None, None, None, 60))
        for dtype, hostile in HOSTILE_INDICES:
            indices = in_buffer([*hostile, 11, 10][: len(lengths)], dtype=dtype)
            num_tokens = in_buffer([20] * len(lengths))
            args = (sampled[: len(indices)], None, None, rows, num_tokens, indices, 60)
            yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    values = in_buffer([[v, 1, -1] for v in HOSTILE_INT32] + [[0, v, 1] for v in HOSTILE_INT32])
    backup = in_buffer([33] * len(values))
    for vocab_size in (-(2**63), -1, 0, 1, 2, INT32_MAX, UNLIMITED):
        args = (values, None, backup, None, None, None, vocab_size)
        yield Sample(f"hostile-tokens-{vocab_size}", args)
    holes = in_buffer([[0, -1, 1, 1], [-1, 0, 0, 0], [99, 0, 0, 0], [0, 0, 99, 0]])
    yield Sample("holes", (holes, None, backup[:4], None, None, None, 10))


def _make_next_token_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, width, rows, capacity in ((7, 3, 12, 50), (8, 4, 13, 51), (9, 5, 14, 52)):
        sampled = sample_tokens(rng, batch, width, 9)
        tokens = draw_rows(rng, rows, capacity, 9)
        lengths = np.full(rows, capacity, np.int32)
        indices = np.arange(batch, dtype=np.int32)
        discard = np.arange(batch) % 2 == 0
        yield (sampled, discard, None, tokens, lengths, indices, 60 + batch)


ROW_ARGUMENTS = ("token_ids", "num_tokens", "row_indices")
"""The arguments that must be None if backup_token_ids is given."""

PREPARE_NEXT_TOKEN_IDS = OpSpec(
    name="prepare_next_token_ids",
    reference=reference.prepare_next_token_ids,
    make_samples=_make_next_token_samples,
    bad_calls=(
        *(
            BadCall(
                {"backup_token_ids": np.zeros(3, np.int32), **dict.fromkeys(ROW_ARGUMENTS[:i])},
                r"expected None \(backup_token_ids is given\), got a tensor",
                ROW_ARGUMENTS[i],
            )
            for i in range(3)
        ),
        BadCall({"token_ids": None}, r"got None"),
        BadCall({"num_tokens": None}, r"got None"),
        *SAMPLED_BAD_CALLS,
    ),
    sizes=tuple(_make_next_token_sizes()),
)


def _make_batch(rng: np.random.Generator, batch: int, k: int) -> tuple[Array, Array, Array]:
    """Returns cu_num_draft_tokens, num_sampled, query_start_loc; some requests are in prefill."""
    drafts = rng.integers(0, k + 1, batch)
    sampled = rng.integers(0, drafts + 2)
    lengths = drafts + 1 + np.where(drafts == 0, rng.integers(0, 20, batch), 0)
    return (
        in_buffer(np.cumsum(drafts), gap=1),
        in_buffer(sampled, before=1),
        in_buffer(make_offsets(lengths), gap=2),
    )


def _make_padded_samples(rng: np.random.Generator) -> Iterator[Sample]:
    ordinary = (in_buffer([4, 4, 7]), in_buffer([2, 1, 4], gap=1), in_buffer([0, 5, 15, 19]))
    yield Sample("ordinary", ordinary)
    for batch in (0, 1, 2, 3, 17, 127, 128, 129, 1300):
        for k in (0, 1, 5, 64):
            yield Sample(f"batch-{batch}-{k}", _make_batch(rng, batch, k))
    for i in range(3):
        yield from make_hostile_samples(f"hostile-{i}", ordinary, i)
    for _ in range(20):
        args = [in_buffer(rng.choice(HOSTILE_INT32, n)) for n in (9, 9, 10)]
        yield Sample("all-hostile", tuple(args))


PREPARE_INPUTS_PADDED = OpSpec(
    name="prepare_inputs_padded",
    reference=reference.prepare_inputs_padded,
    make_samples=_make_padded_samples,
    bad_calls=(),
    sizes=tuple(_make_batch(np.random.default_rng(1), batch, 5) for batch in (7, 11, 15)),
)


def _make_inputs_samples(rng: np.random.Generator) -> Iterator[Sample]:
    offsets, seq_lens, rejected = [0, 5, 8, 9, 13], [30, 31, 9, 40], [2, 0, 0, 3]
    args = (in_buffer(offsets, gap=1), in_buffer(seq_lens, before=1), in_buffer(rejected, gap=2))
    yield Sample("ordinary", (*args, 13))
    for total in (0, 1, 4, 7, 8, 9, 14, 100):
        yield Sample(f"total-{total}", (*args, total))
    for batch in (0, 1, 2, 3, 60, 1023, 1024, 1025, 2100):
        lengths = rng.integers(0, 12, batch)
        head = (in_buffer(make_offsets(lengths)), in_buffer(lengths + rng.integers(0, 99, batch)))
        for name, rejected in (
            ("some", rng.integers(0, lengths + 1)),
            ("none", lengths * 0),
            ("all", lengths),
            ("more-than-all", lengths + 3),
            ("negative", lengths * 0 - 1),
        ):
            args_of_batch = (*head, in_buffer(rejected), int(lengths.sum()))
            yield Sample(f"batch-{batch}-{name}", args_of_batch)
    lengths = np.array([100, 33, 32, 0, 64])
    long_args = (in_buffer(make_offsets(lengths)), in_buffer(lengths), in_buffer([3, 0, 0, 0, 31]))
    yield Sample("long", (*long_args, int(lengths.sum())))
    shifted = (in_buffer(make_offsets([3, 4], first=7)), in_buffer([3, 4]), in_buffer([1, 2]), 20)
    yield Sample("first-is-not-0", shifted)
    # Sums of kept lengths wrap as int32, so the results are defined for all offsets.
    for name, hostile in (*make_hostile_offsets(offsets), *draw_offsets(rng, offsets)):
        yield Sample(f"offsets-{name}", (in_buffer(hostile), *args[1:], 20))
    yield from make_hostile_samples("seq-lens", (*args, 13), 1)
    yield from make_hostile_samples("rejected", (*args, 13), 2)
    large_offsets = [0, 2**31 - 1, -(2**31) + 5, 2**31 - 1, 7]  # the sum exceeds int32
    yield Sample("wrapping-sum", (in_buffer(large_offsets), args[1], in_buffer([0] * 4), 9))


def _make_inputs_sizes() -> Iterator[Args]:
    for batch, total in ((7, 40), (11, 60), (15, 80)):
        vectors = make_offsets([4] * batch), np.full(batch, 13), np.arange(batch) % 3
        yield (*map(in_buffer, vectors), total)


PREPARE_INPUTS = OpSpec(
    name="prepare_inputs",
    reference=reference.prepare_inputs,
    make_samples=_make_inputs_samples,
    bad_calls=(NO_OFFSET,),
    sizes=tuple(_make_inputs_sizes()),
)


def _make_drafts(rng: np.random.Generator, requests: int, k: int) -> Array:
    """Returns drafts of all lengths, with -1 in unused positions."""
    drafts = rng.integers(0, 90, (requests, k))
    drafts[np.arange(k) >= rng.integers(0, k + 1, (requests, 1))] = -1
    return in_buffer(drafts, before=1, gap=2)


def _make_input_ids_samples(rng: np.random.Generator) -> Iterator[Sample]:
    offsets, previous, scheduled = [0, 4, 5, 12, 15], [2, -1, 0, 1], [3, 0, 0, 2]
    ids = in_buffer(np.full(18, 500), before=2, gap=2)
    next_tokens = in_buffer([70, 71, 72], gap=1)
    drafts = in_buffer([[1, 2, 3], [4, -1, -1], [7, 8, 9]], gap=3)
    args = (
        ids,
        in_buffer(offsets, gap=1),
        in_buffer(previous, gap=1, dtype=np.int64),
        next_tokens,
        drafts,
        in_buffer(scheduled, before=1),
    )
    yield Sample("ordinary", (*args, 0))
    for pad_token in (INT32_MIN, -1, 1, INT32_MAX):
        yield Sample(f"pad-{pad_token}", (*args, pad_token))
    for batch in (0, 1, 2, 3, 150):
        for k in (0, 1, 4, 64):
            for name, order in make_prev_positions(batch, rng):
                count = rng.integers(0, k + 1, batch)
                lengths = count + 1 + rng.integers(0, 3, batch)
                args_of_batch = (
                    in_buffer(np.full(int(lengths.sum()) + 2, 500), gap=1),
                    in_buffer(make_offsets(lengths)),
                    in_buffer(order, dtype=rng.choice([np.int32, np.int64])),
                    in_buffer(rng.integers(0, 90, batch)),
                    _make_drafts(rng, batch, k),
                    in_buffer(count),
                )
                yield Sample(f"batch-{batch}-{k}-{name}", (*args_of_batch, 0))
    for size in (0, 1, 3, 4, 11, 14):
        yield Sample(f"inputs-{size}", (ids[:size], *args[1:], 0))
    yield from make_index_samples("hostile-previous", (*args, 0), 2, 2, 3)
    # More drafts than the request has tokens or the matrix has columns, or a negative number.
    yield from make_hostile_samples(
        "hostile-scheduled", (*args, 0), 5, (*HOSTILE_INT32, 2, 3, 4, 5, 64)
    )
    yield from make_hostile_samples("hostile-next", (*args, 0), 3)
    hostile_drafts = in_buffer(np.resize(HOSTILE_INT32, (3, 3)))
    yield Sample("hostile-drafts", (*args[:4], hostile_drafts, args[5], 0))
    for name, hostile_offsets in make_hostile_offsets(offsets):
        yield Sample(f"offsets-{name}", (ids, in_buffer(hostile_offsets), *args[2:], 0))
    for name, hostile_offsets in draw_offsets(rng, offsets):
        changed = (ids, in_buffer(hostile_offsets), *args[2:], 0)
        yield Sample(f"unordered-offsets-{name}", changed, checks_results=False)


def _make_input_ids_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, rows, k in ((5, 8, 3), (11, 14, 4), (17, 20, 6)):
        ids = np.zeros(7 * batch + 2, np.int32)
        start = np.array(make_offsets([7] * batch), np.int32)
        next_tokens = rng.integers(0, 90, rows, dtype=np.int32)
        drafts = rng.integers(-1, 90, (rows, k), dtype=np.int32)
        previous, scheduled = np.arange(batch, dtype=np.int32), np.full(batch, 2, np.int32)
        yield ids, start, previous, next_tokens, drafts, scheduled, 0


PREPARE_INPUT_IDS = OpSpec(
    name="prepare_input_ids_",
    reference=reference.prepare_input_ids_,
    make_samples=_make_input_ids_samples,
    bad_calls=(),
    sizes=tuple(_make_input_ids_sizes()),
    not_randomized=frozenset({"query_start_loc"}),  # must not decrease
)
