"""The two measurements that stand behind docs/guides/tune.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ngram_npu.replay import ReplayOptions
from ngram_npu.replay import replay as real_replay
from ngram_npu.tune import Candidate

from tools.bench.__main__ import main
from tools.bench.ops import tune_recorded, vllm_predicted
from tools.bench.ops.vllm_predicted import VllmPredicted

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


def test_what_an_engine_wrote_is_replayed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine repeats its prompt: every draft of 4 is right but for the one at the end."""

    class Engine:
        def run(self, prompts: list[list[int]]) -> dict[str, Any]:
            return {"token_ids": [prompt[-512:][:96] for prompt in prompts]}

    @contextmanager
    def started(*_: Any) -> Iterator[Engine]:
        yield Engine()

    monkeypatch.setattr(VllmPredicted, "prepared", lambda self: (Path(), list(range(5000))))
    monkeypatch.setattr(VllmPredicted, "started", started)
    monkeypatch.setattr(vllm_predicted, "MEASURED", tmp_path / "measured.json")
    measured = [
        {
            "size": f"{batch}x{context}k",
            "batch": batch,
            "ratio": {"ours over no-speculation": {"median": ratio}},
            "drafts": {"ours": {"tokens_per_draft": 4.0, "accepted_per_draft": 3.9}},
        }
        for batch, context, ratio in ((1, 1, 2.5), (16, 1, 1.2), (1, 8, 2.0), (16, 8, 1.2))
    ]
    (tmp_path / "measured.json").write_text(json.dumps({"results": measured}))
    found = {result["size"]: result for result in run(tmp_path, "vllm-predicted")}
    one = found["1x1k"]
    # The first two tokens find nothing; 94 more in 19 steps, 18 of which drafted 4 tokens.
    assert one["tokens_per_step"] == pytest.approx(95 / 20, abs=0.3)
    assert one["predicted"]["accepted_per_draft"] == pytest.approx(4, abs=0.1)
    assert one["speedup_over_tokens_per_step"] == pytest.approx(2.5 / one["tokens_per_step"], 1e-3)
    eight = found["1x8k"]
    assert eight["predicted"]["speedup"] == pytest.approx(2.5, 1e-3), "the same drafts as at 1k"
    assert eight["predicted_over_measured"] == pytest.approx(1.25, 1e-3)
