"""The modelled costs of the AscendC kernels meet their bounds; a plan that costs more does not."""

from __future__ import annotations

from typing import Any

from tools.bench.data import make_workload
from tools.bench.ops.ascendc_model import (
    CORES,
    MODEL,
    SHORT_ROWS,
    Twin,
    make_bookkeeping,
    make_lookups,
    make_short_rows,
    model_call,
    model_lookup,
    model_lookups,
)
from tools.bench.options import Options, Size

Result = dict[str, Any]

BOUNDED_SIZES = ("1x128k", "128x32k")
MAX_TO_FLOOR = 1.5
MIN_WORK_SPREAD = 20


def find_problems(result: Result) -> list[str]:
    """Returns the bounds that a lookup's result exceeds.

    128x32k must take at most one and a half times the bandwidth floor, and 1x128k without a match
    must be spread so evenly that a core's work is a twentieth. (A row with a match is not read to
    its end.) The modelled time includes the latency of launches, so this holds for the work alone.
    """
    problems = []
    size, kind = result["size"], result["data_kind"]
    if result["tokens_read_per_live_token"] > 1.1:
        problems.append("reads live tokens more than once")
    if size in BOUNDED_SIZES and result["scalar_accesses_per_live_token"] > 1 / 16:
        problems.append("scalar accesses grow with the tokens")
    if size == "128x32k" and result["model_to_floor"] > MAX_TO_FLOOR:
        problems.append(f"more than {MAX_TO_FLOOR} times the bandwidth floor")
    if size == "1x128k":
        if result["counts"]["blocks"] < CORES:
            problems.append("one request leaves cores idle")
        if kind == "nomatch" and result["work_spread"] < MIN_WORK_SPREAD:
            problems.append("one request's work is not spread evenly")
    return problems


def test_lookups_stay_within_their_bounds() -> None:
    twin = Twin()
    results: list[Result] = []
    with twin.replace_cpu():
        for kind in ("nomatch", "periodic"):
            options = Options(data_kind=kind)
            for size in BOUNDED_SIZES:
                data = make_workload(Size.parse(size), options)
                results += model_lookups(twin, data, options)
        for short in SHORT_ROWS:
            options = Options(data_kind="nomatch")
            results += model_lookups(twin, make_short_rows(short, options), options)
    assert len(results) == 2 * (2 * len(BOUNDED_SIZES) + len(SHORT_ROWS))
    for result in results:
        assert not find_problems(result), f"{result['op']} {result['size']} {result['data_kind']}"
        assert result["work_us"] < result["model_us"] < result["with_launches_us"]
        if result["data_kind"] == "nomatch":
            assert result["floor_us"] < result["work_us"]
    assert find_problems({**results[0], "scalar_accesses_per_live_token": 1.0})


def test_worse_plan_exceeds_the_bounds() -> None:
    twin, options = Twin(), Options(data_kind="nomatch")
    data = make_workload(Size.parse("1x128k"), options)
    call = make_lookups(data, options)["ngram_propose"]
    with twin.replace_cpu(), twin.override_plan(spans=1):
        idle, uneven = find_problems(model_lookup(twin, "ngram_propose", call, data, options))
    assert "cores idle" in idle
    assert "not spread" in uneven


def test_time_follows_from_the_figures_of_the_model() -> None:
    twin, figures = Twin(), [figure.value for figure in MODEL.values()]
    data = make_workload(Size.parse("128x8k"), Options(data_kind="nomatch"))
    lookup = make_lookups(data, Options())["ngram_propose"]
    contended = make_bookkeeping(Size(1024, 4096), 4)["prepare_inputs_padded"]

    def cycles(call: Any, name: str, factor: float) -> float:
        model = figures.copy()
        model[list(MODEL).index(name)] *= factor
        return float(twin.count_costs(call, CORES, model)["cycles"])

    with twin.replace_cpu():
        half, full = (cycles(lookup, "gm_bytes_per_cycle", f) for f in (1 / 64, 1 / 32))
        waits = cycles(contended, "same_line", 1) - cycles(contended, "same_line", 0)
        free = twin.count_costs(lookup, CORES, [1e9, 1e9, *[0.0] * (len(figures) - 2)])["cycles"]
    assert 1.9 < half / full <= 2  # bandwidth bounds all
    assert waits >= 4 * MODEL["same_line"].value  # 128 bytes per core: at least 4 cores per line
    assert free < 1


def test_bookkeeping_costs_are_linear_in_the_requests() -> None:
    """No core reads all requests by scalars of global memory, or waits twice per request."""
    twin, batch = Twin(), 1024
    with twin.replace_cpu():
        for op, call in make_bookkeeping(Size(batch, 4096), 4).items():
            result = model_call(twin, call)
            assert result["model_us"] > result["work_us"] > 0, op
            assert result["counts"]["copies"] > 0, op
            assert result["counts"]["scalar_gm"] <= 16 * batch, op
            assert result["counts"]["syncs"] <= 2.5 * batch, op
