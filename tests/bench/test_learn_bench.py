"""The learning curves of a bench run are those that the command prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ngram_npu.learn import LearnOptions, learn

from tools.bench.__main__ import main
from tools.bench.ops import learn as bench

pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")


def test_curves_and_a_large_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rng = random.Random(3)
    file = tmp_path / "data" / "one.jsonl"
    file.parent.mkdir()

    def said() -> str:
        return " ".join(rng.choices(words, k=60))

    lines = [{"prompt": said(), "completion": said()} for _ in range(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(bench, "LARGE_BYTES", 2 * file.stat().st_size)
    out = tmp_path / "out.json"
    assert main(["learn", "--data", str(file.parent), "--json", str(out)]) == 0
    found, large = json.loads(out.read_text())["results"]
    report = learn([file], options=LearnOptions(tokenizer="mistral-v1"))
    assert [of["tokens_per_step"] for of in found["known"].values()] == [
        round(of.tokens_per_step, 4) for of in report.curve
    ]
    assert found["by_k"]["k8"] == found["known"]["all"] != found["by_k"]["k32"]
    assert found["stored"]["answers"] == found["known"]["all"], "it holds all"
    assert found["stored"]["prompts too"] != found["stored"]["answers"]
    assert (found["set"], found["evaluated"], found["conversations"]) == ("one", 3, 30)
    assert (large["conversations"], large["answer_tokens"]) == (60, 2 * report.answer_tokens)
    assert large["points"] == 8
    assert large["peak_mb"] > 20
    monkeypatch.setattr(bench, "DEFAULT_TOKENIZER", "none")
    assert main(["learn", "--data", str(file.parent)]) == 2
