"""Fixtures of the tests of tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tune_helpers import talk


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in talk(40)))
    return path


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
