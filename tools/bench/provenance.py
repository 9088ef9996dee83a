"""Describes the machine and the software of a measurement."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from ngram_npu import _C
from ngram_npu.doctor import find_version
from ngram_npu_cli import report as environment

ROOT = Path(__file__).parents[2]


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Returns CPU model, usable cores, the instruction set in use, and the device."""
    description = environment.describe_machine()
    description["instruction_set"] = _C.instruction_set()
    if device != "cpu":
        from tools.bench.device import describe_device

        description[device] = describe_device(device)
    return description


def find_versions() -> dict[str, str | None]:
    """Returns the versions of installed packages, and the checkout's commit."""
    names = ("numba", "triton", "torch_npu", "vllm-ascend", "triton-ascend", "transformers")
    packages = environment.find_versions()
    packages |= {name: find_version(name) for name in names}
    packages["commit"] = _find_commit()
    return {name: version for name, version in packages.items() if version is not None}


def _find_commit() -> str | None:
    """Returns the commit that is checked out, with "-dirty" if a file differs from it; None without
    git. Results files may differ: otherwise, of several results that are written one after the
    other, only the first would have a clean commit."""

    def run_git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = run_git("status", "--porcelain", "--", ".", ":!tools/bench/results")
        return run_git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None
