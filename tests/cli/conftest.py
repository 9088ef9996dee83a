"""Defines the fixtures of the tests of the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import EXAMPLE_LINE, make_conversations


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes objects or raw lines to a file of recorded conversations,
    the input of `replay`; the file is compressed if its name ends in `.gz`."""

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
def example(write_jsonl: Callable[..., Path]) -> Path:
    """A file of recorded conversations with the example of cli_helpers.py."""
    return write_jsonl(EXAMPLE_LINE, name="input/talk.jsonl")


@pytest.fixture
def traffic_file(tmp_path: Path) -> Path:
    """A file with forty conversations that repeat parts of their own text."""
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in make_conversations(40)))
    return path
