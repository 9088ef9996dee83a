from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import index_vectors, int32_vectors, one_hostile, previous
from .rows import HOSTILE_INT32, HOSTILE_INT64
from .spec import Args, BadCall, OpSpec, Sample, in_buffer


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    computed = in_buffer([10, 20, 30, 40, 50, 60], before=1, gap=2)
    accepted = in_buffer([1, 1, 1, 1, 9], gap=3)
    prev = in_buffer([2, -1, 0, 1], gap=1, dtype=np.int64)
    sampled = in_buffer([3, 1, 2, 1, 1])
    drafts = in_buffer([4, 0, 4, 0, 1])
    host = in_buffer([35, 0, 15, 21], gap=1)
    yield Sample("ordinary", (computed, accepted, prev, sampled, drafts, host))

    for batch in (0, 1, 2, 3, 40, 2047, 2048, 2049, 5000):
        for name, order in previous(batch, rng):
            for dtype in (np.int32, np.int64):
                drafted = rng.integers(0, 5, batch)
                args = (
                    in_buffer(rng.integers(0, 9000, batch + 2), gap=1),
                    in_buffer(np.ones(batch), gap=1),
                    in_buffer(order, dtype=dtype),
                    in_buffer(rng.integers(0, drafted + 2)),
                    in_buffer(drafted),
                    in_buffer(rng.integers(0, 9000, batch)),
                )
                yield Sample(f"batch-{batch}-{name}-{np.dtype(dtype).name}", args)
    order = in_buffer([0, 1, 2, 3])
    for sizes in ((4, 4, 0), (4, 0, 4), (4, 1, 3), (4, 3, 1), (9, 9, 9), (9, 2, 9), (4, 9, 9)):
        made = [in_buffer(rng.integers(1, 9, n), gap=2) for n in sizes]
        args = (made[0], in_buffer([1] * 4), order, made[1], made[2], host)
        yield Sample(f"previous-arrays-{sizes}", args)
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        for values in one_hostile(prev.tolist(), bad):
            args = (computed, accepted, in_buffer(values, dtype=dtype), sampled, drafts, host)
            yield Sample("hostile-previous", args)
    first = (computed, accepted, prev, sampled, drafts, host)
    for at in (0, 1, 3, 4, 5):
        for values in one_hostile(first[at].tolist(), HOSTILE_INT32):
            yield Sample(f"hostile-{at}", (*first[:at], in_buffer(values), *first[at + 1 :]))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    batch = draw(st.integers(0, 6))
    sizes = [draw(st.integers(batch, 8)), draw(st.integers(0, 8)), draw(st.integers(0, 8))]
    return (
        draw(int32_vectors(sizes[0], 0, 99)),
        draw(int32_vectors(draw(st.integers(batch, 8)), 0, 5)),
        draw(index_vectors(batch, max(sizes))),
        draw(int32_vectors(sizes[1], 0, 5)),
        draw(int32_vectors(sizes[2], 0, 4)),
        draw(int32_vectors(batch, 0, 99)),
    )


def _sizes() -> tuple[Args, ...]:
    made = []
    for batch in (5, 11, 17):
        sizes = (batch + 1, batch + 2, batch, batch + 3, batch + 4)
        vectors = [np.arange(n, dtype=np.int32) for n in sizes]
        made.append((*vectors, np.full(batch, 7, np.int32)))
    return tuple(made)


COUNTS_BAD_CALLS = (
    BadCall(
        "too few computed",
        {"num_computed_tokens": lambda a: a[:3]},
        r"size >= 4 \(size of prev_positions\), got size 3",
    ),
    BadCall(
        "too few accepted",
        {"num_accepted_tokens": lambda a: a[:3]},
        r"size >= 4 \(size of prev_positions\), got size 3",
    ),
    BadCall("host mismatch", {"host_num_computed_tokens": lambda a: a[:3]}, r"size 4, got size 3"),
)

SPEC = OpSpec(
    name="correct_num_computed_tokens_",
    reference=reference.correct_num_computed_tokens_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=COUNTS_BAD_CALLS,
    sizes=_sizes(),
)
