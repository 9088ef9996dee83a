"""No operator touches memory outside its arguments; derived from the OpSpecs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


def _run(which: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.guard_pages", which],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("which", ["start", "end"])
def test_every_sample_stays_inside(which: str) -> None:
    result = _run(which)
    last_call = result.stdout.splitlines()[-1:]
    assert result.returncode == 0, (result.returncode, last_call, result.stderr[-2000:])
    assert len(result.stdout.splitlines()) > 1000


@pytest.mark.parametrize("which", ["read", "write"])
def test_the_guards_bite(which: str) -> None:
    assert _run(which).returncode == -signal.SIGSEGV
