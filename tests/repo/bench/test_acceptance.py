"""The acceptance ops on a few synthetic conversations: their counts agree with independent ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.replay import ReplayOptions, replay

from tools.bench.__main__ import main
from tools.bench.ops import acceptance

pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets of conversations of two turns each, composed of a few phrases."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(16)
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(8)]
    for name in ("one", "two"):
        lines = []
        for number in range(6):
            ids = [token for phrase in rng.choices(phrases, k=180) for token in phrase]
            turns = [
                {"prompt_token_ids": ids[at : at + 20], "completion_token_ids": ids[at + 20 : end]}
                for at, end in ((0, 90), (90, 180))
            ]
            lines.append(json.dumps({"id": str(number), "turns": turns}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def run_op(data: Path, op: str, *arguments: str) -> dict[str, Any]:
    file = data.parent / "out.json"
    assert main([op, "--data", str(data), "--json", str(file), *arguments]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_acceptance_of_index_and_simulator_agree(data: Path) -> None:
    peer = "--peer=vllm-ngram-k5"
    indexed = run_op(data, "acceptance", peer)
    assert indexed["settings"]["engine"] == "index"
    simulated = run_op(data, "acceptance", peer, "--engine", "simulator")
    for document in (indexed, simulated):
        for result in document["results"]:
            result.pop("engine", None)
    assert indexed["results"] == simulated["results"]
    drafted = indexed["results"][0]["whole_by_limit"]["drafted_per_step"]
    assert drafted == sorted(drafted)
    assert drafted[0] < drafted[-1]


def test_acceptance_fails_if_index_and_simulator_differ(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ignore_costs(config: NgramConfig, engine: str) -> NgramProposer:
        return NgramProposer(NgramConfig(sizes="ladder", k=config.k), "index")

    monkeypatch.setattr(acceptance, "NgramProposer", ignore_costs)
    assert main(["acceptance", "--data", str(data), "--peer=none"]) == 2
    assert "k 8, limit 2: Counts(" in capsys.readouterr().err


def test_padded_acceptance_equals_replay_of_padded_drafts(data: Path) -> None:
    *sets, summary = run_op(data, "acceptance-padded")["results"]
    assert summary["sets"] == len(sets) == 2
    bounds = {"ngram": (2, 5, False), "1-16": (1, 16, True)}
    for result in sets:
        for lookup, (min_n, max_n, overlap) in bounds.items():
            options = ReplayOptions(
                min_n=min_n,
                max_n=max_n,
                k=5,
                match_policy="latest",
                overlap=overlap,
                drafts="padded",
            )
            tokens_per_step = replay([data / f"{result['set']}.jsonl"], options).total
            assert tokens_per_step.tokens_per_step is not None
            expected = round(tokens_per_step.tokens_per_step, 4)
            assert result["k5"][lookup] == expected
