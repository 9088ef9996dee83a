"""Builds the package for the GPU at hand and installs it below build/gpu/stage.

    python -m tools.gpu.build [--architecture 90]

With cmake, ninja and nvcc as they are there: no environment is made and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu.stages import PREFIX, ROOT

BUILD = PREFIX.parent


def commands(architecture: str, pybind11: str, version: str) -> list[list[str]]:
    """What is run, one after the other."""
    return [
        [
            "cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD),
            "-DCMAKE_BUILD_TYPE=Release",
            "-DNGRAM_NPU_CUDA=ON",
            "-DNGRAM_NPU_WERROR=OFF",  # a newer compiler's warning is no reason to lose a run
            f"-DNGRAM_NPU_CUDA_ARCHITECTURES={architecture}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11}",
            f"-DSKBUILD_PROJECT_VERSION={version}",
        ],
        ["ninja", "-C", str(BUILD), "--quiet"],
        ["cmake", "--install", str(BUILD), "--prefix", str(PREFIX)],
    ]  # fmt: skip


def local_architecture() -> str:
    """Of the first GPU, for CMAKE_CUDA_ARCHITECTURES.

    Raises:
        RuntimeError: torch sees none.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here: name an --architecture, such as 90")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def project_version(pyproject: Path = ROOT / "pyproject.toml") -> str:
    found = re.search(r'^version = "([^"]+)"$', pyproject.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def belongs_here(build: Path) -> bool:
    """Whether cmake goes on there: a folder that came along from another place it refuses, and one
    whose configuration ended early it does not mend."""
    cache = build / "CMakeCache.txt"
    if not (build / "build.ninja").exists() or not cache.exists():
        return False
    return f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}" in cache.read_text().splitlines()


def stage_python() -> None:
    """The Python half, where the libraries are then installed into."""
    shutil.rmtree(PREFIX, ignore_errors=True)
    for package in ("ngram_npu", "ngram_npu_vllm_plugin"):
        shutil.copytree(
            ROOT / "python" / package,
            PREFIX / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.build", description=__doc__)
    parser.add_argument("--architecture", help="such as 90 (default: that of the GPU here)")
    given = parser.parse_args(arguments)
    try:
        architecture = given.architecture or local_architecture()
    except RuntimeError as error:
        print(f"tools.gpu.build: {error}", file=sys.stderr)
        return 2
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not belongs_here(BUILD):
        shutil.rmtree(BUILD, ignore_errors=True)
    stage_python()
    for command in commands(f"{architecture}-real", pybind11, project_version()):
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
