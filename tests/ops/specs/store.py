"""The OpSpecs of the operators of a store, with stores that are empty, full, damaged or random.

The references fill the stores, so that a test runs only the kernel of its own operator."""

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
    draw_rows,
    make_bad_logits_calls,
    make_random_logits,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, contiguous, in_buffer

NO_STORE_ON_DEVICES = dict.fromkeys(
    ("cuda", "npu"), "a store is in host memory: tokens are inserted one after the other"
)

LIVE, FINISH = 0, 1
END_OF_SERIALS = 2**24

# Indices of the header words (csrc/core/store.h) that samples set.
NUM_SLOTS, NUM_BLOCKS, LINE_BITS, VISIBILITY, NEXT_SERIAL, BUSY, STATISTICS = range(1, 8)
HEADER_WORDS, SLOT_WORDS, HEAD_WORDS = 64, 4, 8
SMALL_STORES = [(1, 4, 1), (2, 8, 2), (3, 13, 6)]
"""Number of slots, number of blocks and line bits of stores that are so small that entries are
evicted and blocks are reused."""


def make_store(num_slots: int, num_blocks: int, line_bits: int, visibility: int = LIVE) -> Array:
    """Returns an empty store."""
    store = np.zeros(_C.store_words(num_slots, num_blocks, line_bits), np.int32)
    _C.store_init(store, num_slots, num_blocks, line_bits, visibility)
    return in_buffer(store, before=3, gap=5)


def copy_store(store: Array, **words: int) -> Array:
    """Returns a copy with these words in its header."""
    copy = in_buffer(store, before=1, gap=3)
    for name, word in words.items():
        copy[globals()[name]] = word
    return copy


def get_block_head(store: Array, serial: int) -> Array:
    """Returns the head of the block with this serial number, as a view."""
    first = HEADER_WORDS + store[NUM_SLOTS] * SLOT_WORDS + serial % store[NUM_BLOCKS] * HEAD_WORDS
    return store[first : first + HEAD_WORDS]


