"""Stores to call the store operators with: empty, full of what was said before, and of nonsense.

What was said before was entered by the reference: a kernel's fault shows in its own call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ngram_npu import _C
from ops import reference

from .costs import bad_logits, with_token_logits
from .rows import HOSTILE_INT32, HOSTILE_INT64, random_rows, token_rows
from .spec import Args, Array, BadCall, OpSpec, Sample, arguments_of, contiguous, in_buffer

NO_STORE_ON_DEVICES = dict.fromkeys(
    ("cuda", "npu"), "a store is in the host's memory: tokens are entered one after the other"
)

LIVE, FINISH = 0, 1
UNLIMITED = 2**63 - 1
END_OF_SERIALS = 2**24

# The words of csrc/core/store.h that samples set.
NUM_SLOTS, NUM_BLOCKS, LINE_BITS, VISIBILITY, NEXT_SERIAL, BUSY, STATISTICS = range(1, 8)
HEADER_WORDS, SLOT_WORDS, HEAD_WORDS = 64, 4, 8
SMALL_STORES = [(1, 4, 1), (2, 8, 2), (3, 13, 6)]
"""Slots, blocks and line bits: lines are full, entries give way, blocks are given out again."""


def fresh(num_slots: int, num_blocks: int, line_bits: int, visibility: int = LIVE) -> Array:
    """An empty store."""
    store = np.zeros(_C.store_words(num_slots, num_blocks, line_bits), np.int32)
    _C.store_init(store, num_slots, num_blocks, line_bits, visibility)
    return in_buffer(store, before=3, gap=5)


def with_words(store: Array, **words: int) -> Array:
    """A copy with other words in its header."""
    copy = in_buffer(store, before=1, gap=3)
    for name, word in words.items():
        copy[globals()[name]] = word
    return copy


def head_of(store: Array, serial: int) -> Array:
    """The head of the block with that serial number."""
    at = HEADER_WORDS + store[NUM_SLOTS] * SLOT_WORDS + serial % store[NUM_BLOCKS] * HEAD_WORDS
    return store[at : at + HEAD_WORDS]


def text_rows(rng: np.random.Generator, rows: int, capacity: int, kinds: int) -> Array:
    """Rows that say one phrase again and again, but for a token here and there; each begins
    elsewhere in it."""
    phrase = rng.integers(0, kinds, 1 + capacity // 3)
    starts = rng.integers(0, len(phrase), (rows, 1))
    tokens = phrase[(starts + np.arange(capacity)) % len(phrase)]
    changed = rng.random(tokens.shape) < 0.04
    tokens[changed] = rng.integers(0, kinds, int(changed.sum()))
    return tokens.astype(np.int32)


def own_drafts(rng: np.random.Generator, batch: int, k: int, dear: int) -> dict[str, Array]:
    """What an index step may have left; some counts are none."""
    counts = rng.choice([0, 1, k // 2, k, k, -1, k + 1, -(2**31), 2**31 - 1], batch)
    return {
        "draft_token_ids": in_buffer(rng.integers(-1, 99, (batch, k)), before=2, gap=3),
        "num_draft_tokens": in_buffer(counts, gap=1),
        "match_len": in_buffer(rng.integers(0, 17, batch), gap=1),
        "draft_costs": in_buffer(rng.integers(0, dear, (batch, k)), gap=3, dtype=np.uint8),
    }


def no_drafts(batch: int, k: int) -> dict[str, Array]:
    return {
        "draft_token_ids": in_buffer(np.full((batch, k), -1)),
        "num_draft_tokens": in_buffer([0] * batch),
        "match_len": in_buffer([0] * batch),
        "draft_costs": in_buffer(np.full((batch, k), 255), dtype=np.uint8),
    }


def table(rng: np.random.Generator) -> Array:
    costs = rng.integers(0, 40, (16, 56)).astype(np.uint8)
    costs[rng.random(costs.shape) < 0.2] = 0
    return costs


def say(
    store: Array,
    tokens: Array,
    lengths: Array,
    sampled: Array,
    slots: Array | None = None,
    scopes: Array | None = None,
) -> None:
    """A step of the reference, which enters what is new in the rows."""
    drafts: Any = no_drafts(len(sampled), 0)
    reference.ngram_store_step_(
        tokens, lengths, sampled, store, None, slots, scopes, *drafts.values(), UNLIMITED,
        np.zeros((16, 56), np.uint8), 0,
    )  # fmt: skip


def tell(
    rng: np.random.Generator,
    store: Array,
    tokens: Array,
    lengths: Array,
    slots: Array | None = None,
    scopes: Array | None = None,
) -> Array:
    """The store, after the rows grew from a quarter of these lengths, some tokens a step."""
    at = lengths // 4
    while (at < lengths).any():
        sampled = np.minimum(rng.integers(0, 12, len(lengths)), lengths - at).astype(np.int32)
        at = at + sampled
        say(store, tokens, at, sampled, slots, scopes)
    return store


def full(rng: np.random.Generator, size: tuple[int, int, int], visibility: int) -> Array:
    """A store with every slot in use and more said than it holds, in two scopes."""
    num_slots, num_blocks, _ = size
    capacity = 100 + num_blocks * 256 // num_slots
    store = fresh(*size, visibility)
    rows = text_rows(rng, num_slots, capacity, 30)
    lengths = np.array([capacity, 40, capacity // 3][:num_slots], np.int32)
    scopes = np.arange(num_slots) // 2
    return tell(rng, store, rows, lengths, scopes=scopes)


def recounted(rng: np.random.Generator, store: Array) -> Array:
    """A copy whose entries were right and wrong as often as it takes to be at every edge."""
    copy = with_words(store)
    sizes = (int(store[at]) for at in (NUM_SLOTS, NUM_BLOCKS, LINE_BITS))
    begin, end = _C.store_parts(*sizes)["lines"]
    states = copy[begin:end:2]
    counts = rng.choice([0, 1, 2, 3, 4, 5, 8, 9, 14, 15], (2, len(states)))
    states[:] = states & ~0xFF | counts[0] << 4 | counts[1]
    return copy


def no_stores(good: Array) -> Iterator[tuple[str, Array]]:
    """Tensors that contain none, with a label: operators leave them alone."""
    yield "empty", np.zeros(0, np.int32)
    yield "zeros", np.zeros(5000, np.int32)
    yield "ones", np.full(5000, -1, np.int32)
    yield "short-header", good[:63].copy()
    yield "header-alone", good[:64].copy()
    yield "one-word-short", good[:-1].copy()
    for name, words in (
        ("NUM_SLOTS", (0, -1, 2**31 - 1, int(good[NUM_BLOCKS]) // 4 + 1)),
        ("NUM_BLOCKS", (0, -1, 3, 2**31 - 1)),
        ("LINE_BITS", (0, -1, 25, 31, 32, 64)),
    ):
        for word in words:
            yield f"{name}-{word}", with_words(good, **{name: word})


def nonsense(rng: np.random.Generator, good: Array) -> Iterator[Array]:
    """Contents that no operator leaves behind, behind a good header: a kernel stays inside."""
    for share in (0.001, 0.05, 1.0):
        store = in_buffer(good, before=1, gap=3)
        hit = rng.random(store.size) < share
        hit[:NEXT_SERIAL] = hit[BUSY] = False
        store[hit] = rng.integers(-(2**31), 2**31, int(hit.sum()))
        yield store
        yield with_words(store, NEXT_SERIAL=int(good[NEXT_SERIAL]), VISIBILITY=FINISH)


NAMES = [name for name, _ in arguments_of("ngram_store_step_")]
FLAT = np.full((16, 56), 10, np.uint8)
SCOPES = [0, -1, 2**63 - 1, -(2**63), 1, 2**32, 2**32 + 1]


def _call(
    tokens: Array,
    lengths: Array,
    sampled: Array,
    store: Array,
    drafts: dict[str, Array],
    **more: Any,
) -> Args:
    """The arguments, those left out being None, a flat table of costs and no limits."""
    values = dict.fromkeys(NAMES)
    store = in_buffer(store, before=1, gap=3)  # a copy: what is said next is not in it
    values |= {"token_ids": tokens, "num_tokens": lengths, "num_sampled": sampled, "store": store}
    values |= {"max_len": UNLIMITED, "costs": FLAT, "cost_limit": 75, "fill": False}
    values |= {**drafts, **more}
    return tuple(values[name] for name in NAMES)


def _step_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(text_rows(rng, 5, 40, 9), before=3, gap=5)
    lengths = in_buffer([40, 30, 17, 33, 21], gap=1)
    ordinary = {
        "row_indices": in_buffer([4, 0, 3], gap=2, dtype=np.int64),
        "slot_indices": in_buffer([6, 1, 3], gap=1),
        "scopes": in_buffer([0, 0, 0], gap=1, dtype=np.int64),
    }
    store = tell(rng, fresh(7, 28, 4), tokens, lengths - 9)
    sampled = in_buffer([3, 1, 2], gap=1)
    drafts = own_drafts(rng, 3, 4, 60)
    yield Sample("ordinary", _call(tokens, lengths, sampled, store, drafts, **ordinary))
    yield from _draft_samples(rng)
    yield from _length_samples(rng)
    yield from _slot_samples(rng)
    yield from _hostile_samples(rng)
    yield from _serial_samples(rng)
    yield from _store_samples(rng)


def _draft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """The choice: every k, limit, length of a row and promise of its own draft."""
    for visibility, kinds in ((LIVE, 2), (LIVE, 40), (FINISH, 12)):
        tokens = in_buffer(text_rows(rng, 8, 400, kinds), gap=2)
        lengths = in_buffer([400, 333, 257, 256, 255, 100, 17, 16])
        scopes = in_buffer([0, 0, 0, 0, 1, 1, 0, 1])
        store = tell(rng, fresh(4, 24, 9, visibility), tokens[:4], lengths[:4], scopes=scopes[:4])
        # Places at which these rows, and others like them, have gone on.
        ends = in_buffer(rng.integers(1, 400, 8))
        sampled, slots = in_buffer(rng.integers(0, 4, 8)), in_buffer([-1] * 7 + [2])
        for k, limit in ((0, 40), *product((1, 8), (0, 40)), *product((8, 64), (75, 2**31 - 1))):
            for costs, dear in (
                ({"costs": FLAT}, 11),
                ({"costs": table(rng)}, 60),
                ({"costs": table(rng) * 6}, 256),
                (with_token_logits(rng, 56), 100),
            ):
                more = {**costs, "cost_limit": limit, "scopes": scopes, "slot_indices": slots}
                drafts = own_drafts(rng, 8, k, dear)
                if dear == 11:  # ties
                    drafts["draft_costs"][...] = 10
                    drafts["draft_costs"][:, 7:8] = rng.integers(9, 12, (8, 1))
                args = _call(tokens, ends, sampled, store, drafts, fill=dear == 60, **more)
                yield Sample(f"choice-{visibility}-{kinds}-{k}-{limit}-{dear}", args)
        for i in range(4):
            counted = recounted(rng, store)
            more = {"costs": table(rng), "slot_indices": in_buffer([-1] * 6 + [2, 0])}
            args = _call(tokens, ends, in_buffer([9] * 8), counted, no_drafts(8, 8), **more)
            yield Sample(f"recounted-{visibility}-{kinds}-{i}", args)
        for cut in (-(2**63), -1, 0, 99, 100, 101, 103, 108):
            all_100 = in_buffer([100] * 8)
            more = {"max_len": cut, "slot_indices": slots, "fill": True}
            args = _call(tokens, all_100, sampled, store, no_drafts(8, 8), **more)
            yield Sample(f"max-len-{visibility}-{kinds}-{cut}", args)


def _length_samples(rng: np.random.Generator) -> Iterator[Sample]:
    edges = [0, 1, 2, 15, 16, 17, 18, 255, 256, 257, 272, 496, 497]
    tokens = in_buffer(text_rows(rng, len(edges), 500, 30), gap=1)
    for visibility in (LIVE, FINISH):
        for new in (1, 2, 2**31 - 1):  # more than there are: all of the row
            store = fresh(len(edges), 64, 5, visibility)
            sampled = in_buffer([new] * len(edges))
            lengths = in_buffer(edges)
            args = _call(tokens, lengths, sampled, store, no_drafts(len(edges), 3))
            yield Sample(f"first-{visibility}-{new}", args)
            say(store, tokens, lengths, sampled)
            for grown in (0, 1, 17):
                longer = in_buffer(np.minimum(lengths + grown, 500))
                args = _call(tokens, longer, in_buffer([1] * len(edges)), store, no_drafts(13, 3))
                yield Sample(f"next-{visibility}-{new}-{grown}", args)
    # Later prompts of conversations: of 4096 tokens a call, those of the first requests.
    tokens = in_buffer(random_rows(rng, 3, 4300, 90))
    for visibility, lengths in (
        (FINISH, [4200, 4200, 10]),
        (LIVE, [4105, 30, 30]),
        (FINISH, [2000, 2100, 4300]),
    ):
        store = fresh(3, 60, 6, visibility)
        say(store, tokens, in_buffer([3, 3, 3]), in_buffer([2, 3, 1]))
        args = _call(tokens, in_buffer(lengths), in_buffer([2, 1, 3]), store, no_drafts(3, 2))
        yield Sample(f"backlog-{visibility}-{lengths}", args)
    store = fresh(3, 60, 6, FINISH)  # which is not for what was just sampled
    args = _call(tokens, in_buffer([4300] * 3), in_buffer([4200] * 3), store, no_drafts(3, 2))
    yield Sample("all-sampled", args)


def _slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Which request a slot has."""
    tokens = in_buffer(text_rows(rng, 4, 300, 25), gap=1)
    lengths = np.array([300, 270, 40, 17], np.int32)
    sampled = in_buffer([2, 1, 2, 1])
    for visibility in (LIVE, FINISH):
        store = tell(rng, fresh(4, 16, 4, visibility), tokens, lengths - 4)
        for label, change in (
            ("as-they-were", {}),
            ("others-slots", {"slot_indices": in_buffer([1, 0, 3, 2])}),
            ("one-slot-twice", {"slot_indices": in_buffer([1, 0, 1, 1], dtype=np.int64)}),
            ("one-row-twice", {"row_indices": in_buffer([1, 1, 1, 0])}),
            ("other-scopes", {"scopes": in_buffer([0, -1, 0, 1])}),
            ("nothing-sampled", {"num_sampled": in_buffer([0, 0, -1, 1])}),
            ("shorter", {"num_tokens": in_buffer([200, 265, 36, 12])}),
            ("by-one-shorter", {"num_tokens": in_buffer(lengths - 5)}),
        ):
            args = _call(tokens, in_buffer(lengths), sampled, store, no_drafts(4, 5), **change)
            yield Sample(f"{label}-{visibility}", args)
        for back in (1, 15, 16, 17):  # from the end of what is stored
            rewritten = in_buffer(tokens, gap=1)
            rewritten[np.arange(4), np.maximum(lengths - 4 - back, 0)] = 77
            args = _call(rewritten, in_buffer(lengths), sampled, store, no_drafts(4, 5))
            yield Sample(f"rewritten-{back}-{visibility}", args)
        for dtype in (np.int32, np.int64):
            ids = [s for s in SCOPES if abs(s) < 2**31 or dtype is np.int64]
            rows = in_buffer(np.tile(tokens[:1], (len(ids), 1)))
            scopes = in_buffer(ids, dtype=dtype)
            ends = in_buffer(np.arange(40, 40 + len(ids)))
            store = tell(rng, fresh(7, 28, 4, visibility), rows, ends - 2, scopes=scopes)
            for turned in range(2):
                more = {"scopes": in_buffer(np.roll(ids, turned), dtype=dtype)}
                args = _call(
                    rows, ends, in_buffer([2] * len(ids)), store, no_drafts(len(ids), 5), **more
                )
                yield Sample(f"scopes-{turned}-{visibility}", args)


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    store = full(rng, (2, 8, 4), LIVE)
    bad = len(HOSTILE_INT32)
    tokens = in_buffer(text_rows(rng, bad, 40, 6), gap=1)
    hostile, good = in_buffer(HOSTILE_INT32), in_buffer([30] * bad)
    ones, drafts = in_buffer([1] * bad), no_drafts(bad, 4)
    yield Sample("hostile-lengths", _call(tokens, hostile, ones, store, drafts))
    yield Sample("hostile-sampled", _call(tokens, good, hostile, store, drafts))
    minus = in_buffer(rng.choice(HOSTILE_INT32, (bad, 40)), gap=1)
    told = tell(rng, fresh(8, 32, 4), minus, good)
    logits = with_token_logits(rng, 56)
    yield Sample("hostile-logits", _call(minus, good, ones, told, drafts, **logits))
    yield Sample("hostile-tokens", _call(minus, good, ones, told, drafts, fill=True))
    yield Sample("hostile-drafts", _call(minus, good, ones, told, own_drafts(rng, bad, 4, 256)))
    longer = in_buffer([41, 40, 39, 40, 41, 0, 1, 40])
    yield Sample("longer-than-rows", _call(tokens, longer, ones, store, drafts))
    for dtype, values in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
        for name in ("row_indices", "slot_indices", "scopes"):
            batch = len(values)
            rows = {"row_indices": in_buffer(np.arange(batch) % bad)}
            more = {**rows, name: in_buffer(values, dtype=dtype)}
            args = _call(tokens, good, in_buffer([1] * batch), store, no_drafts(batch, 4), **more)
            yield Sample(f"hostile-{name}-{dtype.__name__}", args)
    for rows, capacity, batch, k in ((0, 0, 0, 0), (4, 5, 2, 3), (3, 0, 3, 3), (1, 1, 1, 1)):
        nothing, ends = in_buffer(np.zeros((rows, capacity))), in_buffer([capacity] * rows)
        args = _call(nothing, ends, in_buffer([1] * batch), store, no_drafts(batch, k))
        yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _serial_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Blocks that are given out again, and the end of serial numbers."""
    tokens = in_buffer(text_rows(rng, 3, 1400, 60), gap=1)
    lengths = in_buffer([1000, 600, 100])
    for visibility in (LIVE, FINISH):
        for left in range(4):
            begin = END_OF_SERIALS - left
            store = with_words(fresh(3, 12, 4, visibility), NEXT_SERIAL=begin)
            args = _call(tokens, lengths, in_buffer([300] * 3), store, no_drafts(3, 2))
            yield Sample(f"renumber-{visibility}-{left}", args)
            say(store, tokens, lengths - 300, lengths - 300)
            args = _call(tokens, lengths, in_buffer([290] * 3), store, no_drafts(3, 2))
            yield Sample(f"renumbered-{visibility}-{left}", args)
        store = fresh(3, 12, 4, visibility)
        say(store, tokens, lengths, in_buffer([30, 20, 10]))
        for offset in range(1, 4):  # slot 0 writes on, the others wait until their blocks are gone
            say(store, tokens[:1] + offset, in_buffer([1100]), in_buffer([1100]))
            more = in_buffer(lengths + 5)
            args = _call(tokens, more, in_buffer([5] * 3), store, no_drafts(3, 2))
            yield Sample(f"stalled-{visibility}-{offset}", args)


def _store_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for visibility in (LIVE, FINISH):
        for size in SMALL_STORES:
            num_slots = size[0]
            store = full(rng, size, visibility)
            tokens = in_buffer(text_rows(rng, num_slots, 300, 20), gap=1)
            lengths = in_buffer([300, 40, 257][:num_slots])
            sampled = in_buffer([60] * num_slots)
            drafts = no_drafts(num_slots, 6)
            yield Sample(f"full-{size}", _call(tokens, lengths, sampled, store, drafts))
        call = tokens, lengths, sampled
        scopes = in_buffer([1, 0, 2])
        yield Sample("other-scopes", _call(*call, store, drafts, scopes=scopes))
        yield Sample("busy", _call(*call, with_words(store, BUSY=1), drafts))
        more = {"row_indices": in_buffer([]), "num_sampled": in_buffer([])}
        idle = _call(*call, with_words(store, BUSY=1), no_drafts(0, 6), **more)
        yield Sample("busy-without-requests", idle)
        wrapping = with_words(store)
        wrapping[STATISTICS : STATISTICS + 9] = -1
        yield Sample("statistics-wrap", _call(*call, wrapping, drafts))
        wrapping = with_words(wrapping, BUSY=1)
        yield Sample("refusals-wrap", _call(*call, wrapping, drafts))
        for name, words in no_stores(store):
            yield Sample(f"no-store-{name}", _call(*call, words, own_drafts(rng, 3, 6, 60)))
        for words in nonsense(rng, store):
            yield Sample("nonsense", _call(*call, words, drafts), compare=False)


@st.composite
def _step_strategy(draw: st.DrawFn) -> Args:
    tokens = in_buffer(draw(token_rows()), gap=2)
    rows, capacity = tokens.shape

    def numbers(low: int, high: int) -> Array:
        return in_buffer(draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)))

    store = fresh(*draw(st.sampled_from(SMALL_STORES)), draw(st.integers(0, 1)))
    scopes = numbers(0, 1)
    for _ in range(draw(st.integers(0, 3))):
        say(store, tokens, numbers(-1, capacity + 1), numbers(-1, 5), numbers(-1, 4), scopes)
    k = draw(st.sampled_from([0, 1, 3, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    more = {
        "slot_indices": numbers(-1, 4),
        "scopes": scopes,
        "max_len": draw(st.sampled_from([UNLIMITED, capacity, 0])),
        **draw(st.sampled_from([{"costs": table(rng)}, with_token_logits(rng, 56)])),
        "cost_limit": draw(st.sampled_from([0, 40, 2**31 - 1])),
        "fill": draw(st.booleans()),
    }
    call = tokens, numbers(-1, capacity + 1), numbers(-1, capacity)
    return _call(*call, store, own_drafts(rng, rows, k, 60), **more)


def _step_sizes() -> tuple[Args, ...]:
    rng = np.random.default_rng(1)
    made = []
    for rows, capacity, k in ((12, 50, 4), (17, 61, 6), (20, 83, 9)):
        tokens = random_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        some = np.arange(rows - 3, dtype=np.int32)
        store = tell(rng, fresh(rows, 4 * rows, 3), tokens, lengths - 2)
        more = {"row_indices": some, "slot_indices": some.copy(), "scopes": some % 2}
        sampled = np.full(rows - 3, 2, np.int32)
        drafts = no_drafts(rows - 3, k)
        args = _call(tokens, lengths, sampled, store, drafts, cost_limit=k, **more)
        made.append(contiguous(args))
    return tuple(made)


def _wide(array: Array) -> Array:
    return np.zeros((3, 65), array.dtype)


NGRAM_STORE_STEP = OpSpec(
    name="ngram_store_step_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_step_,
    samples=_step_samples,
    strategy=_step_strategy(),
    bad_calls=(
        *(
            BadCall(label, change, said, name or "token_logits")
            for label, change, said, name in bad_logits(56)
        ),
        BadCall("k", {"draft_costs": _wide}, r"\[3, 4\], got .*\[3, 65\]"),
        BadCall("wide", {"draft_token_ids": _wide}, "0 to 64, got 65", "draft_token_ids width"),
        BadCall("table", {"costs": FLAT[:, :55]}, r"\[16, 56\], got .*\[16, 55\]"),
        BadCall("a wider table's", {"costs": np.zeros((16, 99), np.uint8)[:, :56]}, ""),
        BadCall("limit below 0", {"cost_limit": -1}, "0 to .*, got -1"),
        BadCall("limit 2**31", {"cost_limit": 2**31}, "0 to .*, got 2147483648"),
    ),
    sizes=_step_sizes(),
)


SERIAL, FILL, PREVIOUS = 0, 1, 3


def _spoken(lengths: list[int], visibility: int, **words: int) -> Array:
    """A store with an open request for each length, of which all but the first token are held
    back."""
    rng = np.random.default_rng(5)
    store = with_words(fresh(len(lengths), 4 * len(lengths) + 1, 3, visibility), **words)
    tokens = text_rows(rng, len(lengths), max(lengths), 20)
    say(store, tokens, np.array(lengths, np.int32), np.array(lengths, np.int32) - 1)
    return store


def _finish_samples(rng: np.random.Generator) -> Iterator[Sample]:
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
def _finish_strategy(draw: st.DrawFn) -> Args:
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    slots = draw(st.lists(st.integers(-1, 5)))
    return _spoken(lengths, draw(st.integers(0, 1))), in_buffer(slots)


def _finish_sizes() -> tuple[Args, ...]:
    return tuple((fresh(n, 4 * n, 2, FINISH), np.arange(n, dtype=np.int32)) for n in (3, 5, 8))


NGRAM_STORE_FINISH = OpSpec(
    name="ngram_store_finish_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_finish_,
    samples=_finish_samples,
    strategy=_finish_strategy(),
    bad_calls=(),
    sizes=_finish_sizes(),
)
