"""Every op on the CPU end to end, on sizes that take no time; its data, and what is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import _C, NgramConfig, NgramProposer, reference

from tools.bench.__main__ import main
from tools.bench.data import MAX_NEW_TOKENS, lap_steps, make_workload
from tools.bench.ops import OPS, memory
from tools.bench.ops.crossover import wake
from tools.bench.ops.index import IndexStepContestant
from tools.bench.ops.spec_state import Correction, CorrectSpecState, Eager, Fused, Parts
from tools.bench.options import DATA_KINDS, Options, Size

SIZE = Size(5, 300)


def run(file: Path, op: str, *arguments: str) -> dict[str, Any]:
    assert main([op, "--rounds", "2", "--steps", "2", *arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["command"].startswith(f"python -m tools.bench {op}")
    assert {"cpu", "cores", "caches", "instruction_set"} <= found["machine"].keys()
    assert {"python", "numpy", "ngram_npu"} <= found["versions"].keys()
    return found


ELSEWHERE = {"ascendc-model", "generate", "vllm-end-to-end", "vllm-predicted"} | {
    op for op in OPS if op.startswith(("acceptance", "tune"))
}
"""In test_modelled_costs.py, test_generate_bench.py, test_end_to_end.py, test_tune_bench.py,
test_acceptance.py."""


@pytest.mark.parametrize("op", sorted(OPS.keys() - ELSEWHERE))
def test_every_op_runs(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STEPS", 300)
    monkeypatch.setattr(memory, "VARIANTS", ("numpy", "numpy-sliced"))
    found = run(tmp_path / "out.json", op, "--sizes", "4x256", "--data-kind", "random")
    assert found["results"]
    for result in found["results"]:
        assert result.get("growth_bytes", 0) < 1 << 20
        if any(peer.startswith("ours:") for peer in result.get("peers", ())):
            assert result["same_drafts"] is True
        for figures in (result["ours"], *result["peers"].values()) if "ours" in result else ():
            assert 0 < figures["p10_us"] <= figures["median_us"] <= figures["worst_step_us"]
            assert figures["what"]


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _C.num_threads()
    ours = ("ours:match_policy=latest", "ours:frontend=torch")
    peers = (f"--peer={name}" for name in (*ours, "read", "vllm-numba"))
    found = run(
        tmp_path / "out.json", "ngram_step_", "--sizes", "2x64", "3x128", "--threads", "1",
        "--cache", "l2-cold", f"--vllm-path={tmp_path}", "--data-kind", "random", *peers,
    )  # fmt: skip
    assert list(found["skipped"]) == ["vllm-numba"]
    assert found["settings"]["cache"] == "l2-cold"
    assert [result["size"] for result in found["results"]] == ["2x64", "3x128"]
    for result in found["results"]:
        assert list(result["ratio"]) == list(result["ratio_spread"]) == [*ours, "read"]
        assert result["same_drafts"] is True
    assert str(tmp_path) not in json.dumps(found)
    assert "skipped vllm-numba: " in capsys.readouterr().out
    assert _C.num_threads() == before


@pytest.mark.parametrize(
    "wrong",
    [
        ["--sizes", "many"],
        ["--sizes", "1x64", "--peer", "nobody"],
        ["--sizes", "1x64", "--peer", "ours:rounds=3"],
        ["--sizes", "1x64", "--peer", "ours:threads=many"],
        ["--sizes", "1x64", "--peer", "ours:sizes=wide"],
        ["--sizes", "1x64", "--peer", "ours:sizes=ladder"],  # which has no scan
        ["--sizes", "1x64", "--engine", "magic"],
        ["--config", "4,2"],
        ["--device", "cuda", "--data-kind", "nomatch"],
    ],
)
def test_wrong_use_is_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ngram_step_", "--data-kind", "random", *wrong]) == 2
    assert capsys.readouterr().err.startswith("tools.bench: ")


def test_memory_sees_a_copy() -> None:
    # Above 32 MB malloc always maps, so that what is freed has gone, whatever ran before.
    buffer = np.ones(12 << 20, np.int32)
    memory._forget_peak()
    before = memory.resident()
    buffer.copy()
    assert memory._peak() - before > buffer.nbytes // 2
    assert memory.resident() - before < buffer.nbytes // 2


def test_crossover_figures() -> None:
    """One thread 100 us for 1M tokens; two take 50 + 30: equal at 30 * 2 / 100 of a million."""
    result = {
        "batch": 1, "context": 1_000_000, "ours": {"median_us": 80.0},
        "peers": {"ours:threads=1": {"median_us": 100.0}},
    }  # fmt: skip
    found = wake(result, threads=2)
    assert (found["wake_us"], found["break_even_tokens"]) == (30.0, 600_000)


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize("k", [1, 4])
def test_steps_are_the_text_that_follows(kind: str, k: int) -> None:
    options = Options(data_kind=kind, k=k)
    work, again = make_workload(SIZE, options), make_workload(SIZE, options)
    assert (work.lengths[0] == SIZE.context).all()
    assert work.sampled.shape == (lap_steps(SIZE.context), SIZE.batch, k + 1)
    grown = np.diff(work.lengths, axis=0)
    assert (grown.min(), grown.max()) == (1, min(MAX_NEW_TOKENS, k + 1))
    for step, sampled in enumerate(work.sampled):
        for row, new in enumerate(sampled):
            start, end = work.lengths[step : step + 2, row]
            assert new[new >= 0].tolist() == work.token_ids[row, start:end].tolist()
    assert work.lengths.max() + k <= work.capacity
    for context in (1 << 10, 1 << 15, 1 << 17):
        assert lap_steps(context) * 2 <= context / 8  # else it would be another size
    assert len({tuple(row[:32]) for row in work.token_ids}) == SIZE.batch
    for name in ("token_ids", "lengths", "sampled"):
        assert np.array_equal(getattr(work, name), getattr(again, name))
    drafted = {
        bool(count > 0)
        for lengths in work.lengths
        for count in reference.ngram_propose(
            work.token_ids, lengths, None, None, 2, 4, 4, 0, False, work.capacity, None
        )[1]
    }
    assert kind not in ("nomatch", "periodic") or drafted == {kind == "periodic"}


@pytest.mark.parametrize("least", [None, 0.3])
def test_a_ladder_drafts_what_the_proposer_drafts(least: float | None, tmp_path: Path) -> None:
    variant = "sizes=ladder" if least is None else f"min_draft_probability={least}"
    options = Options(data_kind="periodic", k=8, engine="index").changed(variant)
    work = make_workload(SIZE, options)
    work.token_ids %= 17
    contestant = IndexStepContestant(work, options)
    contestant.reset()
    config = NgramConfig(sizes="ladder", k=8, min_draft_probability=least, max_len=work.capacity)
    proposer = NgramProposer(config, "index")
    tokens, lengths = work.token_ids.copy(), work.lengths[0].copy()
    for step in range(4):
        expected = proposer.step(tokens, lengths, work.sampled[step])
        drafts = contestant.drafts(contestant.function(*contestant.arguments(step)))
        counts = expected.num_draft_tokens.tolist()
        assert drafts == [
            row[:n].tolist() for row, n in zip(expected.draft_token_ids, counts, strict=True)
        ]
        assert max(counts) > 0
    torch_too = (f"--peer=ours:{variant}", f"--peer=ours:{variant},frontend=torch")
    found = run(
        tmp_path / "out.json", "ngram_index_step_", "--sizes", "2x64", "--data-kind", "random",
        *torch_too,
    )  # fmt: skip
    assert found["results"][0]["same_drafts"] is True


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
def test_every_lap_begins_with_the_same_index(frontend: str) -> None:
    options = Options(data_kind="periodic", frontend=frontend)
    contestant = IndexStepContestant(make_workload(Size(3, 600), options), options)
    laps = []
    for _ in range(2):
        contestant.reset()
        steps = [contestant.function(*contestant.arguments(step)) for step in range(9)]
        laps.append([contestant.drafts(step) for step in steps])
    assert laps[0] == laps[1]
    statistics = contestant.index.statistics
    assert (statistics.rebuilds_shorter, statistics.rebuilds_rewritten) == (0, 0)


def test_what_an_index_holds_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(sizes=(Size(3, 600),), data_kind="periodic", rounds=2)
    monkeypatch.setattr(
        "tools.bench.ops.index._workload", lambda size, _, data: make_workload(size, options)
    )
    found = OPS["index-build"].run(options, lambda result: None)[0]
    built, grown, ladders = found[:12], found[12], found[13:]
    for result in built:
        assert result["build_ns_per_token"]["median"] > 0
        assert 0 < result["bytes_per_token"] < 16
        # A period of 61 ids has 61 grams of each length.
        levels = result["config"][1] - result["config"][0] + 1
        assert result["entries_per_token"] == pytest.approx(61 * levels / 600, abs=0.01)
    for result, other in zip(ladders[::2], ladders[1::2], strict=True):
        assert result["entries_per_token"] == pytest.approx(61 * 5 / 600, abs=0.01)
        assert "entries_per_token" not in other
        assert result["bytes_per_token"] < other["bytes_per_token"]
    assert len(ladders) == 6
    assert grown["growth_steps"] == 200
    assert grown["growth_worst_us"] >= grown["growth_p99_us"] >= grown["growth_median_us"] > 0


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("k", [1, 4])
def test_corrections_agree(batch: int, k: int) -> None:
    options = Options(k=k)
    workload = CorrectSpecState().workload(Size(batch, 100), options)
    contestants: list[Correction] = [
        Fused(workload, options),
        Fused(workload, replace(options, frontend="torch")),
        Parts(workload, options),
        Eager(workload, options),
    ]
    for contestant in contestants:
        for step in range(3):
            contestant.function(*contestant.arguments(step))
    first = contestants[0].arrays
    assert (first["num_computed_tokens"] > 100).all()
    assert (first["slot_mapping"] >= 0).all()
    for contestant in contestants[1:]:
        for name, array in contestant.arrays.items():
            assert np.array_equal(array, first[name]), (type(contestant).__name__, name)
