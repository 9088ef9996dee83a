from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import hostile_offsets, int32_vectors, offsets, one_hostile, unordered_offsets
from .rows import HOSTILE_INT32
from .spec import Args, BadCall, OpSpec, Sample, in_buffer


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    start, seq_lens, rejected = [0, 5, 8, 9, 13], [30, 31, 9, 40], [2, 0, 0, 3]
    args = (in_buffer(start, gap=1), in_buffer(seq_lens, before=1), in_buffer(rejected, gap=2))
    yield Sample("ordinary", (*args, 13))
    for total in (0, 1, 4, 7, 8, 9, 14, 100):
        yield Sample(f"total-{total}", (*args, total))
    for batch in (0, 1, 2, 3, 60, 1023, 1024, 1025, 2100):
        lengths = rng.integers(0, 12, batch)
        good = (in_buffer(offsets(lengths)), in_buffer(lengths + rng.integers(0, 99, batch)))
        for name, drop in (
            ("some", rng.integers(0, lengths + 1)),
            ("none", lengths * 0),
            ("all", lengths),
            ("more-than-all", lengths + 3),
            ("negative", lengths * 0 - 1),
        ):
            made = (*good, in_buffer(drop), int(lengths.sum()))
            yield Sample(f"batch-{batch}-{name}", made)
    lengths = np.array([100, 33, 32, 0, 64])
    long = (in_buffer(offsets(lengths)), in_buffer(lengths), in_buffer([3, 0, 0, 0, 31]))
    yield Sample("long", (*long, int(lengths.sum())))
    shifted = (in_buffer(offsets([3, 4], first=7)), in_buffer([3, 4]), in_buffer([1, 2]), 20)
    yield Sample("first-is-not-0", shifted)
    # A kept length is an int32, their list has no width: every offset is defined here.
    for name, bad in (*hostile_offsets(start), *unordered_offsets(rng, start)):
        yield Sample(f"offsets-{name}", (in_buffer(bad), *args[1:], 20))
    for bad in one_hostile(seq_lens, HOSTILE_INT32):
        yield Sample("seq-lens", (args[0], in_buffer(bad), args[2], 13))
    for bad in one_hostile(rejected, HOSTILE_INT32):
        yield Sample("rejected", (*args[:2], in_buffer(bad), 13))
    wide = [0, 2**31 - 1, -(2**31) + 5, 2**31 - 1, 7]  # the sum of the kept lengths wraps
    yield Sample("wrapping-sum", (in_buffer(wide), args[1], in_buffer([0] * 4), 9))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    batch = draw(st.integers(0, 6))
    start = draw(
        st.one_of(
            int32_vectors(batch + 1, 0, 30),
            st.lists(st.integers(0, 9), min_size=batch, max_size=batch).map(
                lambda lengths: in_buffer(offsets(lengths))
            ),
        )
    )
    seq_lens = draw(int32_vectors(batch, 0, 60))
    rejected = draw(int32_vectors(batch, 0, 9))
    return (start, seq_lens, rejected, draw(st.integers(0, 60)))


def _sizes() -> tuple[Args, ...]:
    made = []
    for batch, total in ((7, 40), (11, 60), (15, 80)):
        lengths = np.full(batch, 4)
        rejected = np.arange(batch) % 3
        made.append(
            (in_buffer(offsets(lengths)), in_buffer(lengths + 9), in_buffer(rejected), total)
        )
    return tuple(made)


SPEC = OpSpec(
    name="prepare_inputs",
    reference=reference.prepare_inputs,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        BadCall("B mismatch", {"seq_lens": lambda a: a[:-1]}, r"size 4, got size 3"),
        BadCall("rejected mismatch", {"num_rejected": lambda a: a[:-1]}, r"size 4, got size 3"),
        BadCall(
            "no offset at all",
            {"query_start_loc": lambda a: a[:0]},
            r"size >= 1 \(batch \+ 1\), got size 0",
        ),
        BadCall("negative", {"total_tokens": -1}, r"expected 0 to 2147483647"),
        BadCall("too many", {"total_tokens": 2**31}, r"expected 0 to 2147483647"),
    ),
    sizes=_sizes(),
)
