"""Fixtures of the replay's tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_helpers import EXAMPLE_LINE


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write objects (or raw lines) to a replay file; one named `.gz` is compressed."""

    def write(*lines: object, name: str = "talk.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


@pytest.fixture
def talk(write_jsonl: Callable[..., Path]) -> Path:
    """The example."""
    return write_jsonl(EXAMPLE_LINE, name="input/talk.jsonl")
