"""Fixtures of the tests of the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import EXAMPLE_LINE, make_talk


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects (or raw lines) to a replay file; one named `.gz` is compressed."""

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
    """A file with the example."""
    return write_jsonl(EXAMPLE_LINE, name="input/talk.jsonl")


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Forty conversations that repeat themselves."""
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in make_talk(40)))
    return path
