"""Tokens per second of vLLM's engine, with stand-ins for the engines, and of the example runner, on
the tests' tiny model: rounds, ratios, and texts that differ."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.bench.__main__ import main
from tools.bench.ops import generate
from tools.bench.ops.generate import GenerateOp
from tools.bench.ops.vllm_end_to_end import CONTESTANTS, OUTPUT_TOKENS, VllmEndToEnd
from tools.bench.options import Options, Size

ROOT = Path(__file__).resolve().parents[2]
CORPUS = list(range(5000))
SECONDS = {"ours": 1.0, "no-speculation": 4.0, "vllm-ngram": 2.0, "ours-async": 0.5}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran, one after the other; `ours-async` gives one request another text."""
    ran: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, prompts: list[list[int]]) -> dict[str, Any]:
            ran.append(self.name)
            texts = [[prompt[-1]] for prompt in prompts]
            if self.name == "ours-async":
                texts[0] = [-1]
            drafts = 0 if self.name == "no-speculation" else 10
            return {
                "seconds": SECONDS[self.name],
                "cpu_seconds": 2 * SECONDS[self.name],
                "drafting_seconds": SECONDS[self.name] / 100 if drafts else 0.0,
                "token_ids": texts,
                "vllm:spec_decode_num_drafts": drafts,
                "vllm:spec_decode_num_draft_tokens": 4 * drafts,
                "vllm:spec_decode_num_accepted_tokens": 3 * drafts,
            }

    @contextmanager
    def started(self: VllmEndToEnd, name: str, *_: Any) -> Iterator[Engine]:
        yield Engine(name)

    monkeypatch.setattr(VllmEndToEnd, "prepared", lambda self: (Path(), CORPUS))
    monkeypatch.setattr(VllmEndToEnd, "started", started)
    return ran


def test_rounds_ratios_and_texts(order: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = ["vllm-end-to-end", "--sizes", "3x1k", "--rounds", "2", "--json", str(file)]
    assert main(command) == 0
    names = list(CONTESTANTS)
    assert order == [*names, *names, *reversed(names)]
    found = json.loads(file.read_text())
    (result,) = found["results"]
    speeds = {name: of["median"] for name, of in result["tokens_per_second"].items()}
    assert speeds == {name: 3 * OUTPUT_TOKENS / seconds for name, seconds in SECONDS.items()}
    assert {name: of["median"] for name, of in result["ratio"].items()} == {
        "ours over no-speculation": 4,
        "ours over vllm-ngram": 2,
        "ours-async over no-speculation": 8,
        "ours-async over vllm-ngram": 4,
    }
    assert {name: of["median"] for name, of in result["cpu_seconds"].items()} == {
        name: 2 * seconds for name, seconds in SECONDS.items()
    }
    assert {name: of["median"] for name, of in result["drafting_ms"].items()} == {
        "ours": 10, "vllm-ngram": 20, "ours-async": 5,
    }  # fmt: skip
    assert {name: of["median"] for name, of in result["drafting_ratio"].items()} == {
        "ours": 2, "ours-async": 4,
    }  # fmt: skip
    assert "no-speculation" not in result["drafts"]
    assert result["drafts"]["ours"] == {"tokens_per_draft": 4, "accepted_per_draft": 3}
    assert result["requests_with_other_text"] == {
        "ours": 0,
        "no-speculation": 0,
        "vllm-ngram": 0,
        "ours-async": 1,
    }
    assert "threads" not in found["settings"]


def test_another_text_of_the_runner_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from runner import tiny_model

    corpus = list(tiny_model.transcript(random.Random(0), 4000))
    folder = str(tiny_model.cached(ROOT / "build" / "tiny-model"))
    said = generate._generated
    monkeypatch.setattr(GenerateOp, "prepared", lambda self, options: (folder, {"log": corpus}))
    monkeypatch.setattr(generate, "OUTPUT_TOKENS", 16)
    monkeypatch.setattr(
        generate, "_generated", lambda *given: [[0, *text[1:]] for text in said(*given)]
    )
    (found,), skipped = GenerateOp().run(Options(sizes=(Size(2, 40),), rounds=2), lambda _: None)
    assert not skipped
    assert found["requests_with_other_text"]["hf"] == 2
    assert found["requests_with_other_text"]["none"] == 0
