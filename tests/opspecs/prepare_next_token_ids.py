from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import index_vectors, int32_vectors
from .ngram_step import SAMPLED_BAD_CALLS
from .ngram_step import _sampled as sampled_matrix
from .rows import HOSTILE_INT32, HOSTILE_INT64, INT32_MAX, random_rows, token_rows
from .spec import Args, BadCall, OpSpec, Sample, in_buffer

UNLIMITED = 2**63 - 1


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(random_rows(rng, 5, 40, 90), before=3, gap=5)
    lengths = in_buffer([40, 33, 17, 2, 1], gap=1)
    sampled = in_buffer([[3, -1, -1, -1], [-1, -1, -1, -1], [7, 8, 9, -1]], gap=2)
    discard = in_buffer([False, False, True], dtype=np.bool_)
    backup = in_buffer([70, 71, 72], gap=2)
    indices = in_buffer([1, 0, 4], gap=2, dtype=np.int64)
    from_rows = (None, tokens, lengths, indices)
    given = (backup, None, None, None)
    yield Sample("ordinary", (sampled, discard, *from_rows, 1000))
    yield Sample("backup-given", (sampled, discard, *given, 1000))
    for mask in (None, discard, in_buffer([True, False, False], dtype=np.bool_)):
        for source in (from_rows, given, (None, tokens, lengths, None)):
            for vocab_size in (1, 8, 1000):
                yield Sample(f"sources-{vocab_size}", (sampled, mask, *source, vocab_size))
    for width in (1, 2, 5, 64, 65):
        for batch in (1, 2, 9):
            new = in_buffer(sampled_matrix(rng, batch, width, 6), before=1, gap=1)
            rows = in_buffer(random_rows(rng, batch, 3, 90), gap=1)
            ragged = in_buffer(rng.integers(0, 4, batch))
            order = in_buffer(rng.permutation(batch))
            label = f"width-{width}-{batch}"
            yield Sample(f"{label}-rows", (new, None, None, rows, ragged, None, 5))
            yield Sample(f"{label}-indices", (new, None, None, rows, ragged, order, UNLIMITED))
            yield Sample(f"{label}-given", (new, None, ragged, None, None, None, 5))
    for batch in (127, 128, 129):
        new = in_buffer(sampled_matrix(rng, batch, 2, 6), gap=1)
        yield Sample(
            f"batch-{batch}", (new, None, np.arange(batch, dtype=np.int32), *[None] * 3, 5)
        )
    yield from _empty_samples()
    yield from _hostile_samples(rng)


def _empty_samples() -> Iterator[Sample]:
    for rows, capacity, batch in ((0, 0, 0), (0, 9, 3), (3, 0, 3), (3, 1, 2), (1, 1, 0)):
        tokens = np.full((rows, capacity), 7, np.int32)
        indices = np.arange(batch, dtype=np.int32)
        sampled = np.full((batch, 2), -1, np.int32)
        for length in {0, capacity}:
            lengths = np.full(rows, length, np.int32)
            args = (sampled, None, None, tokens, lengths, indices, 5)
            yield Sample(f"empty-{rows}x{capacity}-{batch}-{length}", args)
    none = np.zeros((0, 3), np.int32)
    yield Sample("no-requests", (none, None, np.zeros(0, np.int32), None, None, None, 5))


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    lengths = [*HOSTILE_INT32, 40, 41, 39]
    rows = in_buffer(random_rows(rng, len(lengths), 40, 90), gap=4)
    none = in_buffer(np.full((len(lengths), 3), -1))
    some = in_buffer(sampled_matrix(rng, len(lengths), 3, 50))
    for sampled in (none, some):
        args = (sampled, None, None, rows, in_buffer(lengths), None, 60)
        yield Sample("hostile-lengths", args)
        yield Sample("hostile-backups", (sampled, None, in_buffer(lengths), None, None, None, 60))
        for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
            indices = in_buffer([*bad, 11, 10][: len(lengths)], dtype=dtype)
            good = in_buffer([20] * len(lengths))
            args = (sampled[: len(indices)], None, None, rows, good, indices, 60)
            yield Sample(f"hostile-indices-{np.dtype(dtype).name}", args)
    values = in_buffer([[v, 1, -1] for v in HOSTILE_INT32] + [[0, v, 1] for v in HOSTILE_INT32])
    backup = in_buffer([33] * len(values))
    for vocab_size in (-(2**63), -1, 0, 1, 2, INT32_MAX, UNLIMITED):
        args = (values, None, backup, None, None, None, vocab_size)
        yield Sample(f"hostile-tokens-{vocab_size}", args)
    holes = in_buffer([[0, -1, 1, 1], [-1, 0, 0, 0], [99, 0, 0, 0], [0, 0, 99, 0]])
    yield Sample("holes", (holes, None, backup[:4], None, None, None, 10))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), gap=1)
    rows, capacity = tokens.shape
    lengths = draw(int32_vectors(rows, 0, capacity))
    batch = draw(st.integers(0, rows))
    width = draw(st.integers(1, 5))
    flat = draw(st.lists(st.integers(-2, 6), min_size=batch * width, max_size=batch * width))
    sampled = in_buffer(np.array(flat, np.int32).reshape(batch, width), gap=1)
    discard = None
    if draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        discard = in_buffer(mask, dtype=np.bool_)
    vocab_size = draw(st.sampled_from([0, 2, 6, UNLIMITED]))
    if draw(st.booleans()):
        backup = draw(int32_vectors(batch, 0, 90))
        return (sampled, discard, backup, None, None, None, vocab_size)
    indices = draw(st.one_of(st.none(), index_vectors(batch, rows)))
    return (sampled, discard, None, tokens, lengths, indices, vocab_size)


def _sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for batch, width, rows, capacity in ((7, 3, 12, 50), (8, 4, 13, 51), (9, 5, 14, 52)):
        sampled = sampled_matrix(rng, batch, width, 9)
        tokens = random_rows(rng, rows, capacity, 9)
        lengths = np.full(rows, capacity, np.int32)
        indices = np.arange(batch, dtype=np.int32)
        discard = np.arange(batch) % 2 == 0
        made.append((sampled, discard, None, tokens, lengths, indices, 60 + batch))
    return tuple(made)


SPEC = OpSpec(
    name="prepare_next_token_ids",
    reference=reference.prepare_next_token_ids,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        BadCall(
            "both backups",
            {"backup_token_ids": np.zeros(3, np.int32)},
            r"expected None \(backup_token_ids is given\), got a tensor",
            "token_ids",
        ),
        BadCall(
            "lengths with a backup",
            {"backup_token_ids": np.zeros(3, np.int32), "token_ids": None},
            r"expected None",
            "num_tokens",
        ),
        BadCall(
            "row indices with a backup",
            {"backup_token_ids": np.zeros(3, np.int32), "token_ids": None, "num_tokens": None},
            r"expected None",
            "row_indices",
        ),
        BadCall("no backup", {"token_ids": None}, r"got None"),
        BadCall("no lengths", {"num_tokens": None}, r"got None"),
        BadCall("R mismatch", {"num_tokens": lambda a: a[:-1]}, r"size 5, got size 4"),
        BadCall("B mismatch", {"discard": lambda a: a[:-1]}, r"size 3, got size 2"),
        BadCall("indices mismatch", {"row_indices": lambda a: a[:-1]}, r"size 3, got size 2"),
        BadCall(
            "backup mismatch",
            {"backup_token_ids": lambda a: a[:-1]},
            r"size 3, got size 2",
            sample="backup-given",
        ),
        *SAMPLED_BAD_CALLS,
    ),
    sizes=_sizes(),
)
