"""The plans of the AscendC kernels: host arithmetic, tested without an NPU. The assignment of items
to cores is computed here by the rules of csrc/ascendc/device.h."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.specs import OPSPECS
from twins import ascendc_plan

UB_910B = 192 * 1024
RESERVED = 8 * 1024 + 256
CORES = (1, 2, 7, 40, 48, 50)
COUNTS = (0, 1, 2, 7, 8, 47, 48, 49, 128, 1023, 1024, 1025, 50_000)
LOOKUPS = ("ngram_propose", "ngram_step_")
KERNEL_OPS = sorted({spec.kernel for spec in OPSPECS.values() if "npu" not in spec.no_kernel})
TILE_UNIT, MIN_SPAN, HALO, MAX_TILE = 256, 1024, 64, 8448


def plan(op: str, cores: int = 48, ub_bytes: int = UB_910B, **sizes: int) -> dict[str, Any]:
    some = {"capacity": 4096, "k": 8, "total_tokens": 9, "num_slots": 9, "num_positions": 7}
    every = {"batch": 3, "num_seq_lens": 5, **some, **sizes}
    made = ascendc_plan(op, every, cores, ub_bytes)
    assert made is not None
    return made


def items_taken(shares: dict[str, int], items: int, blocks: int) -> np.ndarray[Any, Any]:
    """The number of times that the cores of a launch take each item."""
    taken = np.zeros(items, np.int64)
    per_pass, cores = shares["per_pass"], shares["cores"]
    for core in range(min(cores, blocks)):
        for first in range(core * per_pass, items, cores * per_pass):
            taken[first : first + per_pass] += 1
    return taken


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_every_operator_has_a_plan(op: str) -> None:
    made = plan(op)
    assert 1 <= len(made["launches"]) <= 2
    for kernel, blocks in made["launches"]:
        assert kernel.startswith("ngram_npu_")
        assert 1 <= blocks <= 48
    assert made["workspace_bytes"] >= 0


@pytest.mark.parametrize("op", KERNEL_OPS)
@pytest.mark.parametrize(("cores", "ub_bytes"), [(0, UB_910B), (-1, UB_910B), (48, 0), (48, 1000)])
def test_a_machine_that_cannot_run_it_gets_no_plan(op: str, cores: int, ub_bytes: int) -> None:
    sizes = {"batch": 3, "num_seq_lens": 5, "capacity": 4096, "k": 8, "total_tokens": 9}
    sizes |= {"num_slots": 9, "num_positions": 7}
    assert ascendc_plan(op, sizes, cores, ub_bytes) is None


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="ascendc_plan: op"):
        ascendc_plan("ngram_index_step_", {}, 48, UB_910B)


@pytest.mark.parametrize("cores", CORES)
def test_shares_take_each_item_once(cores: int) -> None:
    for items in COUNTS:
        for op, share, sizes in (
            ("prepare_inputs_padded", (), {"batch": items}),
            ("prepare_input_ids_", (), {"batch": items}),
            ("compute_slot_mapping_", (), {"num_slots": items}),
            ("prepare_inputs", ("tokens",), {"total_tokens": items}),
            ("correct_spec_state_", ("requests",), {"num_seq_lens": items, "batch": 0}),
            ("ngram_step_", ("requests",), {"batch": items}),
        ):
            made = plan(op, cores, **sizes)
            shares = made["tiling"]
            for name in share:
                shares = shares[name]
            assert 0 <= shares["cores"] <= cores
            blocks = max((blocks for _, blocks in made["launches"]), default=0)
            assert (items_taken(shares, items, blocks) == 1).all(), (op, items, cores)


def test_nothing_to_do_is_no_launch() -> None:
    for op in ("ngram_propose", "ngram_step_", "prepare_next_token_ids", "prepare_input_ids_"):
        assert plan(op, batch=0)["launches"] == []
    assert plan("compute_slot_mapping_", num_slots=0)["launches"] == []
    assert len(plan("prepare_inputs", batch=0, total_tokens=0)["launches"]) == 1  # the 0 in front


@pytest.mark.parametrize("op", LOOKUPS)
@pytest.mark.parametrize("cores", CORES)
def test_lookup_spans(op: str, cores: int) -> None:
    for batch in COUNTS[1:]:
        for capacity in (0, 1, 1023, 1024, 1025, 32 * 1024, 128 * 1024, 2**31 - 1):
            made = plan(op, cores, batch=batch, capacity=capacity)
            tiling = made["tiling"]
            spans = tiling["spans"]
            assert 1 <= spans <= max(1, min(cores, -(-capacity // MIN_SPAN)))
            assert tiling["launches"] == len(made["launches"])
            assert tiling["items"]["cores"] == made["launches"][0][1] <= cores
            if tiling["launches"] == 1:
                # Each row belongs to one core: there are enough rows, or each is one tile.
                assert spans == 1
                assert tiling["items"] == tiling["requests"]
                assert made["workspace_bytes"] == 0
                continue
            assert capacity > MAX_TILE - 2 * HALO
            assert batch < 2 * cores
            assert tiling["items"] == {"per_pass": 1, "cores": min(cores, batch * spans)}
            assert made["workspace_bytes"] == batch * spans * 32
            # Each item of the row has its own span, also after the rotation.
            for i in (0, 1, batch - 1):
                turned = {(i * spans + s + i) % spans for s in range(spans)}
                assert turned == set(range(spans))


@pytest.mark.parametrize("op", LOOKUPS)
def test_a_single_long_row_takes_all_cores(op: str) -> None:
    assert plan(op, cores=48, batch=1, capacity=128 * 1024)["tiling"]["items"]["cores"] == 48


@pytest.mark.parametrize("op", LOOKUPS)
def test_lookup_tiles_fit_what_is_there(op: str) -> None:
    """Counts the buffers of csrc/ascendc/lookup.h, for ub_bytes down to where none fits."""
    smallest = None
    for ub_bytes in range(4 * 1024, 256 * 1024, 1024):
        sizes = {"batch": 64, "capacity": 1 << 20, "k": 1}
        made = ascendc_plan(op, sizes, 8, ub_bytes)
        if made is None:
            assert smallest is None
            continue
        smallest = smallest or ub_bytes
        tile = made["tiling"]["tile_tokens"]
        words = tile // 32
        used = 3 * tile * 4 + 2 * (words + 8) * 4 + 3 * words * 4 + 3 * words * 4 + 32 + 32
        assert used <= ub_bytes - RESERVED
        assert tile % TILE_UNIT == 0
        assert 2 * HALO < tile <= MAX_TILE
    assert smallest is not None
    assert smallest <= 64 * 1024
    # With less memory the second launch takes fewer requests at a time, down to one.
    for cores, batch, k in ((1, 1024, 64), (1, 1, 64), (48, 1, 64), (8, 100, 1)):
        for ub_bytes in range(smallest, 64 * 1024, 1024):
            tiling = plan(op, cores, ub_bytes, batch=batch, k=k, capacity=1 << 20)["tiling"]
            alone = tiling["launches"] == 1
            per_request = (0 if alone else 8 * tiling["spans"]) + -(-k // 8) * 8 + 4 + 72 + 8
            words = tiling["tile_tokens"] // 32
            search = 12 * tiling["tile_tokens"] + 4 * (8 * words + 3 * 8 + 8) if alone else 0
            per_pass = tiling["requests"]["per_pass"]
            there = ub_bytes - RESERVED - 9 * 32 - search
            assert 4 * per_pass * per_request <= there
            even = min(-(-batch // cores), 32)
            assert per_pass == even or 8 * per_pass * per_request > there
    assert plan(op, ub_bytes=UB_910B)["tiling"]["tile_tokens"] == MAX_TILE
