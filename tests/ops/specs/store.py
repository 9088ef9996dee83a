"""The OpSpecs of the store operators, with stores that are empty, full, damaged or random.

The reference fills the stores, so that a fault of a kernel shows in the kernel's own call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from ngram_npu import _C
from ops import reference
from ops.schema import arguments_of

from .inputs import (
    HOSTILE_INDICES,
    HOSTILE_INT32,
    UNLIMITED,
    bad_logits,
    random_logits,
    random_rows,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, contiguous, in_buffer

NO_STORE_ON_DEVICES = dict.fromkeys(
    ("cuda", "npu"), "a store is in host memory: tokens are inserted one after the other"
)

LIVE, FINISH = 0, 1
END_OF_SERIALS = 2**24

# The words of csrc/core/store.h that samples set.
NUM_SLOTS, NUM_BLOCKS, LINE_BITS, VISIBILITY, NEXT_SERIAL, BUSY, STATISTICS = range(1, 8)
HEADER_WORDS, SLOT_WORDS, HEAD_WORDS = 64, 4, 8
SMALL_STORES = [(1, 4, 1), (2, 8, 2), (3, 13, 6)]
"""Slots, blocks and line bits. So small that entries are evicted and blocks are reused."""


def new_store(num_slots: int, num_blocks: int, line_bits: int, visibility: int = LIVE) -> Array:
    """An empty store."""
    store = np.zeros(_C.store_words(num_slots, num_blocks, line_bits), np.int32)
    _C.store_init(store, num_slots, num_blocks, line_bits, visibility)
    return in_buffer(store, before=3, gap=5)


def with_words(store: Array, **words: int) -> Array:
    """A copy with these words in its header."""
    copy = in_buffer(store, before=1, gap=3)
    for name, word in words.items():
        copy[globals()[name]] = word
    return copy


def block_head(store: Array, serial: int) -> Array:
    """The head of the block with that serial number."""
    at = HEADER_WORDS + store[NUM_SLOTS] * SLOT_WORDS + serial % store[NUM_BLOCKS] * HEAD_WORDS
    return store[at : at + HEAD_WORDS]


def text_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    """Rows that repeat one phrase, with a few tokens changed. Each row begins at a different place
    of the phrase."""
    phrase = rng.integers(0, alphabet, 1 + capacity // 3)
    starts = rng.integers(0, len(phrase), (rows, 1))
    tokens = phrase[(starts + np.arange(capacity)) % len(phrase)]
    changed = rng.random(tokens.shape) < 0.04
    tokens[changed] = rng.integers(0, alphabet, int(changed.sum()))
    return tokens.astype(np.int32)


def index_drafts(rng: np.random.Generator, batch: int, k: int, max_cost: int) -> dict[str, Array]:
    """Drafts as an index step may have written them. Some counts are out of range."""
    counts = rng.choice([0, 1, k // 2, k, k, -1, k + 1, -(2**31), 2**31 - 1], batch)
    return {
        "draft_token_ids": in_buffer(rng.integers(-1, 99, (batch, k)), before=2, gap=3),
        "num_draft_tokens": in_buffer(counts, gap=1),
        "match_len": in_buffer(rng.integers(0, 17, batch), gap=1),
        "draft_costs": in_buffer(rng.integers(0, max_cost, (batch, k)), gap=3, dtype=np.uint8),
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


def append_tokens(
    store: Array,
    tokens: Array,
    lengths: Array,
    sampled: Array,
    slots: Array | None = None,
    scopes: Array | None = None,
) -> None:
    """Inserts the sampled tokens of a step, without drafts, by the reference."""
    drafts: Any = no_drafts(len(sampled), 0)
    reference.ngram_store_step_(
        tokens, lengths, sampled, store, None, slots, scopes, *drafts.values(), UNLIMITED,
        np.zeros((16, 56), np.uint8), 0,
    )  # fmt: skip


def run_steps(
    rng: np.random.Generator,
    store: Array,
    tokens: Array,
    lengths: Array,
    slots: Array | None = None,
    scopes: Array | None = None,
) -> Array:
    """Returns the store after steps in which the rows grew from a quarter of these lengths."""
    at = lengths // 4
    while (at < lengths).any():
        sampled = np.minimum(rng.integers(0, 12, len(lengths)), lengths - at).astype(np.int32)
        at = at + sampled
        append_tokens(store, tokens, at, sampled, slots, scopes)
    return store


def full_store(rng: np.random.Generator, size: tuple[int, int, int], visibility: int) -> Array:
    """A store with all slots in use, two scopes, and more tokens inserted than it can hold."""
    num_slots, num_blocks, _ = size
    capacity = 100 + num_blocks * 256 // num_slots
    store = new_store(*size, visibility)
    rows = text_rows(rng, num_slots, capacity, 30)
    lengths = np.array([capacity, 40, capacity // 3][:num_slots], np.int32)
    scopes = np.arange(num_slots) // 2
    return run_steps(rng, store, rows, lengths, scopes=scopes)


def with_random_counts(rng: np.random.Generator, store: Array) -> Array:
    """A copy in which the entries' counts of right and wrong are at the edges of all ranges."""
    copy = with_words(store)
    sizes = (int(store[at]) for at in (NUM_SLOTS, NUM_BLOCKS, LINE_BITS))
    begin, end = _C.store_parts(*sizes)["lines"]
    states = copy[begin:end:2]
    counts = rng.choice([0, 1, 2, 3, 4, 5, 8, 9, 14, 15], (2, len(states)))
    states[:] = states & ~0xFF | counts[0] << 4 | counts[1]
    return copy


