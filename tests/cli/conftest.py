"""Defines the fixtures of the tests of the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes objects, or raw lines, to a file of JSON Lines."""

    def write(*lines: object) -> Path:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write
