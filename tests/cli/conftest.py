"""Defines the fixtures of the tests of the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes objects, or raw lines, to a file of JSON Lines."""

    def write(*lines: object, name: str = "log.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write
