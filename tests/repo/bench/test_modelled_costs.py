"""What the model of the AscendC kernels' costs must show; a design that costs more is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools.bench.data import make_workload
from tools.bench.ops.ascendc_model import (
    CORES,
    MODEL,
    SHORT_ROWS,
    Twin,
    all_lookups,
    bookkeeping,
    lookup_result,
    lookups,
    modelled,
    peer_reads,
    short_rows,
)
from tools.bench.options import Options, Size

Result = dict[str, Any]

GATED_SIZES = ("1x128k", "128x32k")
TO_FLOOR = 1.5
WORK_SPREAD = 20


def problems(result: Result) -> list[str]:
    """Of a lookup's result: what a design must not cost.

    128x32k within one and a half times the bandwidth floor, and 1x128k without a match spread so
    evenly that a core's work is a twentieth. (A row with a match is not read to its end.) Of the
    modelled time, in which launches have their latency, nothing of the sort is true: it falls to a
    third.
    """
    found = []
    size, kind = result["size"], result["data_kind"]
    if result["tokens_read_per_live_token"] > 1.1:
        found.append("reads live tokens more than once")
    if size in GATED_SIZES and result["scalar_accesses_per_live_token"] > 1 / 16:
        found.append("scalar accesses grow with the tokens")
    if size == "128x32k" and result["model_to_floor"] > TO_FLOOR:
        found.append(f"more than {TO_FLOOR} times the bandwidth floor")
    if size == "1x128k":
        if result["counts"]["blocks"] < CORES:
            found.append("one request leaves cores idle")
        if kind == "nomatch" and result["work_spread"] < WORK_SPREAD:
            found.append("one request's work is not spread evenly")
    return found


@pytest.fixture(scope="module")
def results() -> list[Result]:
    twin = Twin()
    found = []
    with twin.in_place_of_the_cpu():
        for kind in ("nomatch", "periodic"):
            options = Options(data_kind=kind)
            for size in GATED_SIZES:
                found += all_lookups(twin, make_workload(Size.parse(size), options), options)
        for short in SHORT_ROWS:
            options = Options(data_kind="nomatch")
            found += all_lookups(twin, short_rows(short, options), options)
    return found


def test_lookups(results: list[Result]) -> None:
    assert len(results) == 2 * (2 * len(GATED_SIZES) + len(SHORT_ROWS))
    for result in results:
        assert not problems(result), f"{result['op']} {result['size']} {result['data_kind']}"


def test_the_peer_goes_through_the_whole_buffer() -> None:
    options = Options(data_kind="nomatch")
    short = peer_reads(short_rows(Size(1, 300), options), options)
    data = short_rows(Size(96, 300), options)
    live = int(data.lengths[0].sum())
    batch = peer_reads(data, replace(options, max_n=6))
    assert short["cores"] == 1
    assert short["loads_per_position"] == 2 + 3 + 4
    assert batch["cores"] == CORES
    assert batch["loads_per_position"] == 2 + 3 + 4 + 5 + 6
    assert batch["positions_per_live_token"] == pytest.approx(96 * 128 * 1024 / live, rel=1e-4)
    assert 2 < batch["work_us"] / short["work_us"] < 4  # two rows a core, which share the bandwidth


@pytest.mark.parametrize(
    ("size", "plan", "says"),
    [
        ("1x128k", {"spans": 1}, {"cores idle", "not spread"}),
        ("1x128k", {"tile_tokens": 256}, {"more than once"}),
        ("128x32k", {"tile_tokens": 256}, {"more than once", "bandwidth floor"}),
    ],
)
def test_a_worse_plan_is_caught(size: str, plan: dict[str, int], says: set[str]) -> None:
    twin = Twin()
    options = Options(data_kind="nomatch")
    data = make_workload(Size.parse(size), options)
    call = lookups(data, options)["ngram_propose"]
    with twin.in_place_of_the_cpu(), twin.planned_worse(**plan):
        found = problems(lookup_result(twin, "ngram_propose", call, data, options))
    assert len(found) == len(says)
    for text in says:
        assert any(text in problem for problem in found), found


def test_scalars_for_each_token_are_caught(results: list[Result]) -> None:
    assert problems({**results[0], "scalar_accesses_per_live_token": 1.0})


def test_times_follow_from_the_figures(results: list[Result]) -> None:
    data = make_workload(Size.parse("128x8k"), Options(data_kind="nomatch"))
    call = lookups(data, Options())["ngram_propose"]
    full = [figure.value for figure in MODEL.values()]
    bandwidth = list(MODEL).index("gm_bytes_per_cycle")
    twin = Twin()

    def cycles(share: float) -> float:
        model = full.copy()
        model[bandwidth] *= share
        return float(twin.counts(call, CORES, model)["cycles"])

    with twin.in_place_of_the_cpu():
        # Where bandwidth bounds all, half of it is twice the time.
        assert 1.9 < cycles(1 / 64) / cycles(1 / 32) <= 2
        free = twin.counts(call, CORES, [1e9, 1e9, *[0.0] * (len(full) - 2)])["cycles"]
    assert free < 1
    for result in results:
        assert result["work_us"] < result["model_us"] < result["with_launches_us"]
        if result["data_kind"] == "nomatch":
            assert result["floor_us"] < result["work_us"]


def test_copies_at_one_line_wait_for_each_other() -> None:
    twin = Twin()
    call = bookkeeping(Size(1024, 4096), 4)["prepare_inputs_padded"]
    full = [figure.value for figure in MODEL.values()]
    free = full.copy()
    free[list(MODEL).index("same_line")] = 0.0
    with twin.in_place_of_the_cpu():
        waits = twin.counts(call, CORES, full)["cycles"] - twin.counts(call, CORES, free)["cycles"]
    # 128 bytes a core are four cores' a line at least.
    assert waits >= 4 * MODEL["same_line"].value


def test_a_request_costs_what_it_needs_itself() -> None:
    """No core reads all requests by scalars from global memory, and none waits twice for each."""
    twin = Twin()
    batch = 1024
    with twin.in_place_of_the_cpu():
        for op, call in bookkeeping(Size(batch, 4096), 4).items():
            result = modelled(twin, call)
            assert result["model_us"] > result["work_us"] > 0, op
            assert result["counts"]["copies"] > 0, op
            assert result["counts"]["scalar_gm"] <= 16 * batch, op
            assert result["counts"]["syncs"] <= 2.5 * batch, op
