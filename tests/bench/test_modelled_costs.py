"""What the model of the AscendC kernels' costs must show; a design that costs more is caught.

Not named before test_bench_cli.py: that watches this process's memory, of which this takes much.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tools.bench.data import make_workload
from tools.bench.ops.ascendc_model import (
    CORES,
    MODEL,
    AscendcModel,
    Twin,
    bookkeeping,
    lookup_result,
    lookups,
    modelled,
)
from tools.bench.options import Options, Size

Result = dict[str, Any]


def problems(result: Result) -> list[str]:
    """Of a lookup's result: what a design must not cost, whatever the size."""
    found = []
    if result["read_per_live_byte"] > 1.1:
        found.append("reads live tokens more than once")
    if result["scalar_accesses_per_live_token"] > 1 / 16:
        found.append("scalar accesses grow with the tokens")
    if result["size"] == "128x32k" and result["model_to_floor"] > 2:
        found.append("more than twice the bandwidth floor")
    if result["size"] == "1x128k":
        if result["counts"]["blocks"] < CORES:
            found.append("one request leaves cores idle")
        if result["work_spread"] < 20:
            found.append("one request's work is not spread evenly")
    return found


@pytest.fixture(scope="module")
def results() -> list[Result]:
    twin = Twin()
    found = []
    with twin.in_place_of_the_cpu():
        for size in ("1x128k", "128x32k"):
            options = Options(data_kind="nomatch")
            data = make_workload(Size.parse(size), options)
            for op, call in lookups(data, options).items():
                found.append(lookup_result(twin, op, call, data))
    return found


def test_lookups(results: list[Result]) -> None:
    assert len(results) == 4
    for result in results:
        assert not problems(result), f"{result['op']} {result['size']}"


def _more_scalars(result: Result) -> None:
    result["scalar_accesses_per_live_token"] += 1


def _fewer_blocks(result: Result) -> None:
    result["counts"]["blocks"] -= 1


@pytest.mark.parametrize(
    ("worsen", "says"),
    [
        (lambda r: r.update(read_per_live_byte=1.2), "more than once"),
        (_more_scalars, "scalar accesses"),
        (lambda r: r.update(size="128x32k", model_to_floor=2.1), "twice the bandwidth"),
        (_fewer_blocks, "cores idle"),
        (lambda r: r.update(work_spread=19.0), "not spread"),
    ],
)
def test_a_worse_design_is_caught(
    results: list[Result], worsen: Callable[[Result], None], says: str
) -> None:
    result = deepcopy(results[0])
    worsen(result)
    assert any(says in problem for problem in problems(result))


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
        assert result["floor_us"] < result["work_us"] < result["model_us"]


def test_every_operator_has_a_modelled_cost() -> None:
    twin = Twin()
    with twin.in_place_of_the_cpu():
        for op, call in bookkeeping(Size(128, 4096), 4).items():
            result = modelled(twin, call)
            assert result["counts"]["copies"] > 0, op
            assert result["model_us"] > result["work_us"] > 0, op


def test_every_assumption_has_a_source() -> None:
    assert set(AscendcModel.assumptions["figures"]) == set(MODEL)
    for name, figure in MODEL.items():
        assert figure.source, name
        assert figure.unit, name
        assert figure.value > 0, name
