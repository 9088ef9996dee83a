"""tools.pythons finds the other Pythons and reports those that are missing or fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import pythons

ABSENT = "3.14" if sys.version_info[:2] != (3, 14) else "3.13"


def _python(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_oldest_is_the_one_promised() -> None:
    text = (pythons.ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={pythons.SUPPORTED[0]}"' in text


def test_one_of_pyenv_is_found_behind_a_broken_one_on_path(tmp_path: Path) -> None:
    _python(tmp_path / "bin" / f"python{ABSENT}", "echo no version is set >&2; exit 127")
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    found, reason = pythons.find(ABSENT, environment)
    assert found is None
    assert "no version is set" in reason
    for patch in (9, 10):  # 10 is the newest, although as text it sorts first
        good = _python(tmp_path / f".pyenv/versions/{ABSENT}.{patch}/bin/python{ABSENT}", "exit 0")
        assert pythons.find(ABSENT, environment) == (good, "")


def test_a_missing_python_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert pythons.main(["--version", ABSENT], environment) == 0
    assert capsys.readouterr().out == f"Python {ABSENT}: not found, not tried\n"


def test_a_python_that_fails_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'case "$1" in -c) exit 0;; esac; echo no module named venv; exit 3'
    _python(tmp_path / f"python{ABSENT}", script)
    assert pythons.main(["--version", ABSENT], {"PATH": str(tmp_path)}) == 1
    said = capsys.readouterr().out
    assert "failed" in said
    assert "no module named venv\nexit status 3" in said
