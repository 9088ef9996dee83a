"""Shared by the tests of tuning: traffic that repeats itself, settings, step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu_cli.tune import (
    BASELINE,
    Candidate,
)

FEW = (
    BASELINE,
    Candidate.of(min_n=2, max_n=3, k=2, match_policy="latest"),
    Candidate.of(sizes="ladder", k=16, min_draft_probability=0.1),
)


def talk(count: int, seed: int = 0, name: str = "") -> list[dict[str, Any]]:
    """Conversations that repeat themselves, some more than others."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        phrase = rng.integers(0, 40, int(rng.integers(20, 60))).tolist()
        noise = rng.integers(0, 40, 30).tolist()
        turn = {
            "prompt_token_ids": phrase + noise[: number % 20],
            "completion_token_ids": phrase[5:] + noise[number % 7 :],
        }
        lines.append({"id": f"{name}{number}", "turns": [turn, turn]})
    return lines


def alike(count: int, file: Path) -> Path:
    """Conversations of two turns whose answers are parts of one text that no prompt holds."""
    text = np.random.default_rng(7).integers(0, 10**6, 400).tolist()
    lines = []
    for number in range(count):
        begin = 37 * number % 300
        parts = text[begin : begin + 60], text[begin + 60 : begin + 100]
        turns = [
            {"prompt_token_ids": [10**6 + number, 10**6 + turn], "completion_token_ids": part}
            for turn, part in enumerate(parts)
        ]
        lines.append({"id": f"{number}", "turns": turns})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def cost_file(path: Path, *steps: tuple[int, float, float], **more: Any) -> str:
    entries = [{"batch": b, "verified": v, "seconds": s} for b, v, s in steps]
    path.write_text(json.dumps({"format": "ngram_npu.cost/1", "steps": entries, **more}))
    return str(path)
