"""Tests that modelled costs of AscendC kernels keep their bounds and that a worse plan does not."""

from __future__ import annotations

from typing import Any

from tools.bench.data import make_workload
from tools.bench.ops.ascendc_model import (
    CORES,
    MODEL,
    PADDED_SLOTS,
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
MAX_WORK_TO_FLOOR = 1.25


def find_problems(result: Result) -> list[str]:
    """Returns the bounds that a lookup's result exceeds.

    The modelled time of 128x32k must be at most 1.5 times the bandwidth floor. The work of 1x128k
    without a match must be at most 1.25 times the floor, so that all cores share it. ``work_us``
    excludes latencies and overheads.
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
        if kind == "nomatch" and result["work_to_floor"] > MAX_WORK_TO_FLOOR:
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
        for short_size in SHORT_ROWS:
            options = Options(data_kind="nomatch")
            results += model_lookups(twin, make_short_rows(short_size, options), options)
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
        result = model_lookup(twin, "ngram_propose", call, data, options)
    idle_problem, spread_problem = find_problems(result)
    assert "cores idle" in idle_problem
    assert "not spread" in spread_problem


def test_modelled_time_depends_on_the_parameters() -> None:
    twin, parameters = Twin(), [parameter.value for parameter in MODEL.values()]
    data = make_workload(Size.parse("128x8k"), Options(data_kind="nomatch"))
    lookup = make_lookups(data, Options())["ngram_propose"]
    contended_call = make_bookkeeping(Size(1024, 4096), 4)["prepare_inputs_padded"]

    def count_cycles(call: Any, name: str, factor: float) -> float:
        model = parameters.copy()
        model[list(MODEL).index(name)] *= factor
        return float(twin.count_costs(call, model)["cycles"])

    with twin.replace_cpu():
        half, full = (count_cycles(lookup, "gm_bytes_per_cycle", f) for f in (1 / 64, 1 / 32))
        waits = count_cycles(contended_call, "same_line", 1)
        waits -= count_cycles(contended_call, "same_line", 0)
        free_model = [1e9, 1e9, *[0.0] * (len(parameters) - 2)]
        free_cycles = twin.count_costs(lookup, free_model)["cycles"]
    assert 1.9 < half / full <= 2  # bandwidth bounds the time
    assert waits >= 4 * MODEL["same_line"].value  # 128 bytes per core: at least 4 cores per line
    assert free_cycles < 1


def test_bookkeeping_costs_are_at_most_linear_in_the_requests() -> None:
    """The kernels use at most 16 scalar loads and 2.5 waits per request, on all cores together."""
    twin, batch = Twin(), 1024
    with twin.replace_cpu():
        for op, call in make_bookkeeping(Size(batch, 4096), 4).items():
            result = model_call(twin, call)
            assert result["model_us"] > result["work_us"] > 0, op
            assert result["counts"]["copies"] > 0, op
            assert result["counts"]["scalar_gm"] <= 16 * batch, op
            assert result["counts"]["syncs"] <= 2.5 * batch, op


def test_padding_of_slots_takes_less_than_one_scalar_access_per_eight_slots() -> None:
    twin = Twin()
    with twin.replace_cpu():
        calls = make_bookkeeping(Size(8, 4096), 4, PADDED_SLOTS)
        for op in ("compute_slot_mapping_", "correct_spec_state_"):
            assert model_call(twin, calls[op])["counts"]["scalar_ub"] < PADDED_SLOTS / 8, op
