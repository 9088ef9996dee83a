"""The OpSpecs of the operators that correct the state of asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from ops import reference

from .inputs import (
    HOSTILE_INDICES,
    HOSTILE_INT32,
    HOSTILE_INT64,
    NO_OFFSET,
    draw_offsets,
    make_hostile_offsets,
    make_hostile_samples,
    make_index_samples,
    make_offsets,
    make_prev_positions,
    make_workspace,
    replace_each,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer


def _make_counts_samples(rng: np.random.Generator) -> Iterator[Sample]:
    computed = in_buffer([10, 20, 30, 40, 50, 60], before=1, gap=2)
    accepted = in_buffer([1, 1, 1, 1, 9], gap=3)
    prev = in_buffer([2, -1, 0, 1], gap=1, dtype=np.int64)
    sampled = in_buffer([3, 1, 2, 1, 1])
    drafts = in_buffer([4, 0, 4, 0, 1])
    host = in_buffer([35, 0, 15, 21], gap=1)
    ordinary = (computed, accepted, prev, sampled, drafts, host)
    yield Sample("ordinary", ordinary)

    for batch in (0, 1, 2, 3, 40, 2047, 2048, 2049, 5000):
        for name, order in make_prev_positions(batch, rng):
            for dtype in (np.int32, np.int64):
                drafted = rng.integers(0, 5, batch)
                args = (
                    in_buffer(rng.integers(0, 9000, batch + 2), gap=1),
                    in_buffer(np.ones(batch), gap=1),
                    in_buffer(order, dtype=dtype),
                    in_buffer(rng.integers(0, drafted + 2)),
                    in_buffer(drafted),
                    in_buffer(rng.integers(0, 9000, batch)),
                )
                yield Sample(f"batch-{batch}-{name}-{np.dtype(dtype).name}", args)
    order = in_buffer([0, 1, 2, 3])
    for sizes in ((4, 4, 0), (4, 0, 4), (4, 1, 3), (4, 3, 1), (9, 9, 9), (9, 2, 9), (4, 9, 9)):
        computed, sampled, drafted = (in_buffer(rng.integers(1, 9, n), gap=2) for n in sizes)
        args = (computed, in_buffer([1] * 4), order, sampled, drafted, host)
        yield Sample(f"previous-arrays-{sizes}", args)
    yield from make_index_samples("hostile-previous", ordinary, 2)
    for i in (0, 1, 3, 4, 5):
        yield from make_hostile_samples(f"hostile-{i}", ordinary, i)


def _make_counts_sizes() -> Iterator[Args]:
    for batch in (5, 11, 17):
        sizes = (batch + 1, batch + 2, batch, batch + 3, batch + 4)
        vectors = [np.arange(n, dtype=np.int32) for n in sizes]
        yield (*vectors, np.full(batch, 7, np.int32))


def _make_short_tensor_call(name: str) -> BadCall:
    """Returns a call with three items for the four requests of the ordinary sample."""
    message = r"size >= 4 \(size of prev_positions\), got size 3"
    return BadCall({name: lambda a: a[:3]}, message)


COUNTS_BAD_CALLS = (
    _make_short_tensor_call("num_computed_tokens"),
    _make_short_tensor_call("num_accepted_tokens"),
    BadCall({"host_num_computed_tokens": lambda a: a[:3]}, r"size 4, got size 3"),
)

CORRECT_NUM_COMPUTED_TOKENS = OpSpec(
    name="correct_num_computed_tokens_",
    reference=reference.correct_num_computed_tokens_,
    make_samples=_make_counts_samples,
    bad_calls=COUNTS_BAD_CALLS,
    sizes=tuple(_make_counts_sizes()),
)


LAYOUTS = [
    (16, 1, 1, 0, 1),
    (1, 1, 1, 0, 1),
    (7, 1, 1, 0, 1),
    (4, 3, 1, 0, 1),
    (5, 2, 1, 0, 3),  # one rank: the interleave has no effect
    (16, 1, 2, 0, 1),
    (16, 1, 2, 1, 1),
    (8, 1, 3, 1, 4),
    (8, 1, 2, 1, 8),
    (6, 2, 3, 2, 4),  # chunks that span two blocks
    (3, 4, 2, 0, 12),
    (1, 1, 4, 3, 1),
    (2**31 - 1, 1, 1, 0, 1),
    (1, 2**31 - 1, 1, 0, 1),
    (1, 1, 2**31 - 1, 5, 1),
    (2**10, 2**10, 2**10, 3, 2**11),
]
"""block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave"""
SLOT_DTYPES = (np.int64, np.int32)


def make_block_table(rng: np.random.Generator, rows: int, blocks: int) -> Array:
    """Returns a block table, as a slice of a wider table. No block occurs twice."""
    ids = rng.permutation(rows * blocks).reshape(rows, blocks) + 1
    return in_buffer(ids, before=1, gap=3)


def _make_slots_samples(rng: np.random.Generator) -> Iterator[Sample]:
    offsets = in_buffer([0, 5, 6, 30], gap=1)
    positions = in_buffer([*range(60, 65), 17, *range(24)], before=2, gap=2, dtype=np.int64)
    blocks = make_block_table(rng, 5, 6)
    indices = in_buffer([3, 0, 4], gap=1, dtype=np.int64)
    slots = in_buffer(np.zeros(40), before=1, gap=3, dtype=np.int64)
    args = (offsets, positions, blocks, slots, indices)
    yield Sample("ordinary", (*args, 16, 1, 1, 0, 1, -1))
    for dtype in SLOT_DTYPES:
        mapping = in_buffer(np.zeros(40), before=1, gap=3, dtype=dtype)
        for layout in LAYOUTS:
            for rows in (None, indices):
                for pad_id in (-1, 0, 12345):
                    call = (offsets, positions, blocks, mapping, rows, *layout, pad_id)
                    yield Sample(f"{layout}-{np.dtype(dtype).name}-{pad_id}", call)
    shuffled = in_buffer(rng.permutation(positions), dtype=np.int64)
    for layout in LAYOUTS:
        yield Sample(f"any-order-{layout}", (offsets, shuffled, blocks, slots, None, *layout, -1))
    for size in (0, 1, 5, 6, 29, 30, 31):
        short_mapping = in_buffer(np.zeros(size), gap=3, dtype=np.int64)
        yield Sample(f"slots-{size}", (*args[:3], short_mapping, indices, 16, 1, 1, 0, 1, -1))
        yield Sample(
            f"positions-{size}", (offsets, positions[:size], *args[2:], 16, 1, 1, 0, 1, -1)
        )
    yield from _make_long_samples(rng)
    yield from _make_empty_samples()
    yield from _make_hostile_samples(rng, args)


def _make_long_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for tokens in (255, 256, 257, 1000):
        # A kernel reads at most 1056 offsets at once.
        for batch in (1, 100, *((1055, 1056, 2200) if tokens == 1000 else ())):
            cuts = np.sort(rng.integers(0, tokens + 1, batch - 1))
            offsets = in_buffer([0, *cuts.tolist(), tokens])
            positions = in_buffer(rng.integers(0, 1100, tokens), dtype=np.int64)
            slots = in_buffer(np.zeros(tokens + 3), gap=1, dtype=np.int64)
            args = (offsets, positions, make_block_table(rng, batch, 64), slots, None)
            yield Sample(f"long-{tokens}-{batch}", (*args, 16, 1, 1, 0, 1, -1))


def _make_empty_samples() -> Iterator[Sample]:
    tail = (16, 1, 1, 0, 1, -1)
    for batch, rows, width, tokens in ((0, 0, 0, 0), (0, 3, 4, 5), (2, 2, 0, 4), (1, 1, 1, 1)):
        offsets = in_buffer(make_offsets([1] * batch))
        positions = np.arange(tokens, dtype=np.int64)
        slots = in_buffer(np.zeros(tokens), gap=1, dtype=np.int64)
        args = (offsets, positions, np.ones((rows, width), np.int32), slots, None, *tail)
        yield Sample(f"empty-{batch}-{rows}x{width}-{tokens}", args)


def _make_hostile_samples(rng: np.random.Generator, args: Args) -> Iterator[Sample]:
    offsets, positions, blocks, slots, indices = args
    tails = [(*layout, -1) for layout in LAYOUTS]
    limits = [b + d for b in (2**31, 2**32, 2**62) for d in (-1, 0, 1)]
    for tail in tails:
        values = in_buffer(np.resize([*HOSTILE_INT64, *limits, 95, 96, 97], 30), dtype=np.int64)
        yield Sample(f"positions-{tail}", (offsets, values, blocks, slots, None, *tail))
        values = in_buffer(2**63 - 1 - np.arange(30)[::-1], dtype=np.int64)
        yield Sample(f"last-positions-{tail}", (offsets, values, blocks, slots, None, *tail))
        for dtype in SLOT_DTYPES:  # slots wrap in 32 bits
            ids = in_buffer(np.resize(HOSTILE_INT32, (5, 6)), gap=1)
            mapping = in_buffer(np.zeros(33), dtype=dtype)
            yield Sample(f"blocks-{tail}", (offsets, positions, ids, mapping, None, *tail))
    yield from make_index_samples("rows", (*args, *tails[0]), 4, 4, 5)
    for name, hostile in make_hostile_offsets(offsets.tolist()):
        for tail in tails[:6]:
            call = (in_buffer(hostile), positions, blocks, slots, indices, *tail)
            yield Sample(f"offsets-{name}", call)
    for name, hostile in draw_offsets(rng, offsets.tolist()):
        call = (in_buffer(hostile), positions, blocks, slots, indices, *tails[0])
        yield Sample(f"unordered-offsets-{name}", call, checks_results=False)
    for pad_id in (-(2**63), 2**63 - 1):
        yield Sample(f"pad-{pad_id}", (*args, 16, 1, 2, 1, 1, pad_id))


def _make_slots_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, tokens, slots, width, layout in (
        (5, 20, 33, 9, (16, 2, 3, 2, 4)),
        (7, 22, 36, 10, (24, 3, 5, 4, 6)),
        (11, 25, 39, 12, (28, 4, 6, 5, 7)),
    ):
        start = np.array(make_offsets([2] * batch), np.int32)
        indices = np.arange(batch, dtype=np.int32)
        blocks = np.ascontiguousarray(make_block_table(rng, batch + 3, width))
        positions = np.arange(tokens, dtype=np.int64)
        out = np.zeros(slots, np.int64)
        yield (start, positions, blocks, out, indices, *layout, -1)


LAYOUT_BAD_CALLS = (
    BadCall(
        {"block_size": 2**16, "blocks_per_kv_block": 2**15},
        r"expected 1 to 32767, got 32768",
        "blocks_per_kv_block",
    ),
    BadCall(
        {"block_size": 2**31 - 1, "blocks_per_kv_block": 2**62},
        r"expected 1 to 1, got",
        "blocks_per_kv_block",
    ),
    BadCall({"cp_world": 2**40}, r"expected 1 to 134217727"),
    BadCall({"cp_world": 2, "cp_rank": 2}, r"expected 0 to 1, got 2", "cp_rank"),
    BadCall(
        {"cp_world": 2, "cp_interleave": 5},
        r"a divisor of 16 \(block_size \* blocks_per_kv_block\), got 5",
        "cp_interleave",
    ),
    BadCall(
        {"pad_id": 2**31, "slot_mapping": lambda a: a.astype(np.int32)},
        r"-2147483648 to 2147483647, got 2147483648",
    ),
    BadCall({"positions": lambda a: a.astype(np.int32)}, r"expected int64, got int32"),
)

BATCH_LARGER_THAN_TABLE = BadCall(
    {"block_table": lambda a: a[:2], "row_indices": None},
    r"batch <= 2 \(number of rows of block_table, because row_indices is None\), got [34]",
    "query_start_loc",
)

COMPUTE_SLOT_MAPPING = OpSpec(
    name="compute_slot_mapping_",
    reference=reference.compute_slot_mapping_,
    make_samples=_make_slots_samples,
    bad_calls=(
        *LAYOUT_BAD_CALLS,
        NO_OFFSET,
        BATCH_LARGER_THAN_TABLE,
    ),
    sizes=tuple(_make_slots_sizes()),
    not_randomized=frozenset({"query_start_loc"}),  # must not decrease
)


def _make_step(rng: np.random.Generator, batch: int, **change: Any) -> dict[str, Any]:
    """Returns the arguments of a step by name. Some requests had drafts in the previous step,
    some are new, and some are in prefill. ``change`` replaces arguments."""
    lengths = rng.integers(0, 9, batch)
    tokens = int(lengths.sum())
    drafts = rng.integers(0, 5, batch + 1)
    step = {
        "num_computed_tokens": in_buffer(rng.integers(0, 60, batch + 2), gap=1),
        "num_accepted_tokens": in_buffer(np.ones(batch + 1), before=1, gap=1),
        "positions": in_buffer(np.zeros(tokens + 4), gap=2, dtype=np.int64),
        "seq_lens": in_buffer(np.full(batch + 3, 99), before=2, gap=1),
        "slot_mapping": in_buffer(np.zeros(tokens + 4), gap=3, dtype=np.int64),
        "discard": in_buffer(np.zeros(batch + 1), gap=1, dtype=np.bool_),
        "prev_positions": in_buffer(rng.permutation(batch), gap=1, dtype=np.int64),
        "num_sampled_prev": in_buffer(rng.integers(0, drafts + 2)),
        "num_draft_prev": in_buffer(drafts, gap=1),
        "host_num_computed_tokens": in_buffer(rng.integers(0, 60, batch)),
        "query_start_loc": in_buffer(make_offsets(lengths), gap=1),
        "num_tokens": in_buffer(rng.integers(20, 70, batch + 2)),
        "block_table": make_block_table(rng, batch + 2, 5),
        "row_indices": in_buffer(rng.permutation(batch + 2)[:batch], gap=1, dtype=np.int64),
        **_make_layout_args(LAYOUTS[0]),
        "pad_id": -1,
        "workspace": None,
    }
    assert not change.keys() - step.keys()
    return step | change


def _make_layout_args(values: tuple[int, ...]) -> dict[str, int]:
    names = ("block_size", "blocks_per_kv_block", "cp_world", "cp_rank", "cp_interleave")
    return dict(zip(names, values, strict=True))


def _make_state_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def make_sample(label: str, step: dict[str, Any], checks_results: bool = True) -> Sample:
        return Sample(label, tuple(step.values()), checks_results)

    offsets = in_buffer([0, 5, 6, 6, 9], gap=1)
    base = _make_step(rng, 4, query_start_loc=offsets)
    yield make_sample("ordinary", base)
    yield make_sample("workspace", base | {"workspace": make_workspace(64)})
    large = _make_step(rng, 400, workspace=make_workspace(1024))  # several blocks on a device
    yield make_sample("workspace-large", large)
    for name in ("positions", "slot_mapping"):  # needs fewer blocks than the other tensor
        short = in_buffer(np.zeros(5), gap=2, dtype=np.int64)
        yield make_sample(f"workspace-few-{name}", large | {name: short})
    yield make_sample("no-mask", base | {"discard": None, "num_tokens": None})
    yield make_sample("lengths-without-mask", base | {"discard": None})
    for batch in (0, 1, 2, 3, 30, 2049):
        for name, order in make_prev_positions(batch, rng):
            for dtype in (np.int32, np.int64):
                previous = in_buffer(order, dtype=dtype)
                step = _make_step(rng, batch, prev_positions=previous)
                yield make_sample(f"batch-{batch}-{name}", step)
            yield make_sample(f"batch-{batch}-{name}-no-rows", step | {"row_indices": None})
    for batch in (1024, 1025):  # the largest batch of one block on a GPU, and one more
        yield make_sample(f"batch-{batch}", _make_step(rng, batch))
    for layout in LAYOUTS:
        for dtype in SLOT_DTYPES:
            step = _make_step(rng, 6, **_make_layout_args(layout)) | {"pad_id": 7}
            step["slot_mapping"] = in_buffer(np.zeros(60), gap=1, dtype=dtype)
            yield make_sample(f"layout-{layout}", step)
    for size in (0, 1, 5, 8, 9, 10, 40):
        short = in_buffer(np.zeros(size), gap=2, dtype=np.int64)
        yield make_sample(f"slots-{size}", base | {"slot_mapping": short})
        yield make_sample(f"positions-{size}", base | {"positions": short})
    for name in ("num_computed_tokens", "num_sampled_prev", "num_draft_prev", "num_tokens"):
        for values in replace_each(base[name].tolist(), HOSTILE_INT32):
            yield make_sample(f"hostile-{name}", base | {name: in_buffer(values)})
    for values in replace_each(base["host_num_computed_tokens"].tolist(), HOSTILE_INT32):
        step = base | {"host_num_computed_tokens": in_buffer(values)}
        yield make_sample("hostile-host", step | {"prev_positions": in_buffer([-1, 1, -1, 2])})
    # The zeros after num_tokens expose reads past its end: they discard no request.
    lengths = base["num_tokens"]
    base = base | {"num_tokens": np.append(lengths, np.zeros_like(lengths))[: len(lengths)]}
    for name in ("prev_positions", "row_indices"):
        for dtype, hostile in HOSTILE_INDICES:
            for values in replace_each(base[name].tolist(), (*hostile, 4, 5, 6, 7)):
                yield make_sample(f"hostile-{name}", base | {name: in_buffer(values, dtype=dtype)})
    for name, values in make_hostile_offsets(offsets.tolist()):
        for layout in LAYOUTS[:6]:
            step = base | _make_layout_args(layout) | {"query_start_loc": in_buffer(values)}
            yield make_sample(f"offsets-{name}", step)
    for name, values in draw_offsets(rng, offsets.tolist()):
        step = base | {"query_start_loc": in_buffer(values)}
        yield make_sample(f"unordered-offsets-{name}", step, checks_results=False)


def _make_state_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, layout in ((5, (34, 2, 3, 2, 4)), (25, (48, 3, 5, 4, 6)), (45, (56, 4, 6, 5, 7))):
        sizes = iter(range(batch + 2, batch + 20))
        step = _make_step(rng, batch, **_make_layout_args(layout)) | {
            "num_computed_tokens": np.arange(next(sizes), dtype=np.int32),
            "num_accepted_tokens": np.ones(next(sizes), np.int32),
            "positions": np.zeros(3 * batch + 21, np.int64),
            "seq_lens": np.zeros(next(sizes), np.int32),
            "slot_mapping": np.zeros(3 * batch + 22, np.int64),
            "discard": np.zeros(next(sizes), np.bool_),
            "num_sampled_prev": np.ones(next(sizes), np.int32),
            "num_draft_prev": np.ones(next(sizes), np.int32),
            "query_start_loc": np.array(make_offsets([3] * batch), np.int32),
            "num_tokens": np.full(next(sizes), 30, np.int32),
            "block_table": rng.integers(0, 99, (next(sizes), next(sizes)), dtype=np.int32),
            "workspace": make_workspace(4 * batch + 23),
        }
        yield tuple(step.values())


CORRECT_SPEC_STATE = OpSpec(
    name="correct_spec_state_",
    reference=reference.correct_spec_state_,
    make_samples=_make_state_samples,
    bad_calls=(
        *COUNTS_BAD_CALLS,
        *LAYOUT_BAD_CALLS,
        _make_short_tensor_call("seq_lens"),
        _make_short_tensor_call("discard"),
        BadCall({"num_tokens": None}, r"got None"),
        BadCall(
            {"num_tokens": lambda a: a[:3], "row_indices": None},
            r"batch <= 3 \(size of num_tokens, because row_indices is None\), got 4",
            "prev_positions",
        ),
        replace(BATCH_LARGER_THAN_TABLE, named="prev_positions"),
    ),
    sizes=tuple(_make_state_sizes()),
    not_randomized=frozenset({"query_start_loc"}),
)
