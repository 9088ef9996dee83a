from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import reference
from hypothesis import strategies as st

from .batches import (
    hostile_offsets,
    index_vectors,
    int32_vectors,
    lengths_lists,
    offsets,
    one_hostile,
    previous,
    unordered_offsets,
)
from .compute_slot_mapping import (
    LAYOUT_BAD_CALLS,
    LAYOUTS,
    SLOT_DTYPES,
    block_tables,
    layouts,
    slot_arrays,
    table,
)
from .correct_num_computed_tokens import COUNTS_BAD_CALLS
from .rows import HOSTILE_INT32, HOSTILE_INT64
from .spec import Args, BadCall, OpSpec, Sample, in_buffer


def _step(rng: np.random.Generator, batch: int, **change: Any) -> dict[str, Any]:
    """A step of `batch` requests by argument name: some drafted in the step before, some are new,
    some are in the middle of their prompts."""
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
        "block_size": 16,
        "blocks_per_kv_block": 1,
        "cp_world": 1,
        "cp_rank": 0,
        "cp_interleave": 1,
        "pad_id": -1,
        "workspace": None,
    }
    assert not change.keys() - step.keys()
    return step | change


def _layout(values: tuple[int, ...]) -> dict[str, int]:
    names = ("block_size", "blocks_per_kv_block", "cp_world", "cp_rank", "cp_interleave")
    return dict(zip(names, values, strict=True))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(label: str, step: dict[str, Any], compare: bool = True) -> Sample:
        return Sample(label, tuple(step.values()), compare)

    start = in_buffer([0, 5, 6, 6, 9], gap=1)
    four = _step(rng, 4, query_start_loc=start)
    yield sample("ordinary", four)
    yield sample("workspace", four | {"workspace": np.zeros(64, np.int32)})
    large = _step(rng, 400, workspace=np.zeros(1024, np.int32))  # on devices: of several blocks
    yield sample("workspace-large", large)
    for name in ("positions", "slot_mapping"):  # so that the other has more blocks
        few = in_buffer(np.zeros(5), gap=2, dtype=np.int64)
        yield sample(f"workspace-few-{name}", large | {name: few})
    yield sample("no-mask", four | {"discard": None, "num_tokens": None})
    yield sample("lengths-without-mask", four | {"discard": None})
    for batch in (0, 1, 2, 3, 30, 2049):
        for name, order in previous(batch, rng):
            for dtype in (np.int32, np.int64):
                prev = in_buffer(order, dtype=dtype)
                step = _step(rng, batch, prev_positions=prev)
                yield sample(f"batch-{batch}-{name}", step)
            yield sample(f"batch-{batch}-{name}-no-rows", step | {"row_indices": None})
    for batch in (1024, 1025):  # what one block on a GPU can hold, and one more
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
        for bad in one_hostile(four[name].tolist(), HOSTILE_INT32):
            yield sample(f"hostile-{name}", four | {name: in_buffer(bad)})
    for bad in one_hostile(four["host_num_computed_tokens"].tolist(), HOSTILE_INT32):
        step = four | {"host_num_computed_tokens": in_buffer(bad)}
        yield sample("hostile-host", step | {"prev_positions": in_buffer([-1, 1, -1, 2])})
    # Behind the known lengths stand zeros, with which no request would be discarded.
    lengths = four["num_tokens"]
    four = four | {"num_tokens": np.append(lengths, np.zeros_like(lengths))[: len(lengths)]}
    for name in ("prev_positions", "row_indices"):
        for dtype, hostile in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64)):
            for bad in one_hostile(four[name].tolist(), (*hostile, 4, 5, 6, 7)):
                yield sample(f"hostile-{name}", four | {name: in_buffer(bad, dtype=dtype)})
    for name, bad in hostile_offsets(start.tolist()):
        for values in LAYOUTS[:6]:
            step = four | _layout(values) | {"query_start_loc": in_buffer(bad)}
            yield sample(f"offsets-{name}", step)
    for name, bad in unordered_offsets(rng, start.tolist()):
        step = four | {"query_start_loc": in_buffer(bad)}
        yield sample(f"unordered-offsets-{name}", step, compare=False)


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    lengths = draw(lengths_lists())
    batch = len(lengths)
    rows = draw(block_tables(batch))
    known = draw(int32_vectors(len(rows), 0, 70))
    sizes = [draw(st.integers(batch, batch + 2)) for _ in range(4)]
    before = [draw(st.integers(0, 8)) for _ in range(2)]
    mask = in_buffer(np.zeros(sizes[3]), gap=1, dtype=np.bool_)
    return (
        draw(int32_vectors(sizes[0], 0, 60)),
        draw(int32_vectors(sizes[1], 0, 5)),
        in_buffer(np.zeros(draw(st.integers(0, 60))), gap=1, dtype=np.int64),
        draw(int32_vectors(sizes[2], 0, 60)),
        draw(slot_arrays(60)),
        draw(st.sampled_from([None, mask])),
        draw(index_vectors(batch, 8)),
        draw(int32_vectors(before[0], 0, 5)),
        draw(int32_vectors(before[1], 0, 4)),
        draw(int32_vectors(batch, 0, 60)),
        in_buffer(offsets(lengths, draw(st.integers(-3, 3)))),
        known,
        rows,
        draw(st.one_of(st.none(), index_vectors(batch, len(rows)))),
        *draw(layouts()),
        draw(st.sampled_from([-1, 0, 77])),
        None,
    )


def _sizes() -> tuple[Args, ...]:
    made = []
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
        made.append(tuple(step.values()))
    return tuple(made)


SPEC = OpSpec(
    name="correct_spec_state_",
    reference=reference.correct_spec_state_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        *COUNTS_BAD_CALLS,
        *LAYOUT_BAD_CALLS,
        BadCall("B instead of B + 1", {"query_start_loc": lambda a: a[:-1]}, r"size 5, got size 4"),
        BadCall(
            "too few lengths",
            {"seq_lens": lambda a: a[:3]},
            r"size >= 4 \(size of prev_positions\), got size 3",
        ),
        BadCall(
            "mask too small",
            {"discard": lambda a: a[:3]},
            r"size >= 4 \(size of prev_positions\), got size 3",
        ),
        BadCall("mask without lengths", {"num_tokens": None}, r"got None"),
        BadCall(
            "more requests than known lengths",
            {"num_tokens": lambda a: a[:3], "row_indices": None},
            r"batch <= 3 \(size of num_tokens, without row_indices\), got 4",
            "prev_positions",
        ),
        BadCall(
            "more requests than rows",
            {"block_table": lambda a: a[:2], "row_indices": None},
            r"batch <= 2 \(rows of block_table, without row_indices\), got 4",
            "query_start_loc",
        ),
    ),
    sizes=_sizes(),
)
