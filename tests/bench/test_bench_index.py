"""The index in the harness: it drafts as the scan does, every lap, and its memory is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tools.bench.data import make_workload
from tools.bench.ops import OPS
from tools.bench.ops.index import IndexStepContestant
from tools.bench.options import BenchError, Options, Size
from tools.bench.report import lines

OPTIONS = Options(sizes=(Size(3, 600),), data_kind="periodic", rounds=2, steps=3)


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_step_is_compared_with_the_scan(frontend: str) -> None:
    options = OPTIONS.changed(f"frontend={frontend}")
    peers = ("ours:engine=scan", "ours:match=latest")
    options = Options(**{**vars(options), "peers": peers})
    seen: list[Any] = []
    results, skipped = OPS["ngram_index_step_"].run(options, seen.append)
    assert results == seen
    assert skipped == {}
    assert results[0]["same_drafts"] is True
    assert results[0]["engine"] == "index"
    assert set(results[0]["ratio"]) == set(peers)


def test_an_engine_that_is_none() -> None:
    with pytest.raises(BenchError, match="engine: expected one of index, scan"):
        OPS["ngram_index_step_"].run(Options(sizes=(Size(1, 9),), engine="tree"), print)


def test_every_lap_begins_with_the_same_index() -> None:
    workload = make_workload(Size(3, 600), OPTIONS)
    contestant = IndexStepContestant(workload, OPTIONS)
    laps = []
    for _ in range(2):
        contestant.reset()
        steps = [contestant.function(*contestant.arguments(step)) for step in range(9)]
        laps.append([contestant.drafts(step) for step in steps])
    assert laps[0] == laps[1]
    statistics = contestant.index.statistics
    assert (statistics.rebuilds_shorter, statistics.rebuilds_rewritten) == (0, 0)


def test_build(monkeypatch: pytest.MonkeyPatch) -> None:
    # Text needs a tokenizer; what is held and grown can be seen on any data.
    monkeypatch.setattr(
        "tools.bench.ops.index._workload",
        lambda size, options, data: make_workload(size, OPTIONS),
    )
    results, _ = OPS["index-build"].run(OPTIONS, lambda result: None)
    *built, grown = results
    assert len(built) == 12
    for result in built:
        assert result["build_ns_per_token"]["median"] > 0
        assert 0 < result["bytes_per_token"] < 16
        # A period of 61 ids has 61 grams of each length.
        levels = result["config"][1] - result["config"][0] + 1
        assert result["entries_per_token"] == pytest.approx(61 * levels / 600, abs=0.01)
        assert len(lines(result)) == 1
    assert grown["growth_steps"] == 200
    assert grown["growth_worst_us"] >= grown["growth_p99_us"] >= grown["growth_median_us"] > 0
    assert np.isfinite(grown["growth_worst_us"])
    assert len(lines(grown)) == 1
