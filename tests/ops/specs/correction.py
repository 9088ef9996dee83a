"""The OpSpecs of the operators between two forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from ops import reference

from .inputs import (
    HOSTILE_INDICES,
    HOSTILE_INT32,
    HOSTILE_INT64,
    NO_OFFSET,
    hostile_indices,
    hostile_offsets,
    hostile_samples,
    offsets,
    previous_positions,
    replace_each,
    unordered_offsets,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, in_buffer


def _counts_samples(rng: np.random.Generator) -> Iterator[Sample]:
    computed = in_buffer([10, 20, 30, 40, 50, 60], before=1, gap=2)
    accepted = in_buffer([1, 1, 1, 1, 9], gap=3)
    prev = in_buffer([2, -1, 0, 1], gap=1, dtype=np.int64)
    sampled = in_buffer([3, 1, 2, 1, 1])
    drafts = in_buffer([4, 0, 4, 0, 1])
    host = in_buffer([35, 0, 15, 21], gap=1)
    ordinary = (computed, accepted, prev, sampled, drafts, host)
    yield Sample("ordinary", ordinary)

    for batch in (0, 1, 2, 3, 40, 2047, 2048, 2049, 5000):
        for name, order in previous_positions(batch, rng):
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
        calls = [in_buffer(rng.integers(1, 9, n), gap=2) for n in sizes]
        args = (calls[0], in_buffer([1] * 4), order, calls[1], calls[2], host)
        yield Sample(f"previous-arrays-{sizes}", args)
    yield from hostile_indices("hostile-previous", ordinary, 2)
    for at in (0, 1, 3, 4, 5):
        yield from hostile_samples(f"hostile-{at}", ordinary, at)


def _counts_sizes() -> Iterator[Args]:
    for batch in (5, 11, 17):
        sizes = (batch + 1, batch + 2, batch, batch + 3, batch + 4)
        vectors = [np.arange(n, dtype=np.int32) for n in sizes]
        yield (*vectors, np.full(batch, 7, np.int32))


def _too_few(name: str) -> BadCall:
    """A tensor of three items for the four requests of the ordinary sample."""
    message = r"size >= 4 \(size of prev_positions\), got size 3"
    return BadCall({name: lambda a: a[:3]}, message)


COUNTS_BAD_CALLS = (
    _too_few("num_computed_tokens"),
    _too_few("num_accepted_tokens"),
    BadCall({"host_num_computed_tokens": lambda a: a[:3]}, r"size 4, got size 3"),
)

CORRECT_NUM_COMPUTED_TOKENS = OpSpec(
    name="correct_num_computed_tokens_",
    reference=reference.correct_num_computed_tokens_,
    samples=_counts_samples,
    bad_calls=COUNTS_BAD_CALLS,
    sizes=tuple(_counts_sizes()),
)


# block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave
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
SLOT_DTYPES = (np.int64, np.int32)


def table(rng: np.random.Generator, rows: int, blocks: int) -> Array:
    """A block table within a wider one. No block occurs twice."""
    ids = rng.permutation(rows * blocks).reshape(rows, blocks) + 1
    return in_buffer(ids, before=1, gap=3)


def _slots_samples(rng: np.random.Generator) -> Iterator[Sample]:
    start = in_buffer([0, 5, 6, 30], gap=1)
    positions = in_buffer([*range(60, 65), 17, *range(24)], before=2, gap=2, dtype=np.int64)
    blocks = table(rng, 5, 6)
    indices = in_buffer([3, 0, 4], gap=1, dtype=np.int64)
    slots = in_buffer(np.zeros(40), before=1, gap=3, dtype=np.int64)
    args = (start, positions, blocks, slots, indices)
    yield Sample("ordinary", (*args, 16, 1, 1, 0, 1, -1))
    for dtype in SLOT_DTYPES:
        out = in_buffer(np.zeros(40), before=1, gap=3, dtype=dtype)
        for layout in LAYOUTS:
            for rows in (None, indices):
                for pad_id in (-1, 0, 12345):
                    calls = (start, positions, blocks, out, rows, *layout, pad_id)
                    yield Sample(f"{layout}-{np.dtype(dtype).name}-{pad_id}", calls)
    shuffled = in_buffer(rng.permutation(positions), dtype=np.int64)
    for layout in LAYOUTS:
        yield Sample(f"any-order-{layout}", (start, shuffled, blocks, slots, None, *layout, -1))
    for size in (0, 1, 5, 6, 29, 30, 31):
        few = in_buffer(np.zeros(size), gap=3, dtype=np.int64)
        yield Sample(f"slots-{size}", (*args[:3], few, indices, 16, 1, 1, 0, 1, -1))
        yield Sample(f"positions-{size}", (start, positions[:size], *args[2:], 16, 1, 1, 0, 1, -1))
    yield from _long_samples(rng)
    yield from _empty_samples()
    yield from _hostile_samples(rng, args)


def _long_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for tokens in (255, 256, 257, 1000):
        # A kernel reads at most 1056 offsets at once.
        for batch in (1, 100, *((1055, 1056, 2200) if tokens == 1000 else ())):
            cuts = np.sort(rng.integers(0, tokens + 1, batch - 1))
            start = in_buffer([0, *cuts.tolist(), tokens])
            positions = in_buffer(rng.integers(0, 1100, tokens), dtype=np.int64)
            slots = in_buffer(np.zeros(tokens + 3), gap=1, dtype=np.int64)
            args = (start, positions, table(rng, batch, 64), slots, None)
            yield Sample(f"long-{tokens}-{batch}", (*args, 16, 1, 1, 0, 1, -1))


def _empty_samples() -> Iterator[Sample]:
    tail = (16, 1, 1, 0, 1, -1)
    for batch, rows, width, tokens in ((0, 0, 0, 0), (0, 3, 4, 5), (2, 2, 0, 4), (1, 1, 1, 1)):
        start = in_buffer(offsets([1] * batch))
        positions = np.arange(tokens, dtype=np.int64)
        slots = in_buffer(np.zeros(tokens), gap=1, dtype=np.int64)
        args = (start, positions, np.ones((rows, width), np.int32), slots, None, *tail)
        yield Sample(f"empty-{batch}-{rows}x{width}-{tokens}", args)


def _hostile_samples(rng: np.random.Generator, args: Args) -> Iterator[Sample]:
    start, positions, blocks, slots, indices = args
    tails = [(*layout, -1) for layout in LAYOUTS]
    far = [b + d for b in (2**31, 2**32, 2**62) for d in (-1, 0, 1)]
    for tail in tails:
        hostile = in_buffer(np.resize([*HOSTILE_INT64, *far, 95, 96, 97], 30), dtype=np.int64)
        yield Sample(f"positions-{tail}", (start, hostile, blocks, slots, None, *tail))
        up = in_buffer(2**63 - 1 - np.arange(30)[::-1], dtype=np.int64)
        yield Sample(f"last-positions-{tail}", (start, up, blocks, slots, None, *tail))
        for dtype in SLOT_DTYPES:  # slots of any block fit 64 bits and wrap in 32
            ids = in_buffer(np.resize(HOSTILE_INT32, (5, 6)), gap=1)
            out = in_buffer(np.zeros(33), dtype=dtype)
            yield Sample(f"blocks-{tail}", (start, positions, ids, out, None, *tail))
    yield from hostile_indices("rows", (*args, *tails[0]), 4, 4, 5)
    for name, bad in hostile_offsets(start.tolist()):
        for tail in tails[:6]:
            calls = (in_buffer(bad), positions, blocks, slots, indices, *tail)
            yield Sample(f"offsets-{name}", calls)
    for name, bad in unordered_offsets(rng, start.tolist()):
        calls = (in_buffer(bad), positions, blocks, slots, indices, *tails[0])
        yield Sample(f"unordered-offsets-{name}", calls, compare=False)
    for pad_id in (-(2**63), 2**63 - 1):
        yield Sample(f"pad-{pad_id}", (*args, 16, 1, 2, 1, 1, pad_id))


def _slots_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, tokens, slots, width, layout in (
        (5, 20, 33, 9, (16, 2, 3, 2, 4)),
        (7, 22, 36, 10, (24, 3, 5, 4, 6)),
        (11, 25, 39, 12, (28, 4, 6, 5, 7)),
    ):
        start = np.array(offsets([2] * batch), np.int32)
        indices = np.arange(batch, dtype=np.int32)
        blocks = np.ascontiguousarray(table(rng, batch + 3, width))
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

MORE_THAN_ROWS = BadCall(
    {"block_table": lambda a: a[:2], "row_indices": None},
    r"batch <= 2 \(number of rows of block_table, because row_indices is None\), got [34]",
    "query_start_loc",
)

COMPUTE_SLOT_MAPPING = OpSpec(
    name="compute_slot_mapping_",
    reference=reference.compute_slot_mapping_,
    samples=_slots_samples,
    bad_calls=(
        *LAYOUT_BAD_CALLS,
        NO_OFFSET,
        MORE_THAN_ROWS,
    ),
    sizes=tuple(_slots_sizes()),
    fixed=frozenset({"query_start_loc"}),  # must not fall
)


def _step(rng: np.random.Generator, batch: int, **change: Any) -> dict[str, Any]:
    """The arguments of a step by name. Some requests had drafts in the previous step, some are new,
    and some are in prefill."""
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
        "query_start_loc": in_buffer(offsets(lengths), gap=1),
        "num_tokens": in_buffer(rng.integers(20, 70, batch + 2)),
        "block_table": table(rng, batch + 2, 5),
        "row_indices": in_buffer(rng.permutation(batch + 2)[:batch], gap=1, dtype=np.int64),
        **_layout(LAYOUTS[0]),
        "pad_id": -1,
        "workspace": None,
    }
    assert not change.keys() - step.keys()
    return step | change


def _layout(values: tuple[int, ...]) -> dict[str, int]:
    names = ("block_size", "blocks_per_kv_block", "cp_world", "cp_rank", "cp_interleave")
    return dict(zip(names, values, strict=True))


def _state_samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(label: str, step: dict[str, Any], compare: bool = True) -> Sample:
        return Sample(label, tuple(step.values()), compare)

    start = in_buffer([0, 5, 6, 6, 9], gap=1)
    four = _step(rng, 4, query_start_loc=start)
    yield sample("ordinary", four)
    yield sample("workspace", four | {"workspace": np.zeros(64, np.int32)})
    large = _step(rng, 400, workspace=np.zeros(1024, np.int32))  # several blocks on a device
    yield sample("workspace-large", large)
    for name in ("positions", "slot_mapping"):  # fewer blocks than for the other one
        few = in_buffer(np.zeros(5), gap=2, dtype=np.int64)
        yield sample(f"workspace-few-{name}", large | {name: few})
    yield sample("no-mask", four | {"discard": None, "num_tokens": None})
    yield sample("lengths-without-mask", four | {"discard": None})
    for batch in (0, 1, 2, 3, 30, 2049):
        for name, order in previous_positions(batch, rng):
            for dtype in (np.int32, np.int64):
                prev = in_buffer(order, dtype=dtype)
                step = _step(rng, batch, prev_positions=prev)
                yield sample(f"batch-{batch}-{name}", step)
            yield sample(f"batch-{batch}-{name}-no-rows", step | {"row_indices": None})
    for batch in (1024, 1025):  # the most that one block on a GPU can handle, and one more
        yield sample(f"batch-{batch}", _step(rng, batch))
    for values in LAYOUTS:
        for dtype in SLOT_DTYPES:
            step = _step(rng, 6, **_layout(values)) | {"pad_id": 7}
            step["slot_mapping"] = in_buffer(np.zeros(60), gap=1, dtype=dtype)
            yield sample(f"layout-{values}", step)
    for size in (0, 1, 5, 8, 9, 10, 40):
        few = in_buffer(np.zeros(size), gap=2, dtype=np.int64)
        yield sample(f"slots-{size}", four | {"slot_mapping": few})
        yield sample(f"positions-{size}", four | {"positions": few})
    for name in ("num_computed_tokens", "num_sampled_prev", "num_draft_prev", "num_tokens"):
        for bad in replace_each(four[name].tolist(), HOSTILE_INT32):
            yield sample(f"hostile-{name}", four | {name: in_buffer(bad)})
    for bad in replace_each(four["host_num_computed_tokens"].tolist(), HOSTILE_INT32):
        step = four | {"host_num_computed_tokens": in_buffer(bad)}
        yield sample("hostile-host", step | {"prev_positions": in_buffer([-1, 1, -1, 2])})
    # Zeros follow the lengths: with these no request would be discarded.
    lengths = four["num_tokens"]
    four = four | {"num_tokens": np.append(lengths, np.zeros_like(lengths))[: len(lengths)]}
    for name in ("prev_positions", "row_indices"):
        for dtype, hostile in HOSTILE_INDICES:
            for bad in replace_each(four[name].tolist(), (*hostile, 4, 5, 6, 7)):
                yield sample(f"hostile-{name}", four | {name: in_buffer(bad, dtype=dtype)})
    for name, bad in hostile_offsets(start.tolist()):
        for values in LAYOUTS[:6]:
            step = four | _layout(values) | {"query_start_loc": in_buffer(bad)}
            yield sample(f"offsets-{name}", step)
    for name, bad in unordered_offsets(rng, start.tolist()):
        step = four | {"query_start_loc": in_buffer(bad)}
        yield sample(f"unordered-offsets-{name}", step, compare=False)


def _state_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, layout in ((5, (34, 2, 3, 2, 4)), (25, (48, 3, 5, 4, 6)), (45, (56, 4, 6, 5, 7))):
        sizes = iter(range(batch + 2, batch + 20))
        step = _step(rng, batch, **_layout(layout)) | {
            "num_computed_tokens": np.arange(next(sizes), dtype=np.int32),
            "num_accepted_tokens": np.ones(next(sizes), np.int32),
            "positions": np.zeros(3 * batch + 21, np.int64),
            "seq_lens": np.zeros(next(sizes), np.int32),
            "slot_mapping": np.zeros(3 * batch + 22, np.int64),
            "discard": np.zeros(next(sizes), np.bool_),
            "num_sampled_prev": np.ones(next(sizes), np.int32),
            "num_draft_prev": np.ones(next(sizes), np.int32),
            "query_start_loc": np.array(offsets([3] * batch), np.int32),
            "num_tokens": np.full(next(sizes), 30, np.int32),
            "block_table": rng.integers(0, 99, (next(sizes), next(sizes)), dtype=np.int32),
            "workspace": np.zeros(4 * batch + 23, np.int32),
        }
        yield tuple(step.values())


CORRECT_SPEC_STATE = OpSpec(
    name="correct_spec_state_",
    reference=reference.correct_spec_state_,
    samples=_state_samples,
    bad_calls=(
        *COUNTS_BAD_CALLS,
        *LAYOUT_BAD_CALLS,
        _too_few("seq_lens"),
        _too_few("discard"),
        BadCall({"num_tokens": None}, r"got None"),
        BadCall(
            {"num_tokens": lambda a: a[:3], "row_indices": None},
            r"batch <= 3 \(size of num_tokens, because row_indices is None\), got 4",
            "prev_positions",
        ),
        MORE_THAN_ROWS,
    ),
    sizes=tuple(_state_sizes()),
    fixed=frozenset({"query_start_loc"}),
)
