from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .ngram_index import fresh, nonsense, warm
from .rows import HOSTILE_INT32, HOSTILE_INT64, random_rows
from .spec import NO_INDEX_ON_DEVICES, Args, OpSpec, Sample, in_buffer


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = random_rows(rng, 5, 90, 3)
    lengths = np.full(5, 90, np.int32)
    index = warm(tokens, lengths, 5, 2, 4, 0)
    yield Sample("ordinary", (index, in_buffer([3, 1], gap=1)))
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        yield Sample("hostile-slots", (index, in_buffer(bad, dtype=dtype)))
    yield Sample("twice", (index, in_buffer([3, 3, 3])))
    yield Sample("none", (index, in_buffer([])))
    for i, words in enumerate(nonsense(rng, index)):
        yield Sample(f"nonsense-{i}", (words, in_buffer(range(5))))


def _sizes() -> tuple[Args, ...]:
    return tuple((fresh(n, n + 2), np.arange(n, dtype=np.int32)) for n in (3, 5, 8))


SPEC = OpSpec(
    name="ngram_index_reset_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_reset_,
    samples=_samples,
    strategy=st.lists(st.integers(-1, 5)).map(lambda slots: (fresh(4, 4), in_buffer(slots))),
    bad_calls=(),
    sizes=_sizes(),
    opaque=frozenset({"index"}),
)
