"""The OpSpecs of the store: empty, full and damaged stores, and the last block numbers.

The reference fills the stores, so that a fault of a kernel shows in the kernel's own call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from ops import reference
from ops.reference.store import (
    BLOCK,
    END_OF_BLOCK_NUMBERS,
    FILL,
    NEXT,
    NUMBER,
    PREVIOUS,
    SCOPE_HIGH,
    SCOPE_LOW,
)
from ops.schema import arguments_of

from .inputs import (
    ANY_TOKEN,
    HOSTILE_INDICES,
    HOSTILE_INT32,
    UNLIMITED,
    make_workspace,
    replace_each,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, contiguous, in_buffer

STORE = ("slots", "text", "blocks", "table", "allocator")
CONTENTS = ("text", "blocks", "table")

SCOPES = [0, -1, 2**63 - 1, -(2**63), 1, 2**32, 2**32 + 1]
"""Scopes that differ in few bits; -1 is the private one."""

Store = dict[str, Array]


def text_rows(rng: np.random.Generator, rows: int, capacity: int, alphabet: int) -> Array:
    """Returns rows that repeat the same phrase, with a few random tokens. Each row begins at a
    random position of the phrase."""
    phrase = rng.integers(0, alphabet, 1 + capacity // 3)
    starts = rng.integers(0, len(phrase), (rows, 1))
    tokens = phrase[(starts + np.arange(capacity)) % len(phrase)]
    is_random = rng.random(tokens.shape) < 0.04
    tokens[is_random] = rng.integers(0, alphabet, int(is_random.sum()))
    return tokens.astype(np.int32)


def new_store(num_blocks: int, columns: int, num_slots: int) -> Store:
    shapes = (num_slots, 8), (num_blocks, BLOCK), (num_blocks, 8), (6, 2 * columns), (2,)
    tensors = (np.zeros(shape, np.int32) for shape in shapes)
    return copy_store(dict(zip(STORE, tensors, strict=True)))


def copy_store(store: Store) -> Store:
    # in_buffer surrounds each row with `before` and `gap` items that no operator may access.
    return {name: in_buffer(array, before=1, gap=3) for name, array in store.items()}


def renumbered(store: Store, by: int) -> Store:
    """Returns the store as if `by` more blocks had been assigned before. `by` must be a multiple of
    the number of blocks."""
    moved = copy_store(store)
    for column in (NUMBER, PREVIOUS, NEXT):
        numbers = moved["blocks"][:, column]
        numbers[numbers > 0] += by
    moved["slots"][moved["slots"][:, 0] > 0, 0] += by
    moved["table"][moved["table"] > 0] += by * BLOCK
    moved["allocator"] += by
    return moved


def run_steps(
    rng: np.random.Generator,
    store: Store,
    tokens: Array,
    lengths: Array,
    *,
    hold_back: bool = False,
    **rows: Array | None,
) -> Store:
    """Returns the store after steps in which the rows grew from a tenth of these lengths. With
    `hold_back`, the newest tokens of a request are stored only in its next step."""
    at = np.asarray(lengths) // 10
    while (at < lengths).any():
        sampled = np.minimum(rng.integers(0, 60, len(lengths)), lengths - at).astype(np.int32)
        at = (at + sampled).astype(np.int32)
        reference.store_append_(
            tokens, at, sampled, **store, **rows, max_new=300, hold_back=hold_back
        )
    return store


APPEND = [name for name, _ in arguments_of("store_append_")]
PROPOSE = [name for name, _ in arguments_of("store_propose_")]


def append_call(
    store: Store, tokens: Array, lengths: Any, sampled: Any, **more: Any
) -> dict[str, Any]:
    """Returns the arguments by name, of a call without optional tensors and limits."""
    rows = {
        "token_ids": tokens,
        "num_tokens": in_buffer(lengths, gap=1),
        "num_sampled": in_buffer(sampled, before=1),
    }
    return {
        **dict.fromkeys(APPEND), **rows, **copy_store(store), "max_new": 300, "hold_back": False,
        **more,
    }  # fmt: skip


def propose_call(
    store: Store, tokens: Array, lengths: Any, k: int, own_match: Any = 0, **more: Any
) -> dict[str, Any]:
    """Returns the arguments by name. Each request's own draft has a match of `own_match` tokens."""
    batch = len(lengths)
    call = append_call(store, tokens, lengths, [1] * batch)
    drafts = {
        "draft_token_ids": in_buffer(np.full((batch, k), 77), before=2, gap=3),
        "num_draft_tokens": in_buffer([k // 2] * batch, gap=1),
        "match_len": in_buffer(np.broadcast_to(own_match, batch), gap=1),
        "agreement": in_buffer([77] * batch, gap=1),
        "max_len": UNLIMITED,
        "vocab_size": ANY_TOKEN,
        "fill": False,
    }
    values = {**call, **drafts, **more}
    return {name: values[name] for name in PROPOSE}


def _sample(label: str, call: dict[str, Any], checks_results: bool = True) -> Sample:
    return Sample(label, tuple(call.values()), checks_results)


def small_stores(rng: np.random.Generator) -> Iterator[tuple[str, Store, Array]]:
    """Yields small stores, after steps of four requests in which every block was replaced several
    times, and the requests' tokens. A table of one or two columns makes all n-grams of a length
    collide."""
    tokens = in_buffer(text_rows(rng, 4, 1500, 30), gap=1)
    for num_blocks, columns in ((2, 1), (3, 2), (5, 64), (8, 4096), (40, 4096)):
        store = new_store(num_blocks, columns, 4)
        lengths = np.array([1500, 700, 600, 520], np.int32)
        scopes = in_buffer([0, 0, 1, 1])
        yield (
            f"{num_blocks}-{columns}",
            run_steps(rng, store, tokens, lengths, scopes=scopes),
            tokens,
        )


def damaged(rng: np.random.Generator, store: Store) -> Iterator[Store]:
    """Stores with random words, and stores with a limit of its range in one column of `blocks`."""
    for share, small in product((0.01, 0.2, 1.0), (False, True)):
        copy = copy_store(store)
        for name in CONTENTS:
            hit = rng.random(copy[name].shape) < share
            near = rng.integers(0, 20, hit.sum()) * BLOCK
            far = rng.integers(-(2**31), 2**31, hit.sum())
            copy[name][hit] = near if small else far
        yield copy
    for column, word in product(
        (NUMBER, PREVIOUS, NEXT, FILL, SCOPE_HIGH), (*HOSTILE_INT32, 255, 256, 257)
    ):
        copy = copy_store(store)
        copy["blocks"][:, column] = word
        yield copy


def _append_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(text_rows(rng, 5, 60, 9), before=3, gap=5)
    ordinary = {
        "row_indices": in_buffer([4, 0, 3], gap=2, dtype=np.int64),
        "slot_indices": in_buffer([5, 1, 3], gap=1),
        "scopes": in_buffer([0, 7, 0], gap=1, dtype=np.int64),
    }
    lengths = np.array([60, 50, 37, 53, 41], np.int32)
    of_rows = {"slot_indices": in_buffer([1, 0, 2, 3, 5]), "scopes": in_buffer([7, 0, 0, 0, 0])}
    store = run_steps(rng, new_store(11, 64, 6), tokens, lengths - 9, **of_rows)
    call = append_call(store, tokens, lengths, [3, 1, 2], **ordinary)
    yield _sample("ordinary", call)
    workspace = {"workspace": make_workspace(3 * 8)}  # 8 words per request
    yield _sample("held back", call | workspace | {"hold_back": True})
    yield from _size_samples(rng)
    yield from _identity_samples(rng)
    yield from _replacement_samples(rng)
    yield from _hostile_append_samples(rng, call)


def _size_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Batches around the numbers of threads, and texts around the sizes of blocks and n-grams."""
    for batch in (0, 1, 2, 127, 128, 255, 256, 257, 600):
        tokens = in_buffer(text_rows(rng, batch, 40, 20), gap=1)
        lengths = rng.integers(0, 42, batch).astype(np.int32)
        sampled = rng.integers(-1, 9, batch).astype(np.int32)
        lengths[:1], sampled[:1] = 38, 5
        store = new_store(256, 512, batch + 1)
        reference.store_append_(
            tokens, np.minimum(lengths, 30), sampled, **store, max_new=40, hold_back=False
        )
        yield _sample(f"batch-{batch}", append_call(store, tokens, lengths, sampled))
        empty = new_store(256, 512, batch + 1)
        yield _sample(f"first-{batch}", append_call(empty, tokens, lengths, sampled))
    edges = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 768, 769)
    tokens = in_buffer(rng.integers(0, 99, (len(edges), 1600)))
    for first in (0, 1, 100, 255, 256, 257):
        store = new_store(200, 1024, len(edges))
        begun = [first + 8] * len(edges)
        reference.store_append_(
            tokens, np.array(begun, np.int32), np.array(begun, np.int32), **store, max_new=999,
            hold_back=False,
        )  # fmt: skip
        lengths = np.array(edges) + first + 8
        for hold_back in (False, True):
            more = {"max_new": 2**31 - 1, "hold_back": hold_back}
            yield _sample(f"edges-{first}", append_call(store, tokens, lengths, edges, **more))
            more["max_new"] = 256
            yield _sample(f"limited-{first}", append_call(store, tokens, lengths, edges, **more))
            # The store missed most of the new tokens.
            missed = append_call(store, tokens, lengths, [3] * len(edges), **more)
            yield _sample(f"missed-{first}", missed)


def _identity_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows that do or do not continue the request of their slot: other slots, scopes, tokens."""
    tokens = in_buffer(text_rows(rng, 4, 700, 25), gap=1)
    lengths = np.array([300, 270, 40, 17], np.int32)
    scopes = in_buffer([0, 0, 5, 5])
    stores = [
        run_steps(rng, new_store(11, 256, 5), tokens, lengths, scopes=scopes, hold_back=hold_back)
        for hold_back in (False, True)
    ]
    store, grown = stores[0], lengths + 4
    for label, change in (
        ("as-they-were", {}),
        ("grown-elsewhere", {"num_sampled": in_buffer([3, 1, 5, 2])}),
        ("swapped-rows", {"slot_indices": in_buffer([1, 0, 3, 2])}),
        ("moved-rows", {"slot_indices": in_buffer([4, 2, 1, 0])}),
        ("other-scopes", {"scopes": in_buffer([0, 5, 0, 2**32 + 5], dtype=np.int64)}),
        ("private", {"scopes": in_buffer([0, -1, 5, -1])}),
        ("nothing-sampled", {"num_sampled": in_buffer([0, 0, -1, 1])}),
        ("shorter", {"num_tokens": in_buffer([200, 265, 36, 12])}),
        ("equal", {"num_tokens": in_buffer(lengths)}),
        ("longer", {"num_tokens": in_buffer([600, 571, 570, 318])}),
        ("no-tokens", {"num_tokens": in_buffer([0, 701, -1, 700])}),
        ("no-slots", {"slots": in_buffer(np.zeros((0, 8)))}),
        ("one-slot", {"slots": in_buffer(np.zeros((1, 8)))}),
    ):
        for before, hold_back in product(stores, (False, True)):
            more = {"scopes": scopes, "hold_back": hold_back, **change}
            call = append_call(before, tokens, grown, [4, 4, 4, 4]) | more
            yield _sample(f"{label}-{hold_back}", call)
    yield from _returned_samples(rng)
    for label, change in (
        ("one-slot-twice", {"slot_indices": in_buffer([1, 0, 1, 1], dtype=np.int64)}),
        ("one-row-twice", {"row_indices": in_buffer([1, 1, 1, 0])}),
    ):
        call = append_call(store, tokens, grown, [2, 1, 4, 4], **change)
        yield _sample(label, call, checks_results=False)
    for back in (1, 15, 16, 17):  # tokens before the end of the stored text
        rewritten = in_buffer(tokens, gap=1)
        rewritten[np.arange(4), np.maximum(lengths - back, 0)] = 77
        yield _sample(
            f"rewritten-{back}", append_call(store, rewritten, grown, [4] * 4, scopes=scopes)
        )
    for dtype in (np.int32, np.int64):
        ids = [s for s in SCOPES if abs(s) < 2**31 or dtype is np.int64]
        rows = in_buffer(np.tile(tokens[:1], (len(ids), 1)))
        ends = np.arange(40, 40 + len(ids), dtype=np.int32)
        scopes = in_buffer(ids, dtype=dtype)
        store = run_steps(rng, new_store(16, 256, 7), rows, ends, scopes=scopes)
        for turned in range(2):
            more = {"scopes": in_buffer(np.roll(ids, turned), dtype=dtype)}
            yield _sample(
                f"scopes-{turned}", append_call(store, rows, ends + 2, [2] * len(ids), **more)
            )


def _returned_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows that were in other slots for some steps, and returned."""
    tokens = in_buffer(text_rows(rng, 3, 200, 25), gap=1)
    for hold_back, num_away in product((False, True), (0, 1, 2, 5)):
        store = new_store(11, 256, 6)
        lengths = np.array([50, 40, 30], np.int32)
        sampled = np.array([2, 1, 3], np.int32)
        for step in range(3 + num_away):
            slots = in_buffer([0, 1, 2] if step < 3 else [3, 0, 5])
            reference.store_append_(
                tokens, lengths, sampled, **store, slot_indices=slots, max_new=300,
                hold_back=hold_back,
            )  # fmt: skip
            lengths = lengths + sampled
        call = append_call(store, tokens, lengths, sampled, hold_back=hold_back)
        yield _sample(f"returned-{num_away}", call | {"slot_indices": in_buffer([0, 1, 2])})


def _replacement_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Calls that replace blocks. Some need more blocks than a call may replace. Some replace blocks
    of requests of the same call. In some, no block numbers are left."""
    for label, store, tokens in small_stores(rng):
        ends = np.minimum(np.array([1500, 700, 600, 520]), 1490)
        for grown, scopes in product(
            ((1, 1, 1, 1), (10, 0, 0, 9), (256, 1, 300, 1)), ((0, 0, 1, 1), (1, 1, 0, 0))
        ):
            lengths = np.minimum(ends + np.array(grown), 1500)
            more = {"scopes": in_buffer(scopes)}
            yield _sample(
                f"full-{label}", append_call(store, tokens, lengths, np.maximum(grown, 1), **more)
            )
            fresh = {"slots": in_buffer(np.zeros((4, 8)))}
            yield _sample(
                f"fresh-{label}", append_call(store, tokens, lengths, np.maximum(grown, 1)) | fresh
            )
        num_blocks = len(store["text"])
        # The largest multiple of num_blocks that keeps the next block number below the end.
        max_shift = (END_OF_BLOCK_NUMBERS - int(store["allocator"][0])) // num_blocks * num_blocks
        for short in (0, 1, 2):
            late = renumbered(store, max_shift - short * num_blocks)
            call = append_call(late, tokens, [1500, 760, 900, 520], [60, 60, 270, 1])
            yield _sample(f"last-numbers-{label}-{short}", call)
        for number in (*HOSTILE_INT32, *(END_OF_BLOCK_NUMBERS + i for i in (-1, 0, 1))):
            call = append_call(store, tokens, [1500, 760, 900, 520], [60, 60, 270, 1])
            yield _sample(
                f"allocator-{label}-{number}", call | {"allocator": in_buffer([number, 5])}
            )


def _hostile_append_samples(rng: np.random.Generator, call: dict[str, Any]) -> Iterator[Sample]:
    for name in ("num_tokens", "num_sampled"):
        for bad in replace_each(call[name].tolist(), HOSTILE_INT32):
            yield _sample(f"hostile-{name}", call | {name: in_buffer(bad)})
    for name, dtype_values in product(("row_indices", "slot_indices", "scopes"), HOSTILE_INDICES):
        dtype, values = dtype_values
        for bad in replace_each(call[name].tolist(), values):
            distinct = name == "scopes" or len(set(bad)) == 3
            hostile = call | {name: in_buffer(bad, dtype=dtype)}
            yield _sample(f"hostile-{name}", hostile, checks_results=distinct)
    for max_new in (1, 2, 3, 2**31 - 1):
        yield _sample(f"max-new-{max_new}", call | {"max_new": max_new})
    store = {name: call[name] for name in STORE}
    for contents in damaged(rng, store):
        yield _sample("damaged", call | copy_store(contents))
    for column, word, hold_back in product(range(8), (*HOSTILE_INT32, 4, 5, 40), (False, True)):
        slots = in_buffer(store["slots"], gap=1)
        slots[1, column] = word
        yield _sample("hostile-slot", call | {"slots": slots, "hold_back": hold_back})
    tokens = in_buffer(rng.choice(HOSTILE_INT32, call["token_ids"].shape), before=1, gap=2)
    for _ in range(3):
        yield _sample("hostile-tokens", call | {"token_ids": tokens})


def _make_append_calls_for_one_graph() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, batch, num_blocks, columns, slots in ((5, 4, 9, 16, 7), (11, 10, 19, 64, 13)):
        tokens = text_rows(rng, rows, 30 + rows, 9)
        store = new_store(num_blocks, columns, slots)
        call = append_call(store, tokens, [21] * rows, [5] * batch, max_new=30 + batch)
        indices = {"row_indices": np.arange(batch), "slot_indices": np.arange(batch)}
        yield contiguous((call | indices | {"scopes": np.arange(batch)}).values())


STORE_APPEND = OpSpec(
    name="store_append_",
    reference=reference.store_append_,
    make_samples=_append_samples,
    bad_calls=(
        BadCall({"table": np.zeros((6, 12), np.int32)}, "power of two, got 12"),
        BadCall({"table": np.zeros((6, 0), np.int32)}, "power of two, got 0"),
        BadCall({"table": np.zeros((6, 1), np.int32)}, "at least 2 .* got 1"),
        BadCall({"table": np.zeros((5, 64), np.int32)}, r"\[6, 64\], got .*\[5, 64\]"),
        BadCall({"text": np.zeros((11, 255), np.int32)}, r"\[11, 256\], got .*\[11, 255\]"),
        BadCall({"blocks": np.zeros((11, 6), np.int32)}, r"\[11, 8\], got .*\[11, 6\]"),
        BadCall({"slots": np.zeros((6, 3), np.int32)}, r"\[6, 8\], got .*\[6, 3\]"),
        BadCall({"text": lambda a: a[:1], "blocks": lambda a: a[:1]}, "2 to 1048576, got 1"),
        BadCall(
            {"row_indices": None, "num_tokens": lambda a: a[:2], "token_ids": lambda a: a[:2]},
            r"batch <= 2 .*got 3",
            "num_sampled",
        ),
    ),
    sizes=tuple(_make_append_calls_for_one_graph()),
    not_randomized=frozenset({"slots", "slot_indices", "row_indices"}),  # no slot may occur twice
)


def _propose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(text_rows(rng, 5, 400, 9), before=3, gap=5)
    store = run_steps(rng, new_store(11, 256, 5), tokens, np.array([400, 390, 380, 300, 10]))
    ordinary = {
        "num_sampled": in_buffer([3, 1, 2]),
        "row_indices": in_buffer([4, 0, 3], gap=2, dtype=np.int64),
        "scopes": in_buffer([0, 0, 0], gap=1, dtype=np.int64),
    }
    call = propose_call(store, tokens, [200, 340, 370, 380, 90], 4) | {
        "draft_token_ids": in_buffer(np.full((3, 4), 77), before=1, gap=2),
        "num_draft_tokens": in_buffer([1, 2, 3]),
        "match_len": in_buffer([1, 5, 0], gap=1),
        "agreement": in_buffer([9, 8, 7], gap=2),
    }
    yield _sample("ordinary", call | ordinary)
    for batch in (0, 1, 2, 3, 65):
        rows = in_buffer(text_rows(rng, batch, 90, 12), gap=1)
        own = np.where(np.arange(batch) % 2, rng.integers(0, 17, batch), 0)
        filled = run_steps(rng, new_store(256, 1024, batch), rows, np.full(batch, 90))
        lengths = rng.integers(40, 92, batch)
        yield _sample(f"batch-{batch}", propose_call(filled, rows, lengths, 3, own))
    yield from _match_samples(rng)
    yield from make_occurrence_samples(rng)
    yield from _vocabulary_samples(rng)
    yield from _chain_samples()
    for label, small, rows in small_stores(rng):
        for scopes in ((0, 0, 1, 1), (1, 1, 0, 0), (2, 3, 2**32, -1), (-1, -1, -1, -1)):
            for _ in range(3):
                lengths = rng.integers(1, 1501, 4)
                more = {"scopes": in_buffer(scopes, dtype=np.int64)}
                yield _sample(f"small-{label}", propose_call(small, rows, lengths, 64, **more))
    yield from _hostile_propose_samples(rng, call | ordinary)


def _match_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows whose last 0 to 18 tokens are stored, own drafts of all match lengths, and limits."""
    common = np.arange(100, 130)
    tokens = np.arange(1000, 1000 + 20 * 60).reshape(20, 60)
    tokens[0, :30] = common
    for i in range(1, 20):
        tokens[i, 40 - (i - 1) : 40] = common[20 - (i - 1) : 20]
    tokens = in_buffer(tokens, gap=1)
    store = run_steps(rng, new_store(64, 1024, 1), tokens[:1], np.array([40]))
    lengths = [40] * 20
    for own in (*range(18), -1, *HOSTILE_INT32):
        yield _sample(f"own-{own}", propose_call(store, tokens, lengths, 5, own, fill=own % 2 == 0))
    for length in (0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 60, 61):
        yield _sample(f"length-{length}", propose_call(store, tokens, [length] * 20, 5))
    for k, max_len, dtype in product(
        (0, 1, 8, 64), (-(2**63), 39, 40, 41, 44), (np.int32, np.int64)
    ):
        drafts = {"draft_token_ids": in_buffer(np.full((20, k), 7), gap=1, dtype=dtype)}
        call = propose_call(store, tokens, lengths, k, max_len=max_len, fill=True) | drafts
        yield _sample(f"limit-{k}-{max_len}", call)


def add_text(store: Store, slot: int, text: Array, scope: int = 0) -> None:
    """Adds a text in a call of its own, so that older texts are second newest afterwards."""
    length = np.array([len(text)], np.int32)
    store["slots"][slot] = 0
    reference.store_append_(
        text[None], length, length, **store, slot_indices=np.array([slot]),
        scopes=np.array([scope]), max_new=2**20, hold_back=False,
    )  # fmt: skip


OCCURRENCES = ("single", "equal", "equal-for-3", "ends", "different", "no-next", "evicted")


def make_occurrence_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """A row whose last n tokens occur once or twice in the store, followed by the same text or by
    different text, with own matches of all lengths around n."""
    for kind, n, columns in product(OCCURRENCES, (1, 2, 3, 4, 5, 8, 9, 16, 17), (2, 2048)):
        store = new_store(8, columns, 1)
        common, after = rng.integers(100, 200, n), np.arange(300, 308)
        older = after.copy()
        if kind == "equal-for-3":
            older[3] = 777
        if kind == "different":
            older[0] = 777
        older = older[: {"ends": 2, "no-next": 0}.get(kind, 8)]
        if kind == "evicted":  # three full blocks after its own one leave five of the ring
            add_text(store, 0, np.concatenate([[1], common, older]))
            for first in (2000, 4000):
                add_text(store, 0, np.arange(first, first + 4 * BLOCK))
        elif kind != "single":
            add_text(store, 0, np.concatenate([[1], common, older]))
        add_text(store, 0, np.concatenate([[2], common, after]))
        rows = in_buffer(np.tile(np.concatenate([np.arange(500, 540), common]), (9, 1)))
        own = [0, -1, 1, 2, 3, n - 1, n, n + 1, 16]
        for k, fill in ((5, False), (40, True)):
            call = propose_call(store, rows, [rows.shape[1]] * 9, k, own, fill=fill)
            yield _sample(f"occurrences-{kind}-{n}-{columns}", call)
    # The second newest entry refers to a text of another scope.
    for scope, other in product((0, 7), (7, 2**32)):
        store = new_store(8, 2048, 1)
        text = np.concatenate([[1], rng.integers(100, 200, 16), np.arange(300, 308)])
        add_text(store, 0, text, other)
        position = int(store["allocator"][0] - 1) * BLOCK + 17
        add_text(store, 0, text, scope)
        is_newest = store["table"][:, 0::2] == int(store["allocator"][0] - 1) * BLOCK + 17
        store["table"][:, 1::2][is_newest] = position
        more = {"scopes": in_buffer([scope, other, 3], dtype=np.int64)}
        rows = in_buffer(np.tile(text[:17], (3, 1)))
        yield _sample("second-of-other-scope", propose_call(store, rows, [17] * 3, 5, **more))


def _vocabulary_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Invalid ids at all positions of drafts, of the texts after the second occurrences, and at the
    rows' ends."""
    after = np.arange(300, 308)
    for at, other, newest in product((0, 1, 4, 7), (0, 2, 8), (5, 2000, -3)):
        store = new_store(8, 2048, 1)
        common = np.append(rng.integers(100, 200, 7), newest)
        texts = np.stack([np.concatenate([[1], common, after])] * 2)
        texts[1, 9 + at] = rng.choice([1000, -1, 2**31 - 1])
        if other < 8:
            texts[0, 9 + other] = -5
        for text in texts:
            add_text(store, 0, text)
        rows = in_buffer(np.tile(common, (4, 1)))
        for vocab_size, fill, dtype in product(
            (-(2**63), 0, 1, 300, 304, 1000, 1001, ANY_TOKEN, 2**31, UNLIMITED),
            (False, True),
            (np.int32, np.int64),
        ):
            more = {"fill": fill, "vocab_size": vocab_size}
            drafts = {"draft_token_ids": in_buffer(np.full((4, 10), 7), gap=1, dtype=dtype)}
            call = propose_call(store, rows, [8] * 4, 10, [0, 1, 2, 8], **more) | drafts
            yield _sample(f"vocabulary-{at}-{other}-{newest}-{vocab_size}", call)


def _chain_samples() -> Iterator[Sample]:
    """Matches and drafts at the edges of blocks, and with changed words in the blocks' heads."""
    tokens = in_buffer(np.tile(np.arange(800), (20, 1)))
    store = new_store(4, 4096, 1)
    whole = np.array([760], np.int32)
    reference.store_append_(
        tokens[:1], np.array([256], np.int32), np.array([256], np.int32), **store, max_new=999,
        hold_back=False,
    )  # fmt: skip
    reference.store_append_(tokens[:1], whole, whole - 256, **store, max_new=999, hold_back=False)
    ends = [1, 2, 16, 17, 192, 193, *range(239, 242), *range(255, 259), 260, 264]
    ends += [271, 272, 273, 759, 760]
    for k in (1, 15, 16, 17, 64):
        yield _sample(f"chain-{k}", propose_call(store, tokens, ends, k))
    changes = product(
        (1, 2, 3),
        (NUMBER, PREVIOUS, NEXT, FILL, SCOPE_LOW, SCOPE_HIGH),
        (-1, 0, 1, 2, 3, 5, 200, 255),
    )
    for block, column, word in changes:
        changed = copy_store(store)
        changed["blocks"][block, column] = word
        yield _sample(f"changed-{block}-{column}-{word}", propose_call(changed, tokens, ends, 20))


def _hostile_propose_samples(rng: np.random.Generator, call: dict[str, Any]) -> Iterator[Sample]:
    for name in ("num_tokens", "num_sampled", "num_draft_tokens", "match_len", "agreement"):
        for bad in replace_each(call[name].tolist(), HOSTILE_INT32):
            yield _sample(f"hostile-{name}", call | {name: in_buffer(bad)})
    for name, (dtype, values) in product(("row_indices", "scopes"), HOSTILE_INDICES):
        for bad in replace_each(call[name].tolist(), values):
            yield _sample(f"hostile-{name}", call | {name: in_buffer(bad, dtype=dtype)})
    for contents in damaged(rng, {name: call[name] for name in CONTENTS}):
        yield _sample("damaged", call | contents)
    for word in (*HOSTILE_INT32, 255, 256, 257, 2**23 * 256 - 1):
        yield _sample(f"entry-{word}", call | {"table": in_buffer(np.full((6, 4), word))})


def _make_propose_calls_for_one_graph() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, batch, num_blocks, columns, k in ((5, 4, 9, 16, 7), (11, 10, 19, 64, 13)):
        tokens = text_rows(rng, rows, 30 + rows, 9)
        store = run_steps(rng, new_store(num_blocks, columns, rows), tokens, np.full(rows, 25))
        call = propose_call(store, tokens, [21] * batch, k)
        call |= {"num_tokens": in_buffer([21] * rows), "max_len": 100 + batch}
        call |= {"vocab_size": 5 + batch}
        yield contiguous(
            (call | {"row_indices": np.arange(batch), "scopes": np.zeros(batch, np.int64)}).values()
        )


STORE_PROPOSE = OpSpec(
    name="store_propose_",
    reference=reference.store_propose_,
    make_samples=_propose_samples,
    bad_calls=(
        BadCall({"table": np.zeros((6, 12), np.int32)}, "power of two, got 12"),
        BadCall({"agreement": np.zeros(2, np.int32)}, "size 3, got size 2"),
        BadCall({"table": np.zeros((7, 64), np.int32)}, r"\[6, 64\], got .*\[7, 64\]"),
        BadCall({"text": np.zeros((11, 257), np.int32)}, r"\[11, 256\], got .*\[11, 257\]"),
        BadCall({"blocks": np.zeros((10, 8), np.int32)}, r"\[11, 8\], got .*\[10, 8\]"),
        BadCall(
            {"draft_token_ids": np.zeros((3, 65), np.int32)},
            "0 to 64, got 65",
            "draft_token_ids width",
        ),
    ),
    sizes=tuple(_make_propose_calls_for_one_graph()),
)  # fmt: skip
