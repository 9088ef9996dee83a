"""What drafting yields and what `tune` recommends, on a few conversations made of a few phrases."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu.engines.vllm.v2 import NgramSpeculator
from ngram_npu_cli.replay import ReplayOptions, load_inputs, replay, tokenize
from ngram_npu_cli.tune import Candidate

from tools.bench.__main__ import main
from tools.bench.ops import acceptance, acceptance_padded, tune_recorded
from tools.bench.ops.acceptance import proposed

pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets, whose conversations have turns."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(16)
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(8)]
    for name in ("one", "two"):
        lines = []
        for number in range(6):
            ids = [token for phrase in rng.choices(phrases, k=180) for token in phrase]
            turns = [
                {"prompt_token_ids": ids[at : at + 20], "completion_token_ids": ids[at + 20 : to]}
                for at, to in ((0, 90), (90, 180))
            ]
            lines.append(json.dumps({"id": str(number), "turns": turns}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def run(data: Path, op: str, *arguments: str) -> dict[str, Any]:
    file = data.parent / "out.json"
    assert main([op, "--data", str(data), "--json", str(file), *arguments]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_index_counts_what_the_simulator_counts(data: Path) -> None:
    peer = "--peer=vllm-ngram-k5"
    ours = run(data, "acceptance", peer)
    assert ours["settings"]["engine"] == "index"
    simulated = run(data, "acceptance", peer, "--engine", "simulator")
    for found in (ours, simulated):
        for result in found["results"]:
            result.pop("engine", None)
    assert ours["results"] == simulated["results"]
    drafted = ours["results"][0]["whole_by_limit"]["drafted_per_step"]
    assert drafted == sorted(drafted)
    assert drafted[0] < drafted[-1]


def test_an_index_that_counts_otherwise_ends_the_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shorter(config: NgramConfig, engine: str) -> NgramProposer:
        return NgramProposer(NgramConfig(sizes="ladder", k=config.k), "index")

    monkeypatch.setattr(acceptance, "NgramProposer", shorter)
    assert main(["acceptance", "--data", str(data), "--peer=none"]) == 2
    assert "k 8, limit 2: Counts(" in capsys.readouterr().err


def test_replay_knows_what_the_v2_runner_verifies(data: Path) -> None:
    """A replay of padded drafts yields the tokens of the runner's own call."""
    *sets, summary = run(data, "acceptance-padded")["results"]
    assert summary["sets"] == len(sets) == 2
    bounds = {"ngram": (2, 5, False), "1-16": (1, 16, True)}
    for found in sets:
        for lookup, (low, high, overlap) in bounds.items():
            replayed = replay(
                [data / f"{found['set']}.jsonl"],
                ReplayOptions(
                    min_n=low,
                    max_n=high,
                    k=5,
                    match_policy="latest",
                    overlap=overlap,
                    drafts="padded",
                ),
            ).total
            assert replayed.tokens_per_step is not None
            expected = round(replayed.tokens_per_step, 4)
            assert found["k5"][lookup] == expected


def test_a_runner_that_fills_up_with_another_token(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item, _) = load_inputs([data])
    requests = tokenize(item, None)
    right = proposed(requests, acceptance_padded.V2Runner("ngram", 5), 5)
    propose = NgramSpeculator.propose

    def wrong(self: Any, batch: Any, *rest: Any) -> Any:
        drafts = propose(self, batch, *rest)
        return drafts.roll(1, dims=1)

    monkeypatch.setattr(NgramSpeculator, "propose", wrong)
    assert proposed(requests, acceptance_padded.V2Runner("ngram", 5), 5) != right


@pytest.fixture
def _few_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_recorded, "CANDIDATES", tune_recorded.CANDIDATES[:3])
    monkeypatch.setattr(tune_recorded, "GRID", (Candidate.of(k=1), Candidate.of(k=12)))
    monkeypatch.setattr(tune_recorded, "CACHE", tmp_path / "cache" / "grid.jsonl")


@pytest.mark.usefixtures("_few_settings")
def test_tune_against_a_grid_and_a_replay(data: Path) -> None:
    *sets, whole = run(data, "tune-recorded")["results"]
    assert [found["set"] for found in sets] == ["one", "two"]
    for found in sets:
        for share in ("c02", "c05", "c10"):
            assert found[share]["whole"]["share_of_best"] <= 1
            assert found[share]["prediction"]["reported_over_replayed"] == 1
    least = min(found["c05"]["whole"]["share_of_best"] for found in sets)
    assert whole["c05"]["whole"]["least_share_of_best"] == least
    assert whole["c05"]["prediction"]["most_off"] == 0


@pytest.mark.usefixtures("_few_settings")
def test_a_replay_that_counts_otherwise_shows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_others(**given: Any) -> Any:
        return replay(**{**given, "options": ReplayOptions(min_n=8, max_n=8, k=1)})

    monkeypatch.setattr(tune_recorded, "replay", with_others)
    *_, whole = run(data, "tune-recorded")["results"]
    assert whole["c05"]["prediction"]["most_off"] > 0
