from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import int32_vectors, offsets, one_hostile
from .rows import HOSTILE_INT32
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer


def _batch(rng: np.random.Generator, batch: int, k: int) -> tuple[Array, Array, Array]:
    """Each request's drafts, what was sampled for them, and chunks of prefill among them."""
    drafts = rng.integers(0, k + 1, batch)
    sampled = rng.integers(0, drafts + 2)
    lengths = drafts + 1 + np.where(drafts == 0, rng.integers(0, 20, batch), 0)
    return (
        in_buffer(np.cumsum(drafts), gap=1),
        in_buffer(sampled, before=1),
        in_buffer(offsets(lengths), gap=2),
    )


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    ordinary = (in_buffer([4, 4, 7]), in_buffer([2, 1, 4], gap=1), in_buffer([0, 5, 15, 19]))
    yield Sample("ordinary", ordinary)
    for batch in (0, 1, 2, 3, 17, 127, 128, 129, 1300):
        for k in (0, 1, 5, 64):
            yield Sample(f"batch-{batch}-{k}", _batch(rng, batch, k))
    lists = [a.tolist() for a in ordinary]
    for at in range(3):
        for bad in one_hostile(lists[at], HOSTILE_INT32):
            args = [in_buffer(bad if i == at else good) for i, good in enumerate(lists)]
            yield Sample(f"hostile-{at}", tuple(args))
    for _ in range(20):
        args = [in_buffer(rng.choice(HOSTILE_INT32, n)) for n in (9, 9, 10)]
        yield Sample("all-hostile", tuple(args))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    batch = draw(st.integers(0, 6))
    sizes = (batch, batch, batch + 1)
    return tuple(draw(int32_vectors(size, -3, 30)) for size in sizes)


SPEC = OpSpec(
    name="prepare_inputs_padded",
    reference=reference.prepare_inputs_padded,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        BadCall("B mismatch", {"num_sampled": lambda a: a[:-1]}, r"size 3, got size 2"),
        BadCall("B instead of B + 1", {"query_start_loc": lambda a: a[:-1]}, r"size 4, got size 3"),
    ),
    sizes=tuple(_batch(np.random.default_rng(1), batch, 5) for batch in (7, 11, 15)),
)
