"""A GPU machine may lack hypothesis: its tests are then reported as skipped; the rest run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = "(prepare_inputs-numpy or gpu) and not (step or twin)"
WITHOUT = """
import importlib.util, sys
import pytest
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hypothesis" else real(name, *rest)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *sys.argv[1:]]))
"""


def test_the_suite_runs_without_it() -> None:
    tests = ("tests/ops/test_parity.py", "tests/gpu")
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *tests, "-k", CHOSEN],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "hypothesis is not installed" in run.stdout
    assert "passed" in run.stdout
