"""Builds the package for the GPU at hand and installs it below build/gpu/stage.

    python -m tools.gpu.build [ARCHITECTURE, such as 90]

Uses the installed cmake, ninja and nvcc; creates no environment and downloads nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from tools.runner import ROOT

BUILD = ROOT / "build" / "gpu"
PREFIX = BUILD / "stage"
"""The package is installed here, not into the machine's own Python."""


def local_architecture() -> str:
    """The architecture of the first GPU, for CMAKE_CUDA_ARCHITECTURES."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("tools.gpu.build: torch sees no GPU here: name an architecture, such as 90")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def main(arguments: list[str]) -> None:
    architecture = arguments[0] if arguments else local_architecture()
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True)
    # The Python files; the libraries are installed next to them.
    shutil.rmtree(PREFIX, ignore_errors=True)
    shutil.copytree(ROOT / "python", PREFIX, ignore=shutil.ignore_patterns("__pycache__"))
    for command in (
        [
            # Fresh: cmake refuses a configuration copied from another folder.
            "cmake", "--fresh", "-G", "Ninja", "-S", ROOT, "-B", BUILD,
            "-DCMAKE_BUILD_TYPE=Release",
            "-DNGRAM_NPU_CUDA=ON",
            "-DNGRAM_NPU_WERROR=OFF",  # a newer compiler's warning must not end the run
            f"-DNGRAM_NPU_CUDA_ARCHITECTURES={architecture}-real",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.strip()}",
            f"-DSKBUILD_PROJECT_VERSION={version[1]}",
        ],
        ["ninja", "-C", BUILD, "--quiet"],
        ["cmake", "--install", BUILD, "--prefix", PREFIX],
    ):  # fmt: skip
        subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
