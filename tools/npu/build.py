"""Builds the package for SOC_VERSION, or for this machine's NPU, and installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def chip() -> str:
    """The chip's name in torch_npu, which is also the value for SOC_VERSION."""
    if given := os.environ.get("SOC_VERSION"):
        return given
    import torch
    import torch_npu  # noqa: F401

    name: str = torch.npu.get_device_name(0)
    return name


def command() -> list[str]:
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    defined = ("NGRAM_NPU_ASCENDC=ON", f"SOC_VERSION={chip()}")
    settings = [f"--config-settings=cmake.define.{setting}" for setting in defined]
    return [*pip, "--force-reinstall", *settings, str(ROOT)]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(), check=False).returncode)
