"""The OpSpecs of the operators with an index. The lookups have the samples of the lookups without
an index, with empty, filled and too small indexes and with random contents (``indexed_spec``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ngram_npu import _C
from ops import reference
from ops.schema import arguments_of

from . import drafting
from .inputs import (
    HOSTILE_INDICES,
    HOSTILE_INT32,
    HOSTILE_INT64,
    POLICIES,
    UNLIMITED,
    bad_logits,
    random_logits,
    random_rows,
)
from .spec import NO_INDEX_ON_DEVICES, Args, Array, BadCall, OpSpec, Sample, in_buffer


def new_index(num_slots: int, num_pages: int = 64) -> Array:
    index = np.zeros(_C.index_words(num_slots, num_pages), np.int32)
    _C.index_init(index, num_slots)
    return index


def filled_index(
    tokens: Array,
    lengths: Array,
    num_slots: int,
    min_n: int,
    max_n: int,
    policy: int,
    ladder: bool = False,
    outcomes: bool = False,
    **size: Any,
) -> Array:
    """An index of these rows, row i in slot i."""
    index = new_index(num_slots, **size)
    options = min_n, max_n, policy, ladder, outcomes
    _C.ngram_index_append_(tokens, lengths, index, None, None, *options)
    return index


NO_LADDER = {
    "ladder": False,
    "costs": None,
    "cost_limit": 40,
    "draft_costs": None,
    "token_logits": None,
}


def ladder_lookups(rng: np.random.Generator, batch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of lookups with a ladder, with a label: without costs, and with several limits."""
    for overlap in (False, True):
        lookup = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": overlap, "ladder": True}
        yield f"no-costs-{overlap}", {**lookup, "k": 6, "max_len": UNLIMITED}
        yield f"no-tokens-{overlap}", {**lookup, "k": 0}
        for limit, k in ((0, 1), (40, 8), (75, 20), (16320, 64)):
            table = rng.integers(0, 60, (16, 32)).astype(np.uint8)
            table[rng.random(table.shape) < 0.2] = 0
            out = in_buffer(rng.integers(0, 9, (batch, k)), gap=3, dtype=np.uint8)
            costs = {"costs": table, "cost_limit": limit}
            costs["draft_costs"] = None if limit == 40 else out
            yield f"limit-{limit}-{overlap}", {**lookup, **costs, "k": k}
            costs |= random_logits(rng, 32)
            yield f"logits-{limit}-{overlap}", {**lookup, **costs, "k": k}


def random_contents(rng: np.random.Generator, good: Array) -> Iterator[Array]:
    """Contents that no operator writes. A kernel must stay inside the tensor. Its drafts are
    unspecified, so such samples are not compared."""
    for share in (0.001, 0.05, 1.0):
        index = good.copy()
        hit = rng.random(index.size) < share
        hit[:64] = False  # the header stays valid
        index[hit] = rng.integers(-(2**31), 2**31, int(hit.sum()))
        yield index
    yield rng.integers(-(2**31), 2**31, 5000).astype(np.int32)
    yield np.full(5000, -1, np.int32)
    yield np.zeros(5000, np.int32)
    yield np.zeros(0, np.int32)
    yield good[:100].copy()


LADDER = {"ladder": True, "min_n": 1, "max_n": 16, "match_policy": 1}
_TABLE = np.zeros((16, 32), np.uint8)
_LOGITS = np.zeros((4096, 2), np.int8)
LADDER_BAD_CALLS = [
    BadCall(LADDER | change, message, named)
    for named, change, message in (
        ("max_n", {"max_n": 8}, "expected 16 with ladder=True, got 8"),
        ("match_policy", {"match_policy": 0}, "expected 1 with ladder=True, got 0"),
        ("costs", {"costs": _TABLE[:, :31]}, r"shape \[16, 32\], got shape"),
        ("costs", {"costs": _TABLE.astype(np.int32)}, "uint8, got int32"),
        ("costs", {"costs": np.zeros((16, 64), np.uint8)[:, :32]}, "contiguous"),
        ("cost_limit", {"costs": _TABLE, "cost_limit": -1}, "0 to .*, got -1"),
        ("draft_costs", {"draft_costs": _TABLE}, "draft_costs require costs"),
        ("draft_costs", {"costs": _TABLE, "draft_costs": _TABLE.copy()}, "shape"),
        ("token_logits", {"token_logits": _LOGITS}, "token_logits require costs"),
    )
]


