"""What the model of the AscendC kernels' costs must show; a design that costs more is caught. The
model of the CUDA lookup's tiles: its results for small batches are known by hand, and those for the
design are within the bounds that the design was made for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.bench.__main__ import main
from tools.bench.data import Workload, make_workload
from tools.bench.ops.ascendc_model import (
    CORES,
    MODEL,
    SHORT_ROWS,
    Twin,
    bookkeeping,
    lookup_result,
    lookups,
    modelled,
    short_rows,
)
from tools.bench.options import Options, Size
from tools.cuda_model import (
    FIGURES,
    RESULT,
    TILE,
    batches,
    clusters,
    designs,
    one_wave,
    pieces,
    simulate,
    tiles_of,
)

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
                found += _results(twin, make_workload(Size.parse(size), options), options)
        for short in SHORT_ROWS:
            options = Options(data_kind="nomatch")
            found += _results(twin, short_rows(short, options), options)
    return found


def _results(twin: Twin, data: Workload, options: Options) -> list[Result]:
    calls = lookups(data, options)
    return [lookup_result(twin, op, call, data, options.k) for op, call in calls.items()]


def test_lookups(results: list[Result]) -> None:
    assert len(results) == 2 * (2 * len(GATED_SIZES) + len(SHORT_ROWS))
    for result in results:
        assert not problems(result), f"{result['op']} {result['size']} {result['data_kind']}"


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
        found = problems(lookup_result(twin, "ngram_propose", call, data, options.k))
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


def test_the_file_tells_no_settings_that_nothing_asked_for(tmp_path: Path) -> None:
    assert main(["ascendc-model", "--sizes", "1x1k", "--json", str(tmp_path / "model.json")]) == 0
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["settings"] == {"config": [2, 4], "k": 4, "match_policy": "earliest"}


SMALL = replace(FIGURES, multiprocessors=2)
OLD, NEW, _ = designs(100)
RAGGED = ("256 ragged up to 128k", "256 ragged up to 128k, text-like")


def test_every_token_is_read_once() -> None:
    lengths = [1, TILE, TILE + 1, 10 * TILE + 7, 0]
    for blocks in (
        pieces(lengths, 16 * TILE, SMALL),
        one_wave(lengths, 16 * TILE, 4, SMALL),
        clusters(lengths, 16 * TILE),
    ):
        assert sum(tokens for block in blocks for _, tokens, _ in block) == sum(lengths)


def test_shares_are_equal_whatever_the_lengths() -> None:
    blocks = one_wave([100 * TILE, *[5] * 12], 100 * TILE, 4, SMALL)
    tiles = [sum(count for count, _, _ in block) for block in blocks]
    assert len(blocks) == 8
    assert sum(tiles) == 100 + 12
    # Of 125 places, a tile each and one for each request, 16 are a share.
    assert tiles == [15, *[16] * 5, 5 + 5, 7]


def test_a_long_row_among_many_is_one_blocks_where_rows_are_cut_by_capacity() -> None:
    blocks = pieces([100 * TILE, *[5] * 99], 100 * TILE, SMALL)
    assert max(sum(count for count, _, _ in block) for block in blocks) == 100


def test_time_grows_with_the_tokens_and_the_waves() -> None:
    one = [[(1, TILE, True)]]
    short, waves = simulate(one, OLD, f=SMALL)
    assert waves == pytest.approx(1 / 10)
    longer, _ = simulate([[(9, 9 * TILE, True)]], OLD, f=SMALL)
    full, _ = simulate(one * 10, OLD, f=SMALL)
    twice, waves = simulate(one * 11, OLD, f=SMALL)
    assert waves == pytest.approx(1.1)
    assert short < longer
    assert full < twice == pytest.approx(2 * short, rel=0.1)
    assert simulate([[(9, 9 * TILE, True)]], OLD, 0.5, SMALL)[0] > longer
    alone, _ = simulate([[(1, TILE, False)]], OLD, f=SMALL)
    assert alone < short


def test_no_time_is_shorter_than_memory_takes() -> None:
    tokens = 10_000 * TILE
    blocks = one_wave([tokens], tokens, NEW.blocks_each)
    assert simulate(blocks, NEW)[0] > tokens / FIGURES.tokens_per_us


def test_what_is_recorded() -> None:
    record = json.loads(RESULT.read_text())
    results = record["results"]
    assert results.keys() == batches().keys()
    assert "model" in record["what"]
    for name, found in results.items():
        assert found["one wave"]["waves"] <= 1, name
        assert found["one wave over bound"] <= 1.3, name
        assert found["tokens"] == sum(batches()[name][0])
    for name in RAGGED:
        assert results[name]["one wave"]["us"] < results[name]["pieces"]["us"]
        assert results[name]["one wave"]["us"] < results[name]["clusters"]["us"]
    assert tiles_of(0) == 1
