from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import (
    hostile_offsets,
    index_vectors,
    int32_vectors,
    lengths_lists,
    offsets,
    one_hostile,
    previous,
    unordered_offsets,
)
from .rows import HOSTILE_INT32, HOSTILE_INT64, INT32_MAX, INT32_MIN
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer


def _drafts(rng: np.random.Generator, requests: int, k: int) -> Array:
    """Drafts of any length, -1 in unused places."""
    drafts = rng.integers(0, 90, (requests, k))
    drafts[np.arange(k) >= rng.integers(0, k + 1, (requests, 1))] = -1
    return in_buffer(drafts, before=1, gap=2)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    start, prev, scheduled = [0, 4, 5, 12, 15], [2, -1, 0, 1], [3, 0, 0, 2]
    ids = in_buffer(np.full(18, 500), before=2, gap=2)
    next_tokens = in_buffer([70, 71, 72], gap=1)
    drafts = in_buffer([[1, 2, 3], [4, -1, -1], [7, 8, 9]], gap=3)
    args = (
        ids,
        in_buffer(start, gap=1),
        in_buffer(prev, gap=1, dtype=np.int64),
        next_tokens,
        drafts,
        in_buffer(scheduled, before=1),
    )
    yield Sample("ordinary", (*args, 0))
    for pad_token in (INT32_MIN, -1, 1, INT32_MAX):
        yield Sample(f"pad-{pad_token}", (*args, pad_token))
    for batch in (0, 1, 2, 3, 150):
        for k in (0, 1, 4, 64):
            for name, order in previous(batch, rng):
                count = rng.integers(0, k + 1, batch)
                lengths = count + 1 + rng.integers(0, 3, batch)
                made = (
                    in_buffer(np.full(int(lengths.sum()) + 2, 500), gap=1),
                    in_buffer(offsets(lengths)),
                    in_buffer(order, dtype=rng.choice([np.int32, np.int64])),
                    in_buffer(rng.integers(0, 90, batch)),
                    _drafts(rng, batch, k),
                    in_buffer(count),
                )
                yield Sample(f"batch-{batch}-{k}-{name}", (*made, 0))
    for size in (0, 1, 3, 4, 11, 14):
        yield Sample(f"inputs-{size}", (ids[:size], *args[1:], 0))
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        for values in one_hostile(prev, (*bad, 2, 3)):
            made = (*args[:2], in_buffer(values, dtype=dtype), *args[3:], 0)
            yield Sample("hostile-previous", made)
    # More drafts than the request has tokens, than there are columns, or fewer than none.
    for values in one_hostile(scheduled, (*HOSTILE_INT32, 2, 3, 4, 5, 64)):
        yield Sample("hostile-scheduled", (*args[:5], in_buffer(values), 0))
    for values in one_hostile(next_tokens.tolist(), HOSTILE_INT32):
        yield Sample("hostile-next", (*args[:3], in_buffer(values), *args[4:], 0))
    hostile = in_buffer(np.resize(HOSTILE_INT32, (3, 3)))
    yield Sample("hostile-drafts", (*args[:4], hostile, args[5], 0))
    for name, bad in hostile_offsets(start):
        yield Sample(f"offsets-{name}", (ids, in_buffer(bad), *args[2:], 0))
    for name, bad in unordered_offsets(rng, start):
        made = (ids, in_buffer(bad), *args[2:], 0)
        yield Sample(f"unordered-offsets-{name}", made, compare=False)


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    lengths = draw(lengths_lists())
    batch = len(lengths)
    rows, k = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    flat = draw(st.lists(st.integers(-2, 90), min_size=rows * k, max_size=rows * k))
    return (
        draw(int32_vectors(draw(st.integers(0, 60)), 0, 90)),
        in_buffer(offsets(lengths, draw(st.integers(-3, 3)))),
        draw(index_vectors(batch, rows)),
        draw(int32_vectors(rows, 0, 90)),
        in_buffer(np.array(flat, np.int32).reshape(rows, k), gap=1),
        draw(int32_vectors(batch, 0, 6)),
        draw(st.sampled_from([0, -1, 42])),
    )


def _sizes() -> tuple[Args, ...]:
    made = []
    rng = np.random.default_rng(1)
    for batch, rows, k in ((5, 8, 3), (11, 14, 4), (17, 20, 6)):
        made.append(
            (
                np.zeros(7 * batch + 2, np.int32),
                np.array(offsets([7] * batch), np.int32),
                np.arange(batch, dtype=np.int32),
                rng.integers(0, 90, rows, dtype=np.int32),
                rng.integers(-1, 90, (rows, k), dtype=np.int32),
                np.full(batch, 2, np.int32),
                0,
            )
        )
    return tuple(made)


SPEC = OpSpec(
    name="prepare_input_ids_",
    reference=reference.prepare_input_ids_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        BadCall("B instead of B + 1", {"query_start_loc": lambda a: a[:-1]}, r"size 5, got size 4"),
        BadCall(
            "drafts of other requests", {"next_token_ids": lambda a: a[:-1]}, r"size 3, got size 2"
        ),
        BadCall("B mismatch", {"num_scheduled_drafts": lambda a: a[:-1]}, r"size 4, got size 3"),
        BadCall("no token", {"pad_token": 2**31}, r"-2147483648 to 2147483647, got"),
    ),
    sizes=_sizes(),
)