def indexed_spec(
    name: str,
    scan: OpSpec,
    reference: Callable[..., tuple[Array, ...] | None],
    *,
    batch_of: Callable[[Args], int],
    missing: tuple[int, ...],
    bad_calls: tuple[BadCall, ...],
    slot_call: Callable[[np.random.Generator, Array, Array, tuple[int, bool]], Args],
) -> OpSpec:
    """The OpSpec of a lookup with an index: the calls of ``scan``, with indexes of every kind.

    Args:
        batch_of: Returns the number of requests of a call.
        missing: Numbers of tokens at the rows' ends that a filled index does not contain yet,
            repeated for all rows.
        slot_call: Returns the call of 8 requests for rows 0 to 7, from rows, lengths and a policy.
    """
    names = [argument for argument, _ in arguments_of(name)]

    def call(args: Args, index: Array, slots: Array | None = None, **ladder: Any) -> Args:
        values = dict(zip([n for n, _ in scan.arguments], args, strict=True))
        values |= {"index": index, "slot_indices": slots, **NO_LADDER, **ladder}
        return tuple(values[argument] for argument in names)

    def within_span(args: Args) -> bool:
        return bool(scan.get(args, "max_n") - scan.get(args, "min_n") < 8)

    def repeats_a_row(args: Args) -> bool:
        rows = scan.get(args, "row_indices")
        return rows is not None and len(set(rows.tolist())) < len(rows)

    def num_rows(args: Args) -> int:
        return max(1, scan.get(args, "token_ids").shape[0])

    def filled_for(args: Args, ladder: bool = False, costs: Any = None, **size: Any) -> Array:
        tokens, lengths = scan.get(args, "token_ids"), scan.get(args, "num_tokens")
        num_missing = np.resize(np.array(missing, np.int32), len(lengths))
        known = np.where(lengths > num_missing, lengths - num_missing, lengths)
        options = [scan.get(args, n) for n in ("min_n", "max_n", "match_policy")]
        return filled_index(
            tokens, known, num_rows(args), *options, ladder, costs is not None, **size
        )

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for i, sample in enumerate(scan.samples(rng)):
            args, compare = sample.args, sample.compare and not repeats_a_row(sample.args)
            if not within_span(args):
                continue
            if i == 0:
                yield Sample("ordinary", call(args, new_index(7), in_buffer([3, 0, 6], gap=1)))
                continue
            if rng.random() < 0.5:  # scan samples come in variants, so one index for each suffices
                empty = call(args, new_index(num_rows(args)))
                yield Sample(f"empty-{sample.label}", empty, compare)
            else:
                yield Sample(f"filled-{sample.label}", call(args, filled_for(args)), compare)
            if i % 5 == 0:
                small = call(args, filled_for(args, num_pages=2))
                yield Sample(f"no-memory-{sample.label}", small, compare)
        yield from slot_samples(rng)
        yield from ladder_samples(rng)

    def ladder_samples(rng: np.random.Generator) -> Iterator[Sample]:
        lengths = in_buffer([50, 49, 17, 16, 15, 2, 1, 0, 50])
        for alphabet in (1, 2, 4):
            tokens = in_buffer(random_rows(rng, 9, 60, alphabet), gap=2)
            for label, lookup in ladder_lookups(rng, 8):
                plain = slot_call(rng, tokens, lengths, (1, False))
                shared = ("min_n", "max_n", "k", "match_policy", "overlap")
                args = scan.replace(plain, **{n: lookup[n] for n in shared})
                ladder = {n: lookup[n] for n in NO_LADDER if n in lookup}
                index = {
                    "empty": new_index(9),
                    "filled": filled_for(args, True, ladder.get("costs")),
                    "consecutive": filled_for(plain),
                    "no-memory": filled_for(args, True, ladder.get("costs"), num_pages=3),
                }
                for state, words in index.items():
                    name = f"ladder-{alphabet}-{label}-{state}"
                    yield Sample(name, call(args, words, **ladder))
                slots = in_buffer(HOSTILE_INT32[:8])
                hostile = call(args, index["filled"], slots, **ladder)
                yield Sample(f"ladder-slots-{alphabet}-{label}", hostile)
                for i, words in enumerate(random_contents(rng, index["filled"])):
                    wrong = call(args, words, **ladder)
                    yield Sample(f"ladder-random-{i}-{alphabet}-{label}", wrong, compare=False)

    def slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
        # With an alphabet of 2, two rows could end with the same eight tokens, by which an index
        # recognises the row of a slot.
        tokens = in_buffer(random_rows(rng, 9, 60, 4), gap=2)
        lengths = in_buffer([50] * 9)
        for policy in POLICIES:
            args = slot_call(rng, tokens, lengths, policy)
            index = filled_for(args)
            order = rng.permutation(9)[:8]
            # Slots that index other rows, and slots that do not exist.
            yield Sample(f"others-slots-{policy}", call(args, index, in_buffer(order)))
            for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64[3:])):
                slots = in_buffer(bad[:8], dtype=dtype)
                yield Sample(f"hostile-slots-{policy}", call(args, index, slots))
            twice = in_buffer([1, 1, 1, 2, 2, 3, 3, 1])
            yield Sample(f"one-slot-twice-{policy}", call(args, index, twice), compare=False)
            other = scan.replace(args, min_n=1, max_n=3)
            yield Sample(f"other-range-{policy}", call(other, index))
            shorter = scan.replace(args, num_tokens=in_buffer([30] * 9))
            yield Sample(f"shorter-{policy}", call(shorter, index))
            if "sampled_token_ids" in names:
                # The last indexed token is sampled again, after different text.
                other = in_buffer(np.hstack([random_rows(rng, 9, 40, 4), tokens[:, 40:]]))
                again = scan.replace(
                    args,
                    token_ids=other,
                    num_tokens=in_buffer([49] * 9),
                    sampled_token_ids=in_buffer(tokens[:8, 49:52]),
                )
                yield Sample(f"one-shorter-{policy}", call(again, index))
            rewritten = scan.replace(args, token_ids=in_buffer(random_rows(rng, 9, 60, 5)))
            yield Sample(f"rewritten-{policy}", call(rewritten, index), compare=False)
            for i, words in enumerate(random_contents(rng, index)):
                yield Sample(f"random-{i}-{policy}", call(args, words), compare=False)

    sizes = (
        call(args, new_index(30 + i, 5 + i), np.arange(batch_of(args), dtype=np.int32))
        for i, args in enumerate(scan.sizes)
    )
    return OpSpec(
        name=name,
        no_kernel=NO_INDEX_ON_DEVICES,
        reference=reference,
        samples=samples,
        bad_calls=(
            *bad_calls,
            BadCall({"min_n": 2, "max_n": 10}, r"max_n <= 9 .*got 10", "max_n"),
            BadCall({"ladder": True}, "expected 1 with ladder=True, got", "min_n"),
            BadCall({"costs": np.zeros((16, 32), np.uint8)}, "None"),
            *LADDER_BAD_CALLS,
            *bad_logits(32, **LADDER),
        ),
        sizes=tuple(sizes),
        opaque=frozenset({"index"}),
        # Other tokens would not be those of the index, and a slot must not occur twice.
        fixed=frozenset({"token_ids", "num_tokens", "row_indices", "slot_indices", "match_policy"}),
    )