def text_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    """Returns rows that repeat the same phrase, with a few random tokens. Each row begins at a
    random position of the phrase."""
    phrase = rng.integers(0, alphabet, 1 + capacity // 3)
    starts = rng.integers(0, len(phrase), (rows, 1))
    tokens = phrase[(starts + np.arange(capacity)) % len(phrase)]
    is_random = rng.random(tokens.shape) < 0.04
    tokens[is_random] = rng.integers(0, alphabet, int(is_random.sum()))
    return tokens.astype(np.int32)


def draw_drafts(rng: np.random.Generator, batch: int, k: int, max_cost: int) -> dict[str, Array]:
    """Returns drafts such as an index step writes, and some counts that are out of range."""
    counts = rng.choice([0, 1, k // 2, k, k, -1, k + 1, -(2**31), 2**31 - 1], batch)
    return {
        "draft_token_ids": in_buffer(rng.integers(-1, 99, (batch, k)), before=2, gap=3),
        "num_draft_tokens": in_buffer(counts, gap=1),
        "match_len": in_buffer(rng.integers(0, 17, batch), gap=1),
        "draft_costs": in_buffer(rng.integers(0, max_cost, (batch, k)), gap=3, dtype=np.uint8),
    }


def make_drafts(batch: int, k: int) -> dict[str, Array]:
    return {
        "draft_token_ids": in_buffer(np.full((batch, k), -1)),
        "num_draft_tokens": in_buffer([0] * batch),
        "match_len": in_buffer([0] * batch),
        "draft_costs": in_buffer(np.full((batch, k), 255), dtype=np.uint8),
    }


def draw_costs(rng: np.random.Generator) -> Array:
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
    """Runs a step of the reference without drafts, which stores the sampled tokens."""
    drafts: Any = make_drafts(len(sampled), 0)
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
    present_lengths = lengths // 4
    while (present_lengths < lengths).any():
        num_new = np.minimum(rng.integers(0, 12, len(lengths)), lengths - present_lengths)
        sampled = num_new.astype(np.int32)
        present_lengths = present_lengths + sampled
        append_tokens(store, tokens, present_lengths, sampled, slots, scopes)
    return store


def make_full_store(rng: np.random.Generator, size: tuple[int, int, int], visibility: int) -> Array:
    """Returns a store in which all slots are used, with one or two scopes. More tokens were
    appended than fit into the store."""
    num_slots, num_blocks, _ = size
    capacity = 100 + num_blocks * 256 // num_slots
    store = make_store(*size, visibility)
    rows = text_rows(rng, num_slots, capacity, 30)
    lengths = np.array([capacity, 40, capacity // 3][:num_slots], np.int32)
    scopes = np.arange(num_slots) // 2
    return run_steps(rng, store, rows, lengths, scopes=scopes)


def randomize_counts(rng: np.random.Generator, store: Array) -> Array:
    """Returns a copy in which the entries' counts are at limits of their ranges."""
    copy = copy_store(store)
    sizes = (int(store[word]) for word in (NUM_SLOTS, NUM_BLOCKS, LINE_BITS))
    begin, end = _C.store_parts(*sizes)["lines"]
    states = copy[begin:end:2]
    counts = rng.choice([0, 1, 2, 3, 4, 5, 8, 9, 14, 15], (2, len(states)))
    states[:] = states & ~0xFF | counts[0] << 4 | counts[1]
    return copy


def make_invalid_stores(valid_store: Array) -> Iterator[tuple[str, Array]]:
    """Yields tensors that are not stores, with labels. Operators must not write to such tensors."""
    yield "empty", np.zeros(0, np.int32)
    yield "zeros", np.zeros(5000, np.int32)
    yield "ones", np.full(5000, -1, np.int32)
    yield "short-header", valid_store[:63].copy()
    yield "header-alone", valid_store[:64].copy()
    yield "one-word-short", valid_store[:-1].copy()
    for name, words in (
        ("NUM_SLOTS", (0, -1, 2**31 - 1, int(valid_store[NUM_BLOCKS]) // 4 + 1)),
        ("NUM_BLOCKS", (0, -1, 3, 2**31 - 1)),
        ("LINE_BITS", (0, -1, 25, 31, 32, 64)),
    ):
        for word in words:
            yield f"{name}-{word}", copy_store(valid_store, **{name: word})


def corrupt_store(rng: np.random.Generator, valid_store: Array) -> Iterator[Array]:
    """Yields stores with a valid header and random words after it. A kernel must not access
    memory outside the tensor."""
    for share in (0.001, 0.05, 1.0):
        store = in_buffer(valid_store, before=1, gap=3)
        is_replaced = rng.random(store.size) < share
        is_replaced[:NEXT_SERIAL] = is_replaced[BUSY] = False
        store[is_replaced] = rng.integers(-(2**31), 2**31, int(is_replaced.sum()))
        yield store
        yield copy_store(store, NEXT_SERIAL=int(valid_store[NEXT_SERIAL]), VISIBILITY=FINISH)


NAMES = [name for name, _ in arguments_of("ngram_store_step_")]
EQUAL_COSTS = np.full((16, 56), 10, np.uint8)
SCOPES = [0, -1, 2**63 - 1, -(2**63), 1, 2**32, 2**32 + 1]


def make_call(
    tokens: Array,
    lengths: Array,
    sampled: Array,
    store: Array,
    drafts: dict[str, Array],
    **more: Any,
) -> Args:
    """Returns a call of ``ngram_store_step_`` without optional tensors and limits, and with
    equal costs. ``more`` replaces arguments."""
    values = dict.fromkeys(NAMES)
    store = in_buffer(store, before=1, gap=3)  # a copy, because later steps change the store
    values |= {"token_ids": tokens, "num_tokens": lengths, "num_sampled": sampled, "store": store}
    values |= {"max_len": UNLIMITED, "costs": EQUAL_COSTS, "cost_limit": 75, "fill": False}
    values |= {**drafts, **more}
    return tuple(values[name] for name in NAMES)


def _make_step_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(text_rows(rng, 5, 40, 9), before=3, gap=5)
    lengths = in_buffer([40, 30, 17, 33, 21], gap=1)
    ordinary = {
        "row_indices": in_buffer([4, 0, 3], gap=2, dtype=np.int64),
        "slot_indices": in_buffer([6, 1, 3], gap=1),
        "scopes": in_buffer([0, 0, 0], gap=1, dtype=np.int64),
    }
    store = run_steps(rng, make_store(7, 28, 4), tokens, lengths - 9)
    sampled = in_buffer([3, 1, 2], gap=1)
    drafts = draw_drafts(rng, 3, 4, 60)
    yield Sample("ordinary", make_call(tokens, lengths, sampled, store, drafts, **ordinary))
    yield from _make_draft_samples(rng)
    yield from _make_length_samples(rng)
    yield from _make_slot_samples(rng)
    yield from _make_hostile_samples(rng)
    yield from _make_serial_samples(rng)
    yield from _make_store_samples(rng)


def _make_draft_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls that test which draft is used, with different k, limits, row lengths and
    costs of the index's draft."""
    for visibility, alphabet in ((LIVE, 2), (LIVE, 40), (FINISH, 12)):
        tokens = in_buffer(text_rows(rng, 8, 400, alphabet), gap=2)
        lengths = in_buffer([400, 333, 257, 256, 255, 100, 17, 16])
        scopes = in_buffer([0, 0, 0, 0, 1, 1, 0, 1])
        store = run_steps(
            rng, make_store(4, 24, 9, visibility), tokens[:4], lengths[:4], scopes=scopes[:4]
        )
        # The rows end at random positions. The store contains the first four rows.
        lengths = in_buffer(rng.integers(1, 400, 8))
        sampled, slots = in_buffer(rng.integers(0, 4, 8)), in_buffer([-1] * 7 + [2])
        for k, limit in ((0, 40), *product((1, 8), (0, 40)), *product((8, 64), (75, 2**31 - 1))):
            for costs, max_cost in (
                ({"costs": EQUAL_COSTS}, 11),
                ({"costs": draw_costs(rng)}, 60),
                ({"costs": draw_costs(rng) * 6}, 256),
                (make_random_logits(rng, 56), 100),
            ):
                more = {**costs, "cost_limit": limit, "scopes": scopes, "slot_indices": slots}
                drafts = draw_drafts(rng, 8, k, max_cost)
                if max_cost == 11:  # equal promises
                    drafts["draft_costs"][...] = 10
                    drafts["draft_costs"][:, 7:8] = rng.integers(9, 12, (8, 1))
                args = make_call(
                    tokens, lengths, sampled, store, drafts, fill=max_cost == 60, **more
                )
                yield Sample(f"choice-{visibility}-{alphabet}-{k}-{limit}-{max_cost}", args)
        for i in range(4):
            copy = randomize_counts(rng, store)
            more = {"costs": draw_costs(rng), "slot_indices": in_buffer([-1] * 6 + [2, 0])}
            args = make_call(tokens, lengths, in_buffer([9] * 8), copy, make_drafts(8, 8), **more)
            yield Sample(f"recounted-{visibility}-{alphabet}-{i}", args)
        for max_len in (-(2**63), -1, 0, 99, 100, 101, 103, 108):
            all_100 = in_buffer([100] * 8)
            more = {"max_len": max_len, "slot_indices": slots, "fill": True}
            args = make_call(tokens, all_100, sampled, store, make_drafts(8, 8), **more)
            yield Sample(f"max-len-{visibility}-{alphabet}-{max_len}", args)


def _make_length_samples(rng: np.random.Generator) -> Iterator[Sample]:
    limits = [0, 1, 2, 15, 16, 17, 18, 255, 256, 257, 272, 496, 497]
    tokens = in_buffer(text_rows(rng, len(limits), 500, 30), gap=1)
    for visibility in (LIVE, FINISH):
        for num_sampled in (1, 2, 2**31 - 1):  # the last number exceeds the row's length
            store = make_store(len(limits), 64, 5, visibility)
            sampled = in_buffer([num_sampled] * len(limits))
            lengths = in_buffer(limits)
            args = make_call(tokens, lengths, sampled, store, make_drafts(len(limits), 3))
            yield Sample(f"first-{visibility}-{num_sampled}", args)
            append_tokens(store, tokens, lengths, sampled)
            for num_added in (0, 1, 17):
                longer = in_buffer(np.minimum(lengths + num_added, 500))
                args = make_call(
                    tokens, longer, in_buffer([1] * len(limits)), store, make_drafts(13, 3)
                )
                yield Sample(f"next-{visibility}-{num_sampled}-{num_added}", args)
    # Long prompts: a call inserts at most 4096 earlier tokens, of the first requests.
    tokens = in_buffer(draw_rows(rng, 3, 4300, 90))
    for visibility, lengths in (
        (FINISH, [4200, 4200, 10]),
        (LIVE, [4105, 30, 30]),
        (FINISH, [2000, 2100, 4300]),
        (FINISH, [4, 4300, 10]),  # the first request uses none of the limit
    ):
        store = make_store(3, 60, 6, visibility)
        append_tokens(store, tokens, in_buffer([3, 3, 3]), in_buffer([2, 3, 1]))
        args = make_call(tokens, in_buffer(lengths), in_buffer([2, 1, 3]), store, make_drafts(3, 2))
        yield Sample(f"backlog-{visibility}-{lengths}", args)
    store = make_store(3, 60, 6, FINISH)  # sampled tokens do not count as backlog
    args = make_call(tokens, in_buffer([4300] * 3), in_buffer([4200] * 3), store, make_drafts(3, 2))
    yield Sample("all-sampled", args)


def _make_slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls in which a slot belongs to the row, to another row, or to a changed row."""
    tokens = in_buffer(text_rows(rng, 4, 300, 25), gap=1)
    lengths = np.array([300, 270, 40, 17], np.int32)
    sampled = in_buffer([2, 1, 2, 1])
    for visibility in (LIVE, FINISH):
        store = run_steps(rng, make_store(4, 16, 4, visibility), tokens, lengths - 4)
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
            args = make_call(
                tokens, in_buffer(lengths), sampled, store, make_drafts(4, 5), **change
            )
            yield Sample(f"{label}-{visibility}", args)
        for distance in (1, 15, 16, 17):  # from the changed token to the end of the stored text
            changed_tokens = in_buffer(tokens, gap=1)
            changed_tokens[np.arange(4), np.maximum(lengths - 4 - distance, 0)] = 77
            args = make_call(changed_tokens, in_buffer(lengths), sampled, store, make_drafts(4, 5))
            yield Sample(f"rewritten-{distance}-{visibility}", args)
        for dtype in (np.int32, np.int64):
            ids = [s for s in SCOPES if abs(s) < 2**31 or dtype is np.int64]
            rows = in_buffer(np.tile(tokens[:1], (len(ids), 1)))
            scopes = in_buffer(ids, dtype=dtype)
            ends = in_buffer(np.arange(40, 40 + len(ids)))
            store = run_steps(rng, make_store(7, 28, 4, visibility), rows, ends - 2, scopes=scopes)
            for shift in range(2):
                more = {"scopes": in_buffer(np.roll(ids, shift), dtype=dtype)}
                args = make_call(
                    rows, ends, in_buffer([2] * len(ids)), store, make_drafts(len(ids), 5), **more
                )
                yield Sample(f"scopes-{shift}-{visibility}", args)


def _make_hostile_samples(rng: np.random.Generator) -> Iterator[Sample]:
    store = make_full_store(rng, (2, 8, 4), LIVE)
    num_rows = len(HOSTILE_INT32)
    tokens = in_buffer(text_rows(rng, num_rows, 40, 6), gap=1)
    limits, lengths = in_buffer(HOSTILE_INT32), in_buffer([30] * num_rows)
    ones, drafts = in_buffer([1] * num_rows), make_drafts(num_rows, 4)
    yield Sample("hostile-lengths", make_call(tokens, limits, ones, store, drafts))
    yield Sample("hostile-sampled", make_call(tokens, lengths, limits, store, drafts))
    hostile_rows = in_buffer(rng.choice(HOSTILE_INT32, (num_rows, 40)), gap=1)
    source = run_steps(rng, make_store(8, 32, 4), hostile_rows, lengths)
    logits = make_random_logits(rng, 56)
    yield Sample("hostile-logits", make_call(hostile_rows, lengths, ones, source, drafts, **logits))
    args = make_call(hostile_rows, lengths, ones, source, drafts, fill=True)
    yield Sample("hostile-tokens", args)
    yield Sample(
        "hostile-drafts",
        make_call(hostile_rows, lengths, ones, source, draw_drafts(rng, num_rows, 4, 256)),
    )
    large_lengths = in_buffer([41, 40, 39, 40, 41, 0, 1, 40])
    yield Sample("longer-than-rows", make_call(tokens, large_lengths, ones, store, drafts))
    for dtype, values in HOSTILE_INDICES:
        for name in ("row_indices", "slot_indices", "scopes"):
            batch = len(values)
            rows = {"row_indices": in_buffer(np.arange(batch) % num_rows)}
            more = {**rows, name: in_buffer(values, dtype=dtype)}
            args = make_call(
                tokens, lengths, in_buffer([1] * batch), store, make_drafts(batch, 4), **more
            )
            yield Sample(f"hostile-{name}-{dtype.__name__}", args)
    for rows, capacity, batch, k in ((0, 0, 0, 0), (4, 5, 2, 3), (3, 0, 3, 3), (1, 1, 1, 1)):
        no_tokens, ends = in_buffer(np.zeros((rows, capacity))), in_buffer([capacity] * rows)
        args = make_call(no_tokens, ends, in_buffer([1] * batch), store, make_drafts(batch, k))
        yield Sample(f"empty-{rows}x{capacity}-{batch}", args)


def _make_serial_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls in which blocks are reused, or in which the serial numbers end."""
    tokens = in_buffer(text_rows(rng, 3, 1400, 60), gap=1)
    lengths = in_buffer([1000, 600, 100])
    for visibility in (LIVE, FINISH):
        for num_left in range(4):
            begin = END_OF_SERIALS - num_left
            store = copy_store(make_store(3, 12, 4, visibility), NEXT_SERIAL=begin)
            args = make_call(tokens, lengths, in_buffer([300] * 3), store, make_drafts(3, 2))
            yield Sample(f"renumber-{visibility}-{num_left}", args)
            append_tokens(store, tokens, lengths - 300, lengths - 300)
            args = make_call(tokens, lengths, in_buffer([290] * 3), store, make_drafts(3, 2))
            yield Sample(f"renumbered-{visibility}-{num_left}", args)
        store = make_store(3, 12, 4, visibility)
        append_tokens(store, tokens, lengths, in_buffer([30, 20, 10]))
        for offset in range(1, 4):  # slot 0 continues until the blocks of the others are reused
            append_tokens(store, tokens[:1] + offset, in_buffer([1100]), in_buffer([1100]))
            longer = in_buffer(lengths + 5)
            args = make_call(tokens, longer, in_buffer([5] * 3), store, make_drafts(3, 2))
            yield Sample(f"stalled-{visibility}-{offset}", args)


def _make_store_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for visibility in (LIVE, FINISH):
        for size in SMALL_STORES:
            num_slots = size[0]
            store = make_full_store(rng, size, visibility)
            tokens = in_buffer(text_rows(rng, num_slots, 300, 20), gap=1)
            lengths = in_buffer([300, 40, 257][:num_slots])
            sampled = in_buffer([60] * num_slots)
            drafts = make_drafts(num_slots, 6)
            yield Sample(f"full-{size}", make_call(tokens, lengths, sampled, store, drafts))
        batch = tokens, lengths, sampled
        scopes = in_buffer([1, 0, 2])
        yield Sample("other-scopes", make_call(*batch, store, drafts, scopes=scopes))
        yield Sample("busy", make_call(*batch, copy_store(store, BUSY=1), drafts))
        no_requests = {"row_indices": in_buffer([]), "num_sampled": in_buffer([])}
        args = make_call(*batch, copy_store(store, BUSY=1), make_drafts(0, 6), **no_requests)
        yield Sample("busy-without-requests", args)
        copy = copy_store(store)
        copy[STATISTICS : STATISTICS + 9] = -1
        yield Sample("statistics-wrap", make_call(*batch, copy, drafts))
        copy = copy_store(copy, BUSY=1)
        yield Sample("refusals-wrap", make_call(*batch, copy, drafts))
        for name, words in make_invalid_stores(store):
            yield Sample(f"no-store-{name}", make_call(*batch, words, draw_drafts(rng, 3, 6, 60)))
        for words in corrupt_store(rng, store):
            yield Sample("random", make_call(*batch, words, drafts), checks_results=False)


def _make_step_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, k in ((12, 50, 4), (17, 61, 6), (20, 83, 9)):
        tokens = draw_rows(rng, rows, capacity, 3)
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 3, dtype=np.int32)
        store = run_steps(rng, make_store(rows, 4 * rows, 3), tokens, lengths - 2)
        more = {"row_indices": indices, "slot_indices": indices.copy(), "scopes": indices % 2}
        sampled = np.full(rows - 3, 2, np.int32)
        drafts = make_drafts(rows - 3, k)
        args = make_call(tokens, lengths, sampled, store, drafts, cost_limit=k, **more)
        yield contiguous(args)


def _make_width_65(array: Array) -> Array:
    """Returns a tensor of the dtype of ``array``, which is wider than the maximum of 64."""
    return np.zeros((3, 65), array.dtype)


NGRAM_STORE_STEP = OpSpec(
    name="ngram_store_step_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_step_,
    make_samples=_make_step_samples,
    bad_calls=(
        *make_bad_logits_calls(56),
        BadCall({"draft_costs": _make_width_65}, r"\[3, 4\], got .*\[3, 65\]"),
        BadCall({"draft_token_ids": _make_width_65}, "0 to 64, got 65", "draft_token_ids width"),
        BadCall({"costs": EQUAL_COSTS[:, :55]}, r"\[16, 56\], got .*\[16, 55\]"),
        BadCall({"costs": np.zeros((16, 99), np.uint8)[:, :56]}, ""),
    ),
    sizes=tuple(_make_step_sizes()),
)


SERIAL, FILL, PREVIOUS = 0, 1, 3
"""Indices of the words of a block's head."""


def make_store_with_open_requests(lengths: list[int], visibility: int, **words: int) -> Array:
    """Returns a store with an open request for each length. With FINISH, no token is inserted
    yet; the first token of each request is never inserted."""
    rng = np.random.default_rng(5)
    store = copy_store(make_store(len(lengths), 4 * len(lengths) + 1, 3, visibility), **words)
    tokens = text_rows(rng, len(lengths), max(lengths), 20)
    append_tokens(store, tokens, np.array(lengths, np.int32), np.array(lengths, np.int32) - 1)
    return store


def _make_finish_samples(rng: np.random.Generator) -> Iterator[Sample]:
    store = make_store_with_open_requests([60, 33, 17, 2], FINISH)
    yield Sample("ordinary", (store, in_buffer([3, 0, 1], gap=1)))
    for visibility in (LIVE, FINISH):
        for size, order in zip(SMALL_STORES, ([0], [1, 0], [0, 1, 2]), strict=True):
            store = make_full_store(rng, size, visibility)
            yield Sample(f"full-{visibility}-{size}", (store, in_buffer(order)))
        for dtype, hostile in HOSTILE_INDICES:
            yield Sample("hostile-slots", (store, in_buffer(hostile, dtype=dtype)))
        yield Sample("twice", (store, in_buffer([2, 2, 1, 2])))
        yield Sample("none", (store, in_buffer([])))
        yield Sample("busy", (copy_store(store, BUSY=1), in_buffer([1, 2])))
        yield Sample("busy-without-slots", (copy_store(store, BUSY=1), in_buffer([])))
        for name, words in make_invalid_stores(store):
            yield Sample(f"no-store-{name}", (words, in_buffer(range(3))))
        for words in corrupt_store(rng, store):
            yield Sample("random", (words, in_buffer(range(3))), checks_results=False)
    for fill in (1, 2, 15, 16, 17, 255, 256, 257, 496, 497, 1200):
        store = make_store_with_open_requests([fill + 1, 2], FINISH)
        yield Sample(f"fill-{fill}", (store, in_buffer([1, 0])))
    yield from _make_broken_chain_samples()


def _make_broken_chain_samples() -> Iterator[Sample]:
    """Yields requests of three blocks, one of which was replaced or has another predecessor."""
    slots = in_buffer([0])
    for serial in (1, 2, 3):
        for field, values in ((SERIAL, [0, serial + 5]), (PREVIOUS, range(6)), (FILL, [3, 16])):
            for value in values:
                store = make_store_with_open_requests([600], FINISH)
                get_block_head(store, serial)[field] = value
                yield Sample(f"block-{serial}-{field}-{value}", (store, slots))
    rng = np.random.default_rng(6)
    tokens = text_rows(rng, 2, 1500, 20)
    store = make_store(2, 9, 3, FINISH)
    append_tokens(store, tokens, np.array([50, 50], np.int32), np.array([40, 40], np.int32))
    run_steps(rng, store, tokens[:1], np.array([1500], np.int32))
    run_steps(rng, store, tokens[:1] + 1, np.array([1500], np.int32))
    yield Sample("stalled", (store, in_buffer([1, 0])))


NGRAM_STORE_FINISH = OpSpec(
    name="ngram_store_finish_",
    no_kernel=NO_STORE_ON_DEVICES,
    reference=reference.ngram_store_finish_,
    make_samples=_make_finish_samples,
    bad_calls=(),
    sizes=tuple((make_store(n, 4 * n, 2, FINISH), np.arange(n, dtype=np.int32)) for n in (3, 5, 8)),
)
