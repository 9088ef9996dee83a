from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import reference
from hypothesis import strategies as st

from .ngram_store import (
    END_OF_SERIALS,
    FINISH,
    LIVE,
    NO_STORE_ON_DEVICES,
    SMALL_STORES,
    fresh,
    full,
    head_of,
    no_stores,
    nonsense,
    say,
    tell,
    text_rows,
    with_words,
)
from .rows import HOSTILE_INT32, HOSTILE_INT64
from .spec import Args, Array, OpSpec, Sample, in_buffer

SERIAL, FILL, PREVIOUS = 0, 1, 3


def _spoken(lengths: list[int], visibility: int, **words: int) -> Array:
    """A store with an open request for each length, of which all but the first token are held
    back."""
    rng = np.random.default_rng(5)
    store = with_words(fresh(len(lengths), 4 * len(lengths) + 1, 3, visibility), **words)
    tokens = text_rows(rng, len(lengths), max(lengths), 20)
    say(store, tokens, np.array(lengths, np.int32), np.array(lengths, np.int32) - 1)
    return store


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample("ordinary", (_spoken([60, 33, 17, 2], FINISH), in_buffer([3, 0, 1], gap=1)))
    for visibility in (LIVE, FINISH):
        for size, order in zip(SMALL_STORES, ([0], [1, 0], [0, 1, 2]), strict=True):
            store = full(rng, size, visibility)
            yield Sample(f"full-{visibility}-{size}", (store, in_buffer(order)))
        for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
            yield Sample("hostile-slots", (store, in_buffer(bad, dtype=dtype)))
        yield Sample("twice", (store, in_buffer([2, 2, 1, 2])))
        yield Sample("none", (store, in_buffer([])))
        yield Sample("busy", (with_words(store, BUSY=1), in_buffer([1, 2])))
        yield Sample("busy-without-slots", (with_words(store, BUSY=1), in_buffer([])))
        for name, words in no_stores(store):
            yield Sample(f"no-store-{name}", (words, in_buffer(range(3))))
        for words in nonsense(rng, store):
            yield Sample("nonsense", (words, in_buffer(range(3))), compare=False)
    for fill in (1, 2, 15, 16, 17, 255, 256, 257, 496, 497, 1200):
        yield Sample(f"fill-{fill}", (_spoken([fill + 1, 2], FINISH), in_buffer([1, 0])))
    yield from _broken_chains()


def _broken_chains() -> Iterator[Sample]:
    """Blocks 1, 2 and 3 of a request of which one is lost, or names another before it."""
    slots = in_buffer([0])
    for broken in (1, 2, 3):
        for field, values in ((SERIAL, [0, broken + 5]), (PREVIOUS, range(6)), (FILL, [3, 16])):
            for value in values:
                store = _spoken([600], FINISH)
                head_of(store, broken)[field] = value
                yield Sample(f"block-{broken}-{field}-{value}", (store, slots))
    rng = np.random.default_rng(6)
    tokens = text_rows(rng, 2, 1500, 20)
    for left in range(6):  # blocks until all serial numbers are given out
        begin = END_OF_SERIALS - left
        store = with_words(fresh(2, 9, 3, FINISH), NEXT_SERIAL=begin)
        tell(rng, store, tokens, np.array([700, 300], np.int32))
        yield Sample(f"renumbered-{left}", (store, in_buffer([0, 1])))
    store = fresh(2, 9, 3, FINISH)
    say(store, tokens, np.array([50, 50], np.int32), np.array([40, 40], np.int32))
    tell(rng, store, tokens[:1], np.array([1500], np.int32))
    tell(rng, store, tokens[:1] + 1, np.array([1500], np.int32))
    yield Sample("stalled", (store, in_buffer([1, 0])))


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    slots = draw(st.lists(st.integers(-1, 5)))
    return _spoken(lengths, draw(st.integers(0, 1))), in_buffer(slots)


def _sizes() -> tuple[Args, ...]:
    return tuple((fresh(n, 4 * n, 2, FINISH), np.arange(n, dtype=np.int32)) for n in (3, 5, 8))


SPEC = OpSpec(
    name="ngram_store_finish_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_finish_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(),
    sizes=_sizes(),
)