TOKENS, ROWS = 0, 2


def _batch(args: Args) -> int:
    return len(args[TOKENS] if args[ROWS] is None else args[ROWS])


def _propose_slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    counts = in_buffer(rng.integers(-1, 4, 8))
    fill = bool(counts[0] > 0)  # either value
    options = (2, 4, 3, *policy, 70, None, 40, fill)
    return (tokens, lengths, in_buffer(range(8)), counts, *options)


NGRAM_INDEX_PROPOSE = indexed_spec(
    "ngram_index_propose_",
    drafting.NGRAM_PROPOSE,
    reference.ngram_index_propose_,
    batch_of=_batch,
    missing=(1, 0, 3, 1, 70),
    bad_calls=(drafting.RANGE_BAD_CALL,),
    slot_call=_propose_slot_call,
)


SAMPLED = 2


def _step_slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    sampled = in_buffer(rng.integers(0, 2, (8, 3), dtype=np.int32))
    fill = bool(sampled[0, 0])  # either value
    options = (2, 4, 3, *policy, 70, None, 40, fill, None, None)
    return (tokens, lengths, sampled, None, None, True, 9, *options)


NGRAM_INDEX_STEP = indexed_spec(
    "ngram_index_step_",
    drafting.NGRAM_STEP,
    reference.ngram_index_step_,
    batch_of=lambda args: len(args[SAMPLED]),
    missing=(0,),
    bad_calls=(
        drafting.RANGE_BAD_CALL,
        drafting.SAMPLED_BAD_CALLS[0],  # for the other one the number of slots is wrong as well
    ),
    slot_call=_step_slot_call,
)


