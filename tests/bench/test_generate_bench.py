"""Tokens per second of the example runner, measured on the tests' tiny model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from runner import tiny_model

from tools.bench.ops import generate
from tools.bench.ops.generate import GenerateOp
from tools.bench.options import Options, Size

ROOT = Path(__file__).resolve().parents[2]


def _measured(monkeypatch: pytest.MonkeyPatch, *sizes: Size) -> list[dict[str, Any]]:
    corpus = list(tiny_model.transcript(random.Random(0), 4000))
    folder = str(tiny_model.cached(ROOT / "build" / "tiny-model"))
    monkeypatch.setattr(GenerateOp, "prepared", lambda self, options: (folder, {"log": corpus}))
    monkeypatch.setattr(generate, "OUTPUT_TOKENS", 16)
    reported: list[dict[str, Any]] = []
    results, skipped = GenerateOp().run(Options(sizes=sizes, rounds=2), reported.append)
    assert results == reported
    assert not skipped
    return results


def test_another_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = generate._generated
    monkeypatch.setattr(
        generate, "_generated", lambda *given: [[0, *text[1:]] for text in said(*given)]
    )
    (found,) = _measured(monkeypatch, Size(2, 40))
    assert found["requests_with_other_text"]["hf"] == 2
    assert found["requests_with_other_text"]["none"] == 0
