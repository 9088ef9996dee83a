from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .ngram_index import fresh, nonsense, warm
from .rows import HOSTILE_INT32, HOSTILE_INT64, random_rows, token_rows
from .spec import NO_INDEX_ON_DEVICES, Args, BadCall, OpSpec, Sample, in_buffer

NO_LADDER = False, False


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    rows = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    slots = in_buffer([6, 1, 3], gap=1)
    yield Sample("ordinary", (tokens, lengths, fresh(7), rows, slots, 2, 4, 0, False, False))
    for policy in (0, 1):
        for low, high in ((1, 1), (1, 8), (2, 4), (57, 64), (64, 64)):
            index = fresh(5)
            args = (tokens, lengths, index, None, None, low, high, policy, *NO_LADDER)
            yield Sample(f"{low}-{high}", args)
        for pages in (1, 2, 3):
            index = fresh(5, pages)
            args = (tokens, lengths, index, None, None, 1, 8, policy, *NO_LADDER)
            yield Sample(f"pages-{pages}", args)
        good = warm(tokens, lengths, 5, 2, 4, policy)
        for i, words in enumerate(nonsense(rng, good)):
            args = (tokens, lengths, words, None, None, 2, 4, policy, *NO_LADDER)
            yield Sample(f"nonsense-{i}", args)
    for outcomes in (False, True):
        ladder = (1, 16, 1, True, outcomes)
        for pages in (1, 2, 3, 64):
            args = (tokens, lengths, fresh(5, pages), None, None, *ladder)
            yield Sample(f"ladder-{pages}-{outcomes}", args)
        for i, words in enumerate(nonsense(rng, warm(tokens, lengths, 5, *ladder))):
            yield Sample(f"ladder-nonsense-{i}", (tokens, lengths, words, None, None, *ladder))
    longer = in_buffer([91, 90, 95, 89, 91])
    yield Sample("longer-than-rows", (tokens, longer, fresh(5), None, None, 2, 4, 0, *NO_LADDER))
    few = in_buffer(random_rows(rng, len(HOSTILE_INT32), 20, 2))
    hostile = in_buffer(HOSTILE_INT32)
    yield Sample("hostile-lengths", (few, hostile, fresh(8), None, None, 2, 4, 0, *NO_LADDER))
    good = in_buffer([20] * len(HOSTILE_INT32))
    for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        indices = in_buffer(bad, dtype=dtype)
        own = in_buffer(np.arange(len(bad)))
        yield Sample("hostile-rows", (few, good, fresh(20), indices, own, 2, 4, 0, *NO_LADDER))
        yield Sample(
            "hostile-slots", (few, good, fresh(8), own[:8], indices[:8], 2, 4, 0, *NO_LADDER)
        )
    for rows_, capacity in ((0, 0), (0, 5), (3, 0), (1, 1)):
        nothing = np.zeros((rows_, capacity), np.int32)
        full = np.full(rows_, capacity, np.int32)
        yield Sample("empty", (nothing, full, fresh(3), None, None, 1, 2, 0, *NO_LADDER))
    yield Sample(
        "no-rows", (tokens, lengths, fresh(3), in_buffer([]), in_buffer([]), 1, 2, 0, *NO_LADDER)
    )


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), gap=2)
    rows, capacity = tokens.shape
    lengths = in_buffer(draw(st.lists(st.integers(-1, capacity + 1), min_size=rows, max_size=rows)))
    low = draw(st.integers(1, 57))
    return (
        tokens,
        lengths,
        fresh(4, 4),
        None,
        None,
        low,
        low + draw(st.integers(0, 7)),
        0,
        *NO_LADDER,
    )


def _sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for rows, capacity, low, high in ((12, 50, 2, 5), (17, 61, 3, 6), (20, 83, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        some = np.arange(rows - 3, dtype=np.int32)
        tokens = random_rows(rng, rows, capacity, 3)
        made.append(
            (tokens, lengths, fresh(rows, rows), some, some.copy(), low, high, 0, *NO_LADDER)
        )
    return tuple(made)


SPEC = OpSpec(
    name="ngram_index_append_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_append_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        BadCall("min_n > max_n", {"min_n": 5, "max_n": 4}, r"expected 1 to 4, got 5"),
        BadCall("max_n = 65", {"min_n": 60, "max_n": 65}, r"1 to 64, got 65", "max_n"),
        BadCall("span of 9", {"min_n": 1, "max_n": 9}, r"max_n <= 8 .*got 9", "max_n"),
        BadCall("ladder's min_n", {"ladder": True}, "expected 1 to 1, got 2", "min_n"),
        BadCall("outcomes alone", {"outcomes": True}, "without ladder, got True"),
        BadCall("match_policy = 2", {"match_policy": 2}, r"0 to 1, got 2"),
        BadCall("R", {"num_tokens": lambda a: a[:-1]}, r"size 5, got size 4"),
        BadCall("B", {"slot_indices": lambda a: a[:-1]}, r"size 3, got size 2"),
    ),
    sizes=_sizes(),
    opaque=frozenset({"index"}),
)
