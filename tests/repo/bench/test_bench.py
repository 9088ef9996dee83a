"""Tests each op of the benchmark on the CPU with small sizes, from the command line to the JSON
file, and the harness that compares and times implementations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import NgramConfig, NgramProposer

from tools.bench import measure
from tools.bench.__main__ import main
from tools.bench.data import make_workload
from tools.bench.measure import Drafts, Implementation
from tools.bench.ops import OPS, read_logs
from tools.bench.ops.index import IndexStepImplementation
from tools.bench.options import BenchError, Options, Size

SLOW_OPS = {"feed", "host-latency"}
"""Ops that start several processes."""
OPS_TESTED_ELSEWHERE = {op for op in OPS if op.startswith("acceptance")} | {
    "ascendc-model",
    "draft-length",
    "fleet",
    "prompt-scopes",
    "read-logs",
    "vllm-draft-graphs",
    "vllm-draft-length",
    "vllm-end-to-end",
    "vllm-fleet",
}


def run_op(file: Path, op: str, *arguments: str) -> dict[str, Any]:
    assert main([op, "--rounds", "2", "--steps", "2", *arguments, "--json", str(file)]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["command"].startswith(f"python -m tools.bench {op}")
    assert {"cpu", "cores", "instruction_set"} <= document["machine"].keys()
    assert {"python", "numpy", "ngram_npu"} <= document["versions"].keys()
    return document


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.slow] if op in SLOW_OPS else [])
        for op in sorted(OPS.keys() - OPS_TESTED_ELSEWHERE)
    ],
)
def test_op_writes_results_and_variants_of_ours_draft_the_same(op: str, tmp_path: Path) -> None:
    document = run_op(tmp_path / "out.json", op, "--sizes", "4x256", "--data-kind", "random")
    assert document["results"]
    for result in document["results"]:
        if any(peer.startswith("ours:") for peer in result.get("peers", ())):
            assert result["same_drafts"] is True
        for figures in (result["ours"], *result["peers"].values()) if "ours" in result else ():
            assert 0 < figures["p10_us"] <= figures["median_us"] <= figures["worst_step_us"]
            assert figures["what"]


@pytest.mark.slow
def test_read_logs_measures_one_and_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_logs, "LOGS", [replace(log, megabytes=3) for log in read_logs.LOGS])
    turns = [{"prompt": f"Question {i}?", "completion": "An answer. " * 20} for i in range(10)]
    (tmp_path / "log.jsonl").write_text(json.dumps({"turns": turns}))
    document = run_op(tmp_path / "out.json", "read-logs", "--data", str(tmp_path / "log.jsonl"))
    assert [result["log"] for result in document["results"]] == [log.name for log in read_logs.LOGS]
    for result in document["results"]:
        assert 3 <= result["megabytes"] < 4
        two_processes = result["jobs 2"]
        assert two_processes["cpu_s"]["median"] > two_processes["cpu_s_of_this_process"]["median"]


@pytest.mark.parametrize("probability", [None, 0.3])
def test_index_step_with_ladder_drafts_like_proposer(probability: float | None) -> None:
    variant = "sizes=ladder" if probability is None else f"min_draft_probability={probability}"
    options = Options(data_kind="periodic", k=8, engine="index").apply_changes(variant)
    workload = make_workload(Size(5, 300), options)
    workload.token_ids %= 17
    implementation = IndexStepImplementation(workload, options)
    implementation.reset()
    config = NgramConfig(
        sizes="ladder", k=8, min_draft_probability=probability, max_len=workload.capacity
    )
    proposer = NgramProposer(config, "index")
    tokens, lengths = workload.token_ids.copy(), workload.lengths[0].copy()
    for step in range(4):
        expected = proposer.step(tokens, lengths, workload.sampled[step])
        drafts = implementation.get_drafts(
            implementation.function(*implementation.get_arguments(step))
        )
        counts = expected.num_draft_tokens.tolist()
        rows = zip(expected.draft_token_ids, counts, strict=True)
        assert drafts == [row[:count].tolist() for row, count in rows]
        assert max(counts) > 0


class FixedDrafter(Implementation):
    """Returns the same drafts in each step."""

    semantics = (2, 4, 4, "earliest")

    def __init__(self, name: str, drafts: Drafts) -> None:
        self.name = name
        self.function = lambda: drafts

    def get_drafts(self, result: Any) -> Drafts:
        return list(result)


def test_measure_rejects_implementations_with_different_drafts() -> None:
    drafter, same_drafter = FixedDrafter("first", [[1], []]), FixedDrafter("same", [[1], []])
    measurement = measure.measure([drafter, same_drafter], 20, Options(rounds=1, steps=1))
    assert measurement.same_drafts is True
    assert measurement.drafted_share == 0.5
    other_drafter = FixedDrafter("other", [[2], []])
    with pytest.raises(BenchError, match="other and first: expected the same drafts"):
        measure.measure([drafter, other_drafter], 20, Options(rounds=1, steps=1))


def test_ratio_is_median_of_rounds_not_ratio_of_medians() -> None:
    """A slow round slows both implementations, so the round's ratio is unchanged."""
    assert measure.compute_spread([10.0, *range(10)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    ours, peer = [1.0, 10.0, 2.0], [5.0, 50.0, 30.0]
    assert measure.compute_ratios(peer, ours)["median"] == 5.0


def test_median_interval_contains_median_in_95_percent_of_samples() -> None:
    """Of 9 values, 2 to 7 are below the median in 492 of 512 cases, which is 96 %."""
    interval = measure.compute_median_interval([9.0, *range(1, 9)])
    assert interval == {"median": 5.0, "low": 2.0, "high": 8.0}
    assert measure.compute_median_interval(range(6)) == {"median": 2.5, "low": 0.0, "high": 5.0}
    with pytest.raises(ValueError, match="at least 6 values, got 5"):
        measure.compute_median_interval(range(5))
