"""Stores to call the store operators with: empty, full of what was said before, and of nonsense.

What was said before was entered by the reference: a kernel's fault shows in its own call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import reference
from ngram_npu import _C

from .spec import Array, in_buffer

_HOST_ALONE = "a store is in the host's memory: tokens are entered one after the other"
NO_STORE_ON_DEVICES = {"cuda": _HOST_ALONE, "npu": _HOST_ALONE}

LIVE, FINISH = 0, 1
UNLIMITED = 2**63 - 1
END_OF_SERIALS = 2**24

# The words of csrc/core/ngram_store.h that samples set.
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