def invalid_stores(good: Array) -> Iterator[tuple[str, Array]]:
    """Tensors that are not stores, with a label. Operators do not write to them."""
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


def random_contents(rng: np.random.Generator, good: Array) -> Iterator[Array]:
    """Random contents after a valid header. A kernel must stay inside the tensor."""
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


def step_call(
    tokens: Array,
    lengths: Array,
    sampled: Array,
    store: Array,
    drafts: dict[str, Array],
    **more: Any,
) -> Args:
    """A call without optional tensors and limits, and with a flat table of costs."""
    values = dict.fromkeys(NAMES)
    store = in_buffer(store, before=1, gap=3)  # a copy: later insertions do not change it
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
    store = run_steps(rng, new_store(7, 28, 4), tokens, lengths - 9)
    sampled = in_buffer([3, 1, 2], gap=1)
    drafts = index_drafts(rng, 3, 4, 60)
    yield Sample("ordinary", step_call(tokens, lengths, sampled, store, drafts, **ordinary))
    yield from _draft_samples(rng)
    yield from _length_samples(rng)
    yield from _slot_samples(rng)
    yield from _hostile_samples(rng)
    yield from _serial_samples(rng)
    yield from _store_samples(rng)


def _draft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Which draft is used: all k, limits, row lengths and costs of the index's draft."""
    for visibility, alphabet in ((LIVE, 2), (LIVE, 40), (FINISH, 12)):
        tokens = in_buffer(text_rows(rng, 8, 400, alphabet), gap=2)
        lengths = in_buffer([400, 333, 257, 256, 255, 100, 17, 16])
        scopes = in_buffer([0, 0, 0, 0, 1, 1, 0, 1])
        store = run_steps(
            rng, new_store(4, 24, 9, visibility), tokens[:4], lengths[:4], scopes=scopes[:4]
        )
        # Rows that the store has, and similar ones, end at random places.
        ends = in_buffer(rng.integers(1, 400, 8))
        sampled, slots = in_buffer(rng.integers(0, 4, 8)), in_buffer([-1] * 7 + [2])
        for k, limit in ((0, 40), *product((1, 8), (0, 40)), *product((8, 64), (75, 2**31 - 1))):
            for costs, max_cost in (
                ({"costs": FLAT}, 11),
                ({"costs": table(rng)}, 60),
                ({"costs": table(rng) * 6}, 256),
                (random_logits(rng, 56), 100),
            ):
                more = {**costs, "cost_limit": limit, "scopes": scopes, "slot_indices": slots}
                drafts = index_drafts(rng, 8, k, max_cost)
                if max_cost == 11:  # ties
                    drafts["draft_costs"][...] = 10
                    drafts["draft_costs"][:, 7:8] = rng.integers(9, 12, (8, 1))
                args = step_call(tokens, ends, sampled, store, drafts, fill=max_cost == 60, **more)
                yield Sample(f"choice-{visibility}-{alphabet}-{k}-{limit}-{max_cost}", args)
        for i in range(4):
            counted = with_random_counts(rng, store)
            more = {"costs": table(rng), "slot_indices": in_buffer([-1] * 6 + [2, 0])}
            args = step_call(tokens, ends, in_buffer([9] * 8), counted, no_drafts(8, 8), **more)
            yield Sample(f"recounted-{visibility}-{alphabet}-{i}", args)
        for cut in (-(2**63), -1, 0, 99, 100, 101, 103, 108):
            all_100 = in_buffer([100] * 8)
            more = {"max_len": cut, "slot_indices": slots, "fill": True}
            args = step_call(tokens, all_100, sampled, store, no_drafts(8, 8), **more)
            yield Sample(f"max-len-{visibility}-{alphabet}-{cut}", args)


