"""For a machine with an NPU: builds the package, runs the parity suite on the device, measures.

    python -m tools.npu

It needs an environment with torch, torch_npu, CANN's variables (set_env.sh) and the packages in
tools/requirements-dev.txt. If vllm-ascend is installed, the bench compares with it. See
docs/guides/ascend.md.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tools.runner import Stage, counts, main, pytest, python

SIZES = ("1x1k", "1x32k", "1x128k", "16x8k", "128x8k", "128x32k")
_PACKAGES = {"numpy", "torch", "torch_npu", "torch-npu", "vllm", "vllm-ascend", "triton-ascend"}
_BENCH = "ngram_step_-npu.json"
_HOUR = 3600


def plan(out: Path) -> list[Stage]:
    bench = python(
        "-m", "tools.bench", "ngram_step_", "--device", "npu", "--data-kind", "nomatch",
        "--sizes", *SIZES, "--peer", "vllm-ascend", "--json", str(out / _BENCH),
    )  # fmt: skip
    return [
        Stage("build", python("-m", "tools.npu.build"), 2 * _HOUR, required=True),
        Stage("doctor", python("-m", "ngram_npu", "doctor"), 300, read=str.splitlines),
        # The names of the parity suite's tests end in the backend's: "[<op>-device-npu]".
        Stage(
            "parity", pytest("-k", "npu]", "tests/ops/test_parity.py"), _HOUR,
            required=True, read=counts,
        ),
        Stage("bench", bench, _HOUR),
    ]  # fmt: skip


def findings(out: Path, begun: float) -> dict[str, Any]:
    """The bench's figures, so that one file holds all results."""
    here = {found.metadata["Name"]: found.version for found in distributions()}
    versions = {name: version for name, version in here.items() if name in _PACKAGES}
    file = out / _BENCH
    if not file.is_file() or file.stat().st_mtime < begun:
        return {"versions": versions}
    return {"versions": versions, "bench": json.loads(file.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(main("npu", plan, findings, seconds=5 * _HOUR, environment={}))