PLAIN = False, False


def _append_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(random_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    rows = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    slots = in_buffer([6, 1, 3], gap=1)
    yield Sample("ordinary", (tokens, lengths, new_index(7), rows, slots, 2, 4, 0, *PLAIN))
    consecutive = ((1, 1), (1, 8), (2, 4), (57, 64), (64, 64))
    all_sizes = [(*sizes, policy, *PLAIN) for sizes in consecutive for policy in (0, 1)]
    for sizes in (*all_sizes, (1, 16, 1, True, False), (1, 16, 1, True, True)):
        for pages in (1, 2, 3, 64):
            args = (tokens, lengths, new_index(5, pages), None, None, *sizes)
            yield Sample(f"pages-{pages}-{sizes}", args)
        for i, words in enumerate(random_contents(rng, filled_index(tokens, lengths, 5, *sizes))):
            yield Sample(f"random-{i}-{sizes}", (tokens, lengths, words, None, None, *sizes))
    some_sizes = (2, 4, 0, *PLAIN)
    longer = in_buffer([91, 90, 95, 89, 91])
    yield Sample("longer-than-rows", (tokens, longer, new_index(5), None, None, *some_sizes))
    few = in_buffer(random_rows(rng, len(HOSTILE_INT32), 20, 2))
    hostile = in_buffer(HOSTILE_INT32)
    yield Sample("hostile-lengths", (few, hostile, new_index(8), None, None, *some_sizes))
    good = in_buffer([20] * len(HOSTILE_INT32))
    for dtype, bad in HOSTILE_INDICES:
        indices, order = in_buffer(bad, dtype=dtype), in_buffer(np.arange(len(bad)))
        yield Sample("hostile-rows", (few, good, new_index(20), indices, order, *some_sizes))
        yield Sample(
            "hostile-slots", (few, good, new_index(8), order[:8], indices[:8], *some_sizes)
        )
    for num_rows, capacity in ((0, 0), (0, 5), (3, 0), (1, 1)):
        nothing = np.zeros((num_rows, capacity), np.int32)
        full = np.full(num_rows, capacity, np.int32)
        yield Sample("empty", (nothing, full, new_index(3), None, None, *some_sizes))
    none = in_buffer([])
    yield Sample("no-rows", (tokens, lengths, new_index(3), none, none, *some_sizes))


def _append_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, low, high in ((12, 50, 2, 5), (17, 61, 3, 6), (20, 83, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        some = np.arange(rows - 3, dtype=np.int32)
        tokens = random_rows(rng, rows, capacity, 3)
        index = new_index(rows, rows)
        yield tokens, lengths, index, some, some.copy(), low, high, 0, *PLAIN


NGRAM_INDEX_APPEND = OpSpec(
    name="ngram_index_append_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_append_,
    samples=_append_samples,
    bad_calls=(
        drafting.RANGE_BAD_CALL,
        BadCall({"min_n": 60, "max_n": 65}, r"1 to 64, got 65", "max_n"),
        BadCall({"min_n": 1, "max_n": 9}, r"max_n <= 8 .*got 9", "max_n"),
        BadCall({"ladder": True}, "expected 1 with ladder=True, got 2", "min_n"),
        BadCall({"outcomes": True}, "outcomes require ladder=True"),
    ),
    sizes=tuple(_append_sizes()),
    opaque=frozenset({"index"}),
    fixed=frozenset({"match_policy"}),
)


def _reset_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = random_rows(rng, 5, 90, 3)
    lengths = np.full(5, 90, np.int32)
    index = filled_index(tokens, lengths, 5, 2, 4, 0)
    yield Sample("ordinary", (index, in_buffer([3, 1], gap=1)))
    for dtype, bad in HOSTILE_INDICES:
        yield Sample("hostile-slots", (index, in_buffer(bad, dtype=dtype)))
    yield Sample("twice", (index, in_buffer([3, 3, 3])))
    yield Sample("none", (index, in_buffer([])))
    for i, words in enumerate(random_contents(rng, index)):
        yield Sample(f"random-{i}", (words, in_buffer(range(5))))


NGRAM_INDEX_RESET = OpSpec(
    name="ngram_index_reset_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_reset_,
    samples=_reset_samples,
    bad_calls=(),
    sizes=tuple((new_index(n, n + 2), np.arange(n, dtype=np.int32)) for n in (3, 5, 8)),
    opaque=frozenset({"index"}),
)
