"""What `tune` recommends, against a grid and a replay (docs/guides/tune.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ngram_npu.replay import ReplayOptions
from ngram_npu.replay import replay as real_replay
from ngram_npu.tune import Candidate

from tools.bench.__main__ import main
from tools.bench.ops import tune_recorded

pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two"):
        lines = [
            {"prompt": f"{n} a b c d e " * 9, "completion": f"{name} b c d {n} a b c " * 9}
            for n in range(6)
        ]
        file = tmp_path / "data" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tune_recorded, "CANDIDATES", tune_recorded.CANDIDATES[:3])
    monkeypatch.setattr(tune_recorded, "GRID", (Candidate.of(k=1), Candidate.of(k=12)))
    monkeypatch.setattr(tune_recorded, "CACHE", tmp_path / "cache" / "grid.jsonl")
    return tmp_path


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    file = folder / "out.json"
    assert main([*arguments, "--json", str(file)]) == 0
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return results


def test_tune_against_a_grid_and_a_replay(recorded: Path) -> None:
    *sets, whole = run(recorded, "tune-recorded", "--data", str(recorded / "data"))
    assert [found["set"] for found in sets] == ["one", "two"]
    for found in sets:
        for share in ("c02", "c05", "c10"):
            assert found[share]["whole"]["share_of_best"] <= 1
            assert found[share]["prediction"]["reported_over_replayed"] == 1
    least = min(found["c05"]["whole"]["share_of_best"] for found in sets)
    assert whole["c05"]["whole"]["least_share_of_best"] == least
    assert whole["c05"]["prediction"]["most_off"] == 0


def test_a_replay_that_counts_otherwise_shows(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_others(**given: Any) -> Any:
        return real_replay(**{**given, "options": ReplayOptions(min_n=8, max_n=8, k=1)})

    monkeypatch.setattr(tune_recorded, "replay", with_others)
    *_, whole = run(recorded, "tune-recorded", "--data", str(recorded / "data"))
    assert whole["c05"]["prediction"]["most_off"] > 0
