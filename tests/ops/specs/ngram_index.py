"""The OpSpecs of the operators with an index. The lookups have the samples of the lookups
without an index (``make_indexed_spec``), with indexes that are empty, filled, too small or
random."""

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
    draw_rows,
    make_bad_logits_calls,
    make_random_logits,
)
from .spec import NO_INDEX_ON_DEVICES, Args, Array, BadCall, OpSpec, Sample, in_buffer


def make_index(num_slots: int, num_pages: int = 64) -> Array:
    """Returns an empty index."""
    index = np.zeros(_C.index_words(num_slots, num_pages), np.int32)
    _C.index_init(index, num_slots)
    return index


def fill_index(
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
    """Returns an index of these rows. Row i is in slot i."""
    index = make_index(num_slots, **size)
    options = min_n, max_n, policy, ladder, outcomes
    _C.ngram_index_append_(tokens, lengths, index, None, None, *options)
    return index


NO_LADDER_ARGS = {
    "ladder": False,
    "costs": None,
    "cost_limit": 40,
    "draft_costs": None,
    "token_logits": None,
}


def make_lookups(rng: np.random.Generator, batch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields labels and arguments of lookups with a ladder, without costs and with limits."""
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
            costs |= make_random_logits(rng, 32)
            yield f"logits-{limit}-{overlap}", {**lookup, **costs, "k": k}


def corrupt_index(rng: np.random.Generator, valid_index: Array) -> Iterator[Array]:
    """Yields indexes with contents that no operator writes. A kernel must not access memory
    outside the tensor. Its drafts are unspecified, so such samples are not compared."""
    for share in (0.001, 0.05, 1.0):
        index = valid_index.copy()
        is_replaced = rng.random(index.size) < share
        is_replaced[:64] = False  # the header stays valid
        index[is_replaced] = rng.integers(-(2**31), 2**31, int(is_replaced.sum()))
        yield index
    yield rng.integers(-(2**31), 2**31, 5000).astype(np.int32)
    yield np.full(5000, -1, np.int32)
    yield np.zeros(5000, np.int32)
    yield np.zeros(0, np.int32)
    yield valid_index[:100].copy()


LADDER_ARGS = {"ladder": True, "min_n": 1, "max_n": 16, "match_policy": 1}
_TABLE = np.zeros((16, 32), np.uint8)
_LOGITS = np.zeros((4096, 2), np.int8)
LADDER_BAD_CALLS = [
    BadCall(LADDER_ARGS | change, message, named)
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


def make_indexed_spec(
    name: str,
    scan: OpSpec,
    reference: Callable[..., tuple[Array, ...] | None],
    *,
    get_batch: Callable[[Args], int],
    num_missing_tokens: tuple[int, ...],
    bad_calls: tuple[BadCall, ...],
    make_slot_call: Callable[[np.random.Generator, Array, Array, tuple[int, bool]], Args],
) -> OpSpec:
    """Returns the OpSpec of a lookup with an index. Its samples are those of ``scan``, with
    indexes.

    Args:
        get_batch: Returns the number of requests of a call.
        num_missing_tokens: Numbers of tokens at the rows' ends that a filled index does not contain
            yet. The numbers are repeated for all rows.
        make_slot_call: Returns a call of 8 requests for rows 0 to 7, from rows, lengths, policy.
    """
    names = [argument for argument, _ in arguments_of(name)]

    def add_index(args: Args, index: Array, slots: Array | None = None, **ladder: Any) -> Args:
        values = dict(zip([n for n, _ in scan.arguments], args, strict=True))
        values |= {"index": index, "slot_indices": slots, **NO_LADDER_ARGS, **ladder}
        return tuple(values[argument] for argument in names)

    def has_supported_span(args: Args) -> bool:
        return bool(scan.get(args, "max_n") - scan.get(args, "min_n") < 8)

    def has_repeated_row(args: Args) -> bool:
        rows = scan.get(args, "row_indices")
        return rows is not None and len(set(rows.tolist())) < len(rows)

    def count_rows(args: Args) -> int:
        return max(1, scan.get(args, "token_ids").shape[0])

    def fill_index_for(args: Args, ladder: bool = False, costs: Any = None, **size: Any) -> Array:
        tokens, lengths = scan.get(args, "token_ids"), scan.get(args, "num_tokens")
        num_missing = np.resize(np.array(num_missing_tokens, np.int32), len(lengths))
        indexed_lengths = np.where(lengths > num_missing, lengths - num_missing, lengths)
        options = [scan.get(args, n) for n in ("min_n", "max_n", "match_policy")]
        return fill_index(
            tokens, indexed_lengths, count_rows(args), *options, ladder, costs is not None, **size
        )

    def make_samples(rng: np.random.Generator) -> Iterator[Sample]:
        for i, sample in enumerate(scan.make_samples(rng)):
            args = sample.args
            checks_results = sample.checks_results and not has_repeated_row(args)
            if not has_supported_span(args):
                continue
            if i == 0:
                slots = in_buffer([3, 0, 6], gap=1)
                yield Sample("ordinary", add_index(args, make_index(7), slots))
                continue
            if rng.random() < 0.5:  # similar samples get the other index
                empty = add_index(args, make_index(count_rows(args)))
                yield Sample(f"empty-{sample.label}", empty, checks_results)
            else:
                filled = add_index(args, fill_index_for(args))
                yield Sample(f"filled-{sample.label}", filled, checks_results)
            if i % 5 == 0:
                small = add_index(args, fill_index_for(args, num_pages=2))
                yield Sample(f"no-memory-{sample.label}", small, checks_results)
        yield from make_slot_samples(rng)
        yield from make_ladder_samples(rng)

    def make_ladder_samples(rng: np.random.Generator) -> Iterator[Sample]:
        lengths = in_buffer([50, 49, 17, 16, 15, 2, 1, 0, 50])
        for alphabet in (1, 2, 4):
            tokens = in_buffer(draw_rows(rng, 9, 60, alphabet), gap=2)
            for label, lookup in make_lookups(rng, 8):
                scan_args = make_slot_call(rng, tokens, lengths, (1, False))
                lookup_names = ("min_n", "max_n", "k", "match_policy", "overlap")
                args = scan.replace(scan_args, **{n: lookup[n] for n in lookup_names})
                ladder = {n: lookup[n] for n in NO_LADDER_ARGS if n in lookup}
                indexes = {
                    "empty": make_index(9),
                    "filled": fill_index_for(args, True, ladder.get("costs")),
                    "consecutive": fill_index_for(scan_args),
                    "no-memory": fill_index_for(args, True, ladder.get("costs"), num_pages=3),
                }
                for state, words in indexes.items():
                    name = f"ladder-{alphabet}-{label}-{state}"
                    yield Sample(name, add_index(args, words, **ladder))
                slots = in_buffer(HOSTILE_INT32[:8])
                hostile_call = add_index(args, indexes["filled"], slots, **ladder)
                yield Sample(f"ladder-slots-{alphabet}-{label}", hostile_call)
                for i, words in enumerate(corrupt_index(rng, indexes["filled"])):
                    random_call = add_index(args, words, **ladder)
                    name = f"ladder-random-{i}-{alphabet}-{label}"
                    yield Sample(name, random_call, checks_results=False)

    def make_slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
        # An index recognizes the row of a slot by the row's last eight tokens. With an alphabet of
        # 2, two rows could end with the same eight tokens.
        tokens = in_buffer(draw_rows(rng, 9, 60, 4), gap=2)
        lengths = in_buffer([50] * 9)
        for policy in POLICIES:
            args = make_slot_call(rng, tokens, lengths, policy)
            index = fill_index_for(args)
            order = rng.permutation(9)[:8]
            # The slots contain other rows, or do not exist.
            yield Sample(f"others-slots-{policy}", add_index(args, index, in_buffer(order)))
            for dtype, hostile in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64[3:])):
                slots = in_buffer(hostile[:8], dtype=dtype)
                yield Sample(f"hostile-slots-{policy}", add_index(args, index, slots))
            slots = in_buffer([1, 1, 1, 2, 2, 3, 3, 1])
            twice = add_index(args, index, slots)
            yield Sample(f"one-slot-twice-{policy}", twice, checks_results=False)
            other_range = scan.replace(args, min_n=1, max_n=3)
            yield Sample(f"other-range-{policy}", add_index(other_range, index))
            shorter = scan.replace(args, num_tokens=in_buffer([30] * 9))
            yield Sample(f"shorter-{policy}", add_index(shorter, index))
            if "sampled_token_ids" in names:
                # The row is one token shorter than the index, and the text before its end has
                # changed. The sampled tokens begin with the last indexed token.
                changed_tokens = in_buffer(np.hstack([draw_rows(rng, 9, 40, 4), tokens[:, 40:]]))
                shorter = scan.replace(
                    args,
                    token_ids=changed_tokens,
                    num_tokens=in_buffer([49] * 9),
                    sampled_token_ids=in_buffer(tokens[:8, 49:52]),
                )
                yield Sample(f"one-shorter-{policy}", add_index(shorter, index))
            changed = scan.replace(args, token_ids=in_buffer(draw_rows(rng, 9, 60, 5)))
            yield Sample(f"rewritten-{policy}", add_index(changed, index), checks_results=False)
            for i, words in enumerate(corrupt_index(rng, index)):
                yield Sample(f"random-{i}-{policy}", add_index(args, words), checks_results=False)

    sizes = (
        add_index(args, make_index(30 + i, 5 + i), np.arange(get_batch(args), dtype=np.int32))
        for i, args in enumerate(scan.sizes)
    )
    return OpSpec(
        name=name,
        no_kernel=NO_INDEX_ON_DEVICES,
        reference=reference,
        make_samples=make_samples,
        bad_calls=(
            *bad_calls,
            BadCall({"min_n": 2, "max_n": 10}, r"max_n <= 9 .*got 10", "max_n"),
            BadCall({"ladder": True}, "expected 1 with ladder=True, got", "min_n"),
            BadCall({"costs": np.zeros((16, 32), np.uint8)}, "None"),
            *LADDER_BAD_CALLS,
            *make_bad_logits_calls(32, **LADDER_ARGS),
        ),
        sizes=tuple(sizes),
        opaque=frozenset({"index"}),
        # With other tokens, the index would not match the rows, and a slot must not occur twice.
        not_randomized=frozenset(
            {"token_ids", "num_tokens", "row_indices", "slot_indices", "match_policy"}
        ),
    )


TOKEN_IDS, ROW_INDICES = 0, 2
"""Indices of these arguments in a call of ``ngram_propose``."""


def _get_batch(args: Args) -> int:
    return len(args[TOKEN_IDS] if args[ROW_INDICES] is None else args[ROW_INDICES])


def _make_propose_slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    counts = in_buffer(rng.integers(-1, 4, 8))
    fill = bool(counts[0] > 0)  # random
    options = (2, 4, 3, *policy, 70, None, 40, fill)
    return (tokens, lengths, in_buffer(range(8)), counts, *options)


NGRAM_INDEX_PROPOSE = make_indexed_spec(
    "ngram_index_propose_",
    drafting.NGRAM_PROPOSE,
    reference.ngram_index_propose_,
    get_batch=_get_batch,
    num_missing_tokens=(1, 0, 3, 1, 70),
    bad_calls=(drafting.RANGE_BAD_CALL,),
    make_slot_call=_make_propose_slot_call,
)


SAMPLED_TOKEN_IDS = 2
"""The index of this argument in a call of ``ngram_step_``."""


def _make_step_slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    sampled = in_buffer(rng.integers(0, 2, (8, 3), dtype=np.int32))
    fill = bool(sampled[0, 0])  # random
    options = (2, 4, 3, *policy, 70, None, 40, fill, None, None)
    return (tokens, lengths, sampled, None, None, True, 9, *options)


NGRAM_INDEX_STEP = make_indexed_spec(
    "ngram_index_step_",
    drafting.NGRAM_STEP,
    reference.ngram_index_step_,
    get_batch=lambda args: len(args[SAMPLED_TOKEN_IDS]),
    num_missing_tokens=(0,),
    bad_calls=(
        drafting.RANGE_BAD_CALL,
        drafting.SAMPLED_BAD_CALLS[0],  # in the other call, the number of slots would be wrong too
    ),
    make_slot_call=_make_step_slot_call,
)


NO_LADDER = False, False
"""``ladder`` and ``outcomes`` of an index without a ladder."""


def _make_append_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(draw_rows(rng, 5, 90, 3), before=3, gap=5)
    lengths = in_buffer([90, 60, 33, 17, 2], gap=1)
    rows = in_buffer([4, 0, 2], gap=2, dtype=np.int64)
    slots = in_buffer([6, 1, 3], gap=1)
    yield Sample("ordinary", (tokens, lengths, make_index(7), rows, slots, 2, 4, 0, *NO_LADDER))
    consecutive_ranges = ((1, 1), (1, 8), (2, 4), (57, 64), (64, 64))
    consecutive_options = [(*n, p, *NO_LADDER) for n in consecutive_ranges for p in (0, 1)]
    for options in (*consecutive_options, (1, 16, 1, True, False), (1, 16, 1, True, True)):
        for pages in (1, 2, 3, 64):
            args = (tokens, lengths, make_index(5, pages), None, None, *options)
            yield Sample(f"pages-{pages}-{options}", args)
        for i, words in enumerate(corrupt_index(rng, fill_index(tokens, lengths, 5, *options))):
            yield Sample(f"random-{i}-{options}", (tokens, lengths, words, None, None, *options))
    tail = (2, 4, 0, *NO_LADDER)
    large_lengths = in_buffer([91, 90, 95, 89, 91])
    yield Sample("longer-than-rows", (tokens, large_lengths, make_index(5), None, None, *tail))
    rows = in_buffer(draw_rows(rng, len(HOSTILE_INT32), 20, 2))
    hostile_lengths = in_buffer(HOSTILE_INT32)
    yield Sample("hostile-lengths", (rows, hostile_lengths, make_index(8), None, None, *tail))
    num_tokens = in_buffer([20] * len(HOSTILE_INT32))
    for dtype, hostile in HOSTILE_INDICES:
        indices, order = in_buffer(hostile, dtype=dtype), in_buffer(np.arange(len(hostile)))
        yield Sample("hostile-rows", (rows, num_tokens, make_index(20), indices, order, *tail))
        yield Sample(
            "hostile-slots", (rows, num_tokens, make_index(8), order[:8], indices[:8], *tail)
        )
    for num_rows, capacity in ((0, 0), (0, 5), (3, 0), (1, 1)):
        no_tokens = np.zeros((num_rows, capacity), np.int32)
        row_lengths = np.full(num_rows, capacity, np.int32)
        yield Sample("empty", (no_tokens, row_lengths, make_index(3), None, None, *tail))
    no_indices = in_buffer([])
    yield Sample("no-rows", (tokens, lengths, make_index(3), no_indices, no_indices, *tail))


def _make_append_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for rows, capacity, min_n, max_n in ((12, 50, 2, 5), (17, 61, 3, 6), (20, 83, 4, 9)):
        lengths = np.full(rows, capacity - 5, np.int32)
        indices = np.arange(rows - 3, dtype=np.int32)
        tokens = draw_rows(rng, rows, capacity, 3)
        index = make_index(rows, rows)
        yield tokens, lengths, index, indices, indices.copy(), min_n, max_n, 0, *NO_LADDER


NGRAM_INDEX_APPEND = OpSpec(
    name="ngram_index_append_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_append_,
    make_samples=_make_append_samples,
    bad_calls=(
        drafting.RANGE_BAD_CALL,
        BadCall({"min_n": 60, "max_n": 65}, r"1 to 64, got 65", "max_n"),
        BadCall({"min_n": 1, "max_n": 9}, r"max_n <= 8 .*got 9", "max_n"),
        BadCall({"ladder": True}, "expected 1 with ladder=True, got 2", "min_n"),
        BadCall({"outcomes": True}, "outcomes require ladder=True"),
    ),
    sizes=tuple(_make_append_sizes()),
    opaque=frozenset({"index"}),
    not_randomized=frozenset({"match_policy"}),
)


def _make_reset_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = draw_rows(rng, 5, 90, 3)
    lengths = np.full(5, 90, np.int32)
    index = fill_index(tokens, lengths, 5, 2, 4, 0)
    yield Sample("ordinary", (index, in_buffer([3, 1], gap=1)))
    for dtype, hostile in HOSTILE_INDICES:
        yield Sample("hostile-slots", (index, in_buffer(hostile, dtype=dtype)))
    yield Sample("twice", (index, in_buffer([3, 3, 3])))
    yield Sample("none", (index, in_buffer([])))
    for i, words in enumerate(corrupt_index(rng, index)):
        yield Sample(f"random-{i}", (words, in_buffer(range(5))))


NGRAM_INDEX_RESET = OpSpec(
    name="ngram_index_reset_",
    no_kernel=NO_INDEX_ON_DEVICES,
    reference=reference.ngram_index_reset_,
    make_samples=_make_reset_samples,
    bad_calls=(),
    sizes=tuple((make_index(n, n + 2), np.arange(n, dtype=np.int32)) for n in (3, 5, 8)),
    opaque=frozenset({"index"}),
)
