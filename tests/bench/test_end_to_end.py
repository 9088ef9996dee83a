"""Tokens per second of vLLM's engine, with stand-ins for the engines, and of the example runner, on
the tests' tiny model: texts that differ are counted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tools.bench.ops import generate
from tools.bench.ops.generate import GenerateOp
from tools.bench.ops.vllm_end_to_end import VllmEndToEnd
from tools.bench.options import Options, Size

ROOT = Path(__file__).resolve().parents[2]


class Engine:
    def __init__(self, seconds: float, first: int) -> None:
        self._seconds, self._first = seconds, first

    def run(self, prompts: list[list[int]]) -> dict[str, Any]:
        texts = [[self._first, prompt[-1]] for prompt in prompts]
        counts = dict.fromkeys(map("vllm:spec_decode_num_{}".format, COUNTED), 10)
        seconds = dict.fromkeys(("seconds", "cpu_seconds", "drafting_seconds"), self._seconds)
        return {**seconds, **counts, "token_ids": texts}


COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


def test_another_text_of_an_engine_is_counted() -> None:
    engines: Any = {
        "ours": Engine(1, 7),
        "no-speculation": Engine(4, 7),
        "vllm-ngram": Engine(2, 8),
    }
    found = VllmEndToEnd()._compared(engines, Size(3, 1024), list(range(5000)), 2)
    assert list(found["requests_with_other_text"].values()) == [0, 0, 3]
    ratios = {name: of["median"] for name, of in found["ratio"].items()}
    assert ratios == {"ours over no-speculation": 4, "ours over vllm-ngram": 2}


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
    (found,) = GenerateOp().run(Options(sizes=(Size(2, 40),), rounds=2), {})
    assert found["requests_with_other_text"]["hf"] == 2
    assert found["requests_with_other_text"]["none"] == 0