def _length_samples(rng: np.random.Generator) -> Iterator[Sample]:
    edges = [0, 1, 2, 15, 16, 17, 18, 255, 256, 257, 272, 496, 497]
    tokens = in_buffer(text_rows(rng, len(edges), 500, 30), gap=1)
    for visibility in (LIVE, FINISH):
        for new in (1, 2, 2**31 - 1):  # the last one is more than the row has
            store = new_store(len(edges), 64, 5, visibility)
            sampled = in_buffer([new] * len(edges))
            lengths = in_buffer(edges)
            args = step_call(tokens, lengths, sampled, store, no_drafts(len(edges), 3))
            yield Sample(f"first-{visibility}-{new}", args)
            append_tokens(store, tokens, lengths, sampled)
            for grown in (0, 1, 17):
                longer = in_buffer(np.minimum(lengths + grown, 500))
                args = step_call(
                    tokens, longer, in_buffer([1] * len(edges)), store, no_drafts(13, 3)
                )
                yield Sample(f"next-{visibility}-{new}-{grown}", args)
    # Long prompts: a call inserts at most 4096 tokens of backlog, of the first requests.
    tokens = in_buffer(random_rows(rng, 3, 4300, 90))
    for visibility, lengths in (
        (FINISH, [4200, 4200, 10]),
        (LIVE, [4105, 30, 30]),
        (FINISH, [2000, 2100, 4300]),
        (FINISH, [4, 4300, 10]),  # the first request uses none of the limit
    ):
        store = new_store(3, 60, 6, visibility)
        append_tokens(store, tokens, in_buffer([3, 3, 3]), in_buffer([2, 3, 1]))
        args = step_call(tokens, in_buffer(lengths), in_buffer([2, 1, 3]), store, no_drafts(3, 2))
        yield Sample(f"backlog-{visibility}-{lengths}", args)
    store = new_store(3, 60, 6, FINISH)  # sampled tokens do not count as backlog
    args = step_call(tokens, in_buffer([4300] * 3), in_buffer([4200] * 3), store, no_drafts(3, 2))
    yield Sample("all-sampled", args)


def _slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Which request's row a slot belongs to."""
    tokens = in_buffer(text_rows(rng, 4, 300, 25), gap=1)
    lengths = np.array([300, 270, 40, 17], np.int32)
    sampled = in_buffer([2, 1, 2, 1])
    for visibility in (LIVE, FINISH):
        store = run_steps(rng, new_store(4, 16, 4, visibility), tokens, lengths - 4)
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
            args = step_call(tokens, in_buffer(lengths), sampled, store, no_drafts(4, 5), **change)
            yield Sample(f"{label}-{visibility}", args)
        for back in (1, 15, 16, 17):  # tokens before the end of the stored text
            rewritten = in_buffer(tokens, gap=1)
            rewritten[np.arange(4), np.maximum(lengths - 4 - back, 0)] = 77
            args = step_call(rewritten, in_buffer(lengths), sampled, store, no_drafts(4, 5))
            yield Sample(f"rewritten-{back}-{visibility}", args)
        for dtype in (np.int32, np.int64):
            ids = [s for s in SCOPES if abs(s) < 2**31 or dtype is np.int64]
            rows = in_buffer(np.tile(tokens[:1], (len(ids), 1)))
            scopes = in_buffer(ids, dtype=dtype)
            ends = in_buffer(np.arange(40, 40 + len(ids)))
            store = run_steps(rng, new_store(7, 28, 4, visibility), rows, ends - 2, scopes=scopes)
            for turned in range(2):
                more = {"scopes": in_buffer(np.roll(ids, turned), dtype=dtype)}
                args = step_call(
                    rows, ends, in_buffer([2] * len(ids)), store, no_drafts(len(ids), 5), **more
                )
                yield Sample(f"scopes-{turned}-{visibility}", args)


