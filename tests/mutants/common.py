"""What the lists of faults share."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest
from twins import ROOT


def replace_once(name: str, text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{name}: its old text stands at {text.count(old)} places")
    return text.replace(old, new)


def failing_tests(arguments: Sequence[str], environment: Mapping[str, str], seconds: int) -> str:
    """What pytest says up to the first failure; empty where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "CI": "1", **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "the tests do not end"
    if done.returncode == pytest.ExitCode.OK:
        return ""
    if done.returncode != pytest.ExitCode.TESTS_FAILED and done.returncode > 0:
        raise RuntimeError(f"the tests could not be run: {done.stdout}{done.stderr}")
    # A process that dies at once has said nothing, and that is not the same as all is well.
    return done.stdout[-4000:] or f"pytest ended with {done.returncode}"


def write_record(
    file: Path, module: str, arguments: Sequence[str], found: Mapping[str, str], note: str = ""
) -> None:
    """Which mutants survived, and what noticed the others."""
    record = {
        "command": f"PYTHONPATH=tests python -m {module} {shlex.join(arguments)}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        **({"note": note} if note else {}),
        "mutants": len(found),
        "survived": [name for name, how in found.items() if not how],
        "caught_by": {name: how.split(":")[0] for name, how in found.items() if how},
    }
    file.write_text(json.dumps(record, indent=2) + "\n")


def read_record(file: Path) -> dict[str, str]:
    """What noticed each; empty where none did."""
    record = json.loads(file.read_text())
    return {**record["caught_by"], **dict.fromkeys(record["survived"], "")}
