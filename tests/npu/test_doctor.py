"""Tests the doctor beside a torch_npu whose import ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ABORTING_PACKAGE = """
import os, sys
print("terminate called\\n  what():  Duplicated key 'a' found", file=sys.stderr, flush=True)
os.abort()
"""


def test_doctor_reports_that_torch_npu_ends_the_process(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu" / "__init__.py"
    package.parent.mkdir()
    package.write_text(ABORTING_PACKAGE)
    result = subprocess.run(
        [sys.executable, "-m", "ngram_npu_cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    problem = next(line for line in result.stdout.splitlines() if "PROBLEM" in line)
    assert "import torch_npu ends the process with SIGABRT: Duplicated key 'a' found" in problem
