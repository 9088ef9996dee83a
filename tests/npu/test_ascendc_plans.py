"""Tests the launch plans of the AscendC kernels, and the twin's lookup where cores and tiles meet.

The plans are computed on the host, so the tests need no NPU. The tests compute the assignment of
items to cores by the rules of csrc/ascendc/device.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import TWIN_BACKENDS
from ops.parity import check_parity
from ops.specs import OPSPECS, Sample
from ops.specs.inputs import make_match_rows
from twins import compute_ascendc_plan

UB_910B = 192 * 1024
CORES = (1, 2, 7, 40, 48, 50)
COUNTS = (0, 1, 2, 7, 8, 47, 48, 49, 128, 1023, 1024, 1025, 50_000)
LOOKUPS = ("ngram_propose", "ngram_step_")
KERNEL_OPS = sorted({spec.kernel for spec in OPSPECS.values()})
MIN_SPAN, HALO, MAX_TILE, STEP = 1024, 64, 8448, 128
TWIN = next(b for b in TWIN_BACKENDS if b.twin is not None and b.twin.device == "npu")


SIZES = {
    "batch": 3, "capacity": 4096, "k": 8, "total_tokens": 9, "num_slots": 9, "num_positions": 7,
    "num_seq_lens": 5,
}  # fmt: skip


def make_plan(op: str, cores: int = 48, ub_bytes: int = UB_910B, **sizes: int) -> dict[str, Any]:
    result = compute_ascendc_plan(op, SIZES | sizes, cores, ub_bytes)
    assert result is not None
    return result


def count_assignments(layout: dict[str, int], items: int, blocks: int) -> np.ndarray[Any, Any]:
    """Returns for each item the number of cores that process the item."""
    counts = np.zeros(items, np.int64)
    per_pass, cores = layout["per_pass"], layout["cores"]
    for core in range(min(cores, blocks)):
        for first in range(core * per_pass, items, cores * per_pass):
            counts[first : first + per_pass] += 1
    return counts


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_each_operator_has_a_plan_unless_cores_or_memory_are_missing(op: str) -> None:
    result = make_plan(op)
    assert 1 <= len(result["launches"]) <= 3
    assert all(1 <= blocks <= 48 for _, blocks in result["launches"])
    for cores, ub_bytes in ((0, UB_910B), (-1, UB_910B), (48, 0), (48, 1000)):
        assert compute_ascendc_plan(op, SIZES, cores, ub_bytes) is None


@pytest.mark.parametrize("cores", CORES)
def test_each_item_is_assigned_to_one_core(cores: int) -> None:
    for items in COUNTS:
        for op, keys, sizes in (
            ("prepare_inputs_padded", (), {"batch": items}),
            ("prepare_input_ids_", (), {"batch": items}),
            ("compute_slot_mapping_", (), {"num_slots": items}),
            ("prepare_inputs", ("tokens",), {"total_tokens": items}),
            ("correct_spec_state_", ("requests",), {"num_seq_lens": items, "batch": 0}),
            ("ngram_step_", ("requests",), {"batch": items}),
        ):
            result = make_plan(op, cores, **sizes)
            layout = result["tiling"]
            for key in keys:
                layout = layout[key]
            assert 0 <= layout["cores"] <= cores
            blocks = max((blocks for _, blocks in result["launches"]), default=0)
            assert (count_assignments(layout, items, blocks) == 1).all(), (op, items, cores)


@pytest.mark.parametrize("cores", CORES)
def test_each_part_of_an_append_is_assigned_to_one_core(cores: int) -> None:
    for batch in COUNTS[1:]:
        for max_new in (1, 5, 256):  # tokens per request, which the plan receives as total_tokens
            result = make_plan("store_append_", cores, batch=batch, total_tokens=max_new)
            tiling = result["tiling"]
            plan_blocks, copy_blocks, write_blocks = (blocks for _, blocks in result["launches"])
            assert plan_blocks == 1
            assert copy_blocks == write_blocks == tiling["parts"]["cores"] <= cores
            assert 1 <= tiling["spans"] <= max(1, max_new // 16)
            num_parts = batch * tiling["spans"]
            assert (count_assignments(tiling["parts"], num_parts, copy_blocks) == 1).all()
            assert result["workspace_bytes"] == 32 * batch
    assert make_plan("store_append_", cores, batch=1, total_tokens=1024)["tiling"]["spans"] == cores


def test_empty_batch_needs_no_launch() -> None:
    for op in ("ngram_propose", "ngram_step_", "prepare_next_token_ids", "prepare_input_ids_"):
        assert make_plan(op, batch=0)["launches"] == []
    assert make_plan("compute_slot_mapping_", num_slots=0)["launches"] == []
    # prepare_inputs always writes the first element of query_start_loc_out, which is 0.
    assert len(make_plan("prepare_inputs", batch=0, total_tokens=0)["launches"]) == 1


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("cores", CORES)
def test_lookup_spans_cover_the_rows(op: str, cores: int) -> None:
    for batch in COUNTS[1:]:
        for capacity in (0, 1, 1023, 1024, 1025, 32 * 1024, 128 * 1024, 2**31 - 1):
            result = make_plan(op, cores, batch=batch, capacity=capacity)
            tiling = result["tiling"]
            spans = tiling["spans"]
            assert 1 <= spans <= max(1, min(cores, -(-capacity // MIN_SPAN)))
            assert tiling["launches"] == len(result["launches"])
            assert tiling["items"]["cores"] == result["launches"][0][1] <= cores
            if tiling["launches"] == 1:
                # One core reads a row, because there are enough rows or a row fits in a tile.
                assert spans == 1
                assert tiling["items"] == tiling["requests"]
                assert result["workspace_bytes"] == 0
                continue
            assert capacity > MAX_TILE - 2 * HALO
            assert batch < 2 * cores
            assert tiling["items"] == {"per_pass": 1, "cores": min(cores, batch * spans)}
            assert result["workspace_bytes"] == batch * spans * 32
            # The items of a row have different spans. The order of the spans is rotated per row.
            for i in (0, 1, batch - 1):
                rotated = {(i * spans + s + i) % spans for s in range(spans)}
                assert rotated == set(range(spans))
    single_row = make_plan(op, cores, batch=1, capacity=128 * 1024)
    assert single_row["tiling"]["items"]["cores"] == cores


# The following test runs the lookup on the twin.


def find_piece_starts(length: int, cores: int) -> list[int]:
    """Returns where the pieces of a single row begin, without the first piece, by the rules of
    csrc/ascendc/lookup.h. A piece is the part of the row that a core reads with one tile."""

    def round_up(size: int) -> int:
        return -(-size // STEP) * STEP

    num_ends = length - 1
    span = max(MIN_SPAN, round_up(-(-(num_ends + HALO) // cores)))
    max_tile = (MAX_TILE - HALO) // STEP * STEP
    starts = []
    for begin in range(-HALO, num_ends, span):
        size = min(span, num_ends - begin)
        tile = round_up(-(-size // -(-size // max_tile)))
        starts += list(range(begin, begin + size, tile))
    return starts[1:]


@pytest.mark.parametrize("n", [*range(1, 9), 33, 64])
@pytest.mark.parametrize(("cores", "length"), [(1, 8257), (1, 8258), (1, 16_300), (3, 27_000)])
def test_twin_finds_matches_at_piece_starts(cores: int, length: int, n: int) -> None:
    starts = find_piece_starts(length, cores)
    ends = [start + offset for start in starts for offset in (-1, 0, 1)]
    match_ends = [end for end in ends if end + 2 * n + 40 < length]
    assert match_ends or length == 8257  # one tile reads the row
    rows = make_match_rows(match_ends[:6], n, length)
    spec = OPSPECS["ngram_propose"]
    assert TWIN.twin is not None
    with TWIN.twin.use_cores(cores):
        for i, row in enumerate(rows):
            lookup = (1, n, 4, i % 2, False, 2**40, 2**31 - 1, n % 2 == 0)
            args = (row[None], np.array([length], np.int32), None, None, *lookup)
            check_parity(spec, TWIN, Sample(f"{cores}-{length}-{n}-{i}", args))