def _hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    store = full_store(rng, (2, 8, 4), LIVE)
    bad = len(HOSTILE_INT32)
    tokens = in_buffer(text_rows(rng, bad, 40, 6), gap=1)
    hostile, good = in_buffer(HOSTILE_INT32), in_buffer([30] * bad)
    ones, drafts = in_buffer([1] * bad), no_drafts(bad, 4)
    yield Sample("hostile-lengths", step_call(tokens, hostile, ones, store, drafts))
    yield Sample("hostile-sampled", step_call(tokens, good, hostile, store, drafts))
    hostile_rows = in_buffer(rng.choice(HOSTILE_INT32, (bad, 40)), gap=1)
    filled = run_steps(rng, new_store(8, 32, 4), hostile_rows, good)
    logits = random_logits(rng, 56)
    yield Sample("hostile-logits", step_call(hostile_rows, good, ones, filled, drafts, **logits))
    yield Sample("hostile-tokens", step_call(hostile_rows, good, ones, filled, drafts, fill=True))
    yield Sample(
        "hostile-drafts",
        step_call(hostile_rows, good, ones, filled, index_drafts(rng, bad, 4, 256)),
    )
    longer = in_buffer([41, 40, 39, 40, 41, 0, 1, 40])
    yield Sample("longer-than-rows", step_call(tokens, longer, ones, store, drafts))
    for dtype, values in HOSTILE_INDICES:
        for name in ("row_indices", "slot_indices", "scopes"):
            batch = len(values)
            rows = {"row_indices": in_buffer(np.arange(batch) % bad)}
            more = {**rows, name: in_buffer(values, dtype=dtype)}
            args = step_call(
                tokens, good, in_buffer([1] * batch), store, no_drafts(batch, 4), **more
            )
            yield Sample(f"hostile-{name}-{dtype.__name__}", args)
    for rows, capacity, batch, k in ((0, 0, 0, 0), (4, 5, 2, 3), (3, 0, 3, 3), (1, 1, 1, 1)):
        nothing, ends = in_buffer(np.zeros((rows, capacity))), in_buffer([capacity] * rows)
        args = step_call(nothing, ends, in_buffer([1] * batch), store, no_drafts(batch, k))
        yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _serial_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Reused blocks, and the end of serial numbers."""
    tokens = in_buffer(text_rows(rng, 3, 1400, 60), gap=1)
    lengths = in_buffer([1000, 600, 100])
    for visibility in (LIVE, FINISH):
        for left in range(4):
            begin = END_OF_SERIALS - left
            store = with_words(new_store(3, 12, 4, visibility), NEXT_SERIAL=begin)
            args = step_call(tokens, lengths, in_buffer([300] * 3), store, no_drafts(3, 2))
            yield Sample(f"renumber-{visibility}-{left}", args)
            append_tokens(store, tokens, lengths - 300, lengths - 300)
            args = step_call(tokens, lengths, in_buffer([290] * 3), store, no_drafts(3, 2))
            yield Sample(f"renumbered-{visibility}-{left}", args)
        store = new_store(3, 12, 4, visibility)
        append_tokens(store, tokens, lengths, in_buffer([30, 20, 10]))
        for offset in range(1, 4):  # slot 0 continues until the blocks of the others are reused
            append_tokens(store, tokens[:1] + offset, in_buffer([1100]), in_buffer([1100]))
            more = in_buffer(lengths + 5)
            args = step_call(tokens, more, in_buffer([5] * 3), store, no_drafts(3, 2))
            yield Sample(f"stalled-{visibility}-{offset}", args)


def _store_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for visibility in (LIVE, FINISH):
        for size in SMALL_STORES:
            num_slots = size[0]
            store = full_store(rng, size, visibility)
            tokens = in_buffer(text_rows(rng, num_slots, 300, 20), gap=1)
            lengths = in_buffer([300, 40, 257][:num_slots])
            sampled = in_buffer([60] * num_slots)
            drafts = no_drafts(num_slots, 6)
            yield Sample(f"full-{size}", step_call(tokens, lengths, sampled, store, drafts))
        call = tokens, lengths, sampled
        scopes = in_buffer([1, 0, 2])
        yield Sample("other-scopes", step_call(*call, store, drafts, scopes=scopes))
        yield Sample("busy", step_call(*call, with_words(store, BUSY=1), drafts))
        more = {"row_indices": in_buffer([]), "num_sampled": in_buffer([])}
        idle = step_call(*call, with_words(store, BUSY=1), no_drafts(0, 6), **more)
        yield Sample("busy-without-requests", idle)
        wrapping = with_words(store)
        wrapping[STATISTICS : STATISTICS + 9] = -1
        yield Sample("statistics-wrap", step_call(*call, wrapping, drafts))
        wrapping = with_words(wrapping, BUSY=1)
        yield Sample("refusals-wrap", step_call(*call, wrapping, drafts))
        for name, words in invalid_stores(store):
            yield Sample(f"no-store-{name}", step_call(*call, words, index_drafts(rng, 3, 6, 60)))
        for words in random_contents(rng, store):
            yield Sample("random", step_call(*call, words, drafts), compare=False)


def _step_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, k in ((12, 50, 4), (17, 61, 6), (20, 83, 9)):
        tokens = random_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        some = np.arange(rows - 3, dtype=np.int32)
        store = run_steps(rng, new_store(rows, 4 * rows, 3), tokens, lengths - 2)
        more = {"row_indices": some, "slot_indices": some.copy(), "scopes": some % 2}
        sampled = np.full(rows - 3, 2, np.int32)
        drafts = no_drafts(rows - 3, k)
        args = step_call(tokens, lengths, sampled, store, drafts, cost_limit=k, **more)
        yield contiguous(args)


def _width_65(array: Array) -> Array:
    return np.zeros((3, 65), array.dtype)


NGRAM_STORE_STEP = OpSpec(
    name="ngram_store_step_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_step_,
    samples=_step_samples,
    bad_calls=(
        *bad_logits(56),
        BadCall({"draft_costs": _width_65}, r"\[3, 4\], got .*\[3, 65\]"),
        BadCall({"draft_token_ids": _width_65}, "0 to 64, got 65", "draft_token_ids width"),
        BadCall({"costs": FLAT[:, :55]}, r"\[16, 56\], got .*\[16, 55\]"),
        BadCall({"costs": np.zeros((16, 99), np.uint8)[:, :56]}, ""),
    ),
    sizes=tuple(_step_sizes()),
)


SERIAL, FILL, PREVIOUS = 0, 1, 3


def store_of_open_requests(lengths: list[int], visibility: int, **words: int) -> Array:
    """A store with an open request for each length. With FINISH, all tokens but the first are
    still to be inserted."""
    rng = np.random.default_rng(5)
    store = with_words(new_store(len(lengths), 4 * len(lengths) + 1, 3, visibility), **words)
    tokens = text_rows(rng, len(lengths), max(lengths), 20)
    append_tokens(store, tokens, np.array(lengths, np.int32), np.array(lengths, np.int32) - 1)
    return store


def _finish_samples(rng: np.random.Generator) -> Iterator[Sample]:
    store = store_of_open_requests([60, 33, 17, 2], FINISH)
    yield Sample("ordinary", (store, in_buffer([3, 0, 1], gap=1)))
    for visibility in (LIVE, FINISH):
        for size, order in zip(SMALL_STORES, ([0], [1, 0], [0, 1, 2]), strict=True):
            store = full_store(rng, size, visibility)
            yield Sample(f"full-{visibility}-{size}", (store, in_buffer(order)))
        for dtype, bad in HOSTILE_INDICES:
            yield Sample("hostile-slots", (store, in_buffer(bad, dtype=dtype)))
        yield Sample("twice", (store, in_buffer([2, 2, 1, 2])))
        yield Sample("none", (store, in_buffer([])))
        yield Sample("busy", (with_words(store, BUSY=1), in_buffer([1, 2])))
        yield Sample("busy-without-slots", (with_words(store, BUSY=1), in_buffer([])))
        for name, words in invalid_stores(store):
            yield Sample(f"no-store-{name}", (words, in_buffer(range(3))))
        for words in random_contents(rng, store):
            yield Sample("random", (words, in_buffer(range(3))), compare=False)
    for fill in (1, 2, 15, 16, 17, 255, 256, 257, 496, 497, 1200):
        store = store_of_open_requests([fill + 1, 2], FINISH)
        yield Sample(f"fill-{fill}", (store, in_buffer([1, 0])))
    yield from _broken_chains()


def _broken_chains() -> Iterator[Sample]:
    """A request of three blocks, one of which is lost or has another predecessor."""
    slots = in_buffer([0])
    for broken in (1, 2, 3):
        for field, values in ((SERIAL, [0, broken + 5]), (PREVIOUS, range(6)), (FILL, [3, 16])):
            for value in values:
                store = store_of_open_requests([600], FINISH)
                block_head(store, broken)[field] = value
                yield Sample(f"block-{broken}-{field}-{value}", (store, slots))
    rng = np.random.default_rng(6)
    tokens = text_rows(rng, 2, 1500, 20)
    store = new_store(2, 9, 3, FINISH)
    append_tokens(store, tokens, np.array([50, 50], np.int32), np.array([40, 40], np.int32))
    run_steps(rng, store, tokens[:1], np.array([1500], np.int32))
    run_steps(rng, store, tokens[:1] + 1, np.array([1500], np.int32))
    yield Sample("stalled", (store, in_buffer([1, 0])))


NGRAM_STORE_FINISH = OpSpec(
    name="ngram_store_finish_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_finish_,
    samples=_finish_samples,
    bad_calls=(),
    sizes=tuple((new_store(n, 4 * n, 2, FINISH), np.arange(n, dtype=np.int32)) for n in (3, 5, 8)),
)
