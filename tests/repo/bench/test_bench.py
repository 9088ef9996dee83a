"""Every op on the CPU end to end, on sizes that take no time; its data, and what is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig, NgramProposer

from tools.bench import stats
from tools.bench.__main__ import main
from tools.bench.data import make_workload
from tools.bench.measure import Contestant, measure
from tools.bench.ops import OPS
from tools.bench.ops.index import IndexStepContestant
from tools.bench.ops.spec_state import Correction, CorrectSpecState, Eager, Fused, Parts
from tools.bench.options import BenchError, Options, Size
from tools.bench.stats import Drafts

SIZE = Size(5, 300)


def run(file: Path, op: str, *arguments: str) -> dict[str, Any]:
    assert main([op, "--rounds", "2", "--steps", "2", *arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["command"].startswith(f"python -m tools.bench {op}")
    assert {"cpu", "cores", "caches", "instruction_set"} <= found["machine"].keys()
    assert {"python", "numpy", "ngram_npu"} <= found["versions"].keys()
    return found


ELSEWHERE = {"ascendc-model", "generate", "learn", "store-size", "vllm-end-to-end"} | {
    op for op in OPS if op.startswith(("acceptance", "costs", "tune", "vllm-predicted"))
}
"""In the other files here, as far as they compare something."""


@pytest.mark.parametrize("op", sorted(OPS.keys() - ELSEWHERE))
def test_every_op_runs(op: str, tmp_path: Path) -> None:
    found = run(tmp_path / "out.json", op, "--sizes", "4x256", "--data-kind", "random")
    assert found["results"]
    for result in found["results"]:
        if any(peer.startswith("ours:") for peer in result.get("peers", ())):
            assert result["same_drafts"] is True
        for figures in (result["ours"], *result["peers"].values()) if "ours" in result else ():
            assert 0 < figures["p10_us"] <= figures["median_us"] <= figures["worst_step_us"]
            assert figures["what"]


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
    first = contestants[0].tensors
    assert (first["num_computed_tokens"] > 100).all()
    assert (first["slot_mapping"] >= 0).all()
    for contestant in contestants[1:]:
        for name, tensor in contestant.tensors.items():
            assert np.array_equal(tensor, first[name]), (type(contestant).__name__, name)


class Drafter(Contestant):
    semantics = (2, 4, 4, "earliest")

    def __init__(self, name: str, drafts: Drafts) -> None:
        self.name = name
        self.function = lambda: drafts

    def drafts(self, result: Any) -> Drafts:
        return list(result)


def test_different_drafts_are_an_error() -> None:
    """Their times would compare nothing."""
    one = Drafter("one", [[1], []])
    found = measure([one, Drafter("same", [[1], []])], 20, Options(rounds=1, steps=1))
    assert found.same_drafts is True
    assert found.drafted_share == 0.5
    with pytest.raises(BenchError, match="other and one draft differently"):
        measure([one, Drafter("other", [[2], []])], 20, Options(rounds=1, steps=1))


def test_spread_and_ratio() -> None:
    """A slow machine in one round slows both: their quotient stays, the quotient of medians not."""
    assert stats.spread([10.0, *range(10)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    ours, peer = [1.0, 10.0, 2.0], [5.0, 50.0, 30.0]
    assert stats.ratios(peer, ours)["median"] == 5.0
