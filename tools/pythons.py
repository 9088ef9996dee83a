"""Builds the package without torch for the other Python versions of this machine and tests it.

    python -m tools.pythons

Installs the wheel and numpy in a new environment per version and runs `ngram-npu doctor`, a replay,
and every operator on numpy arrays, compared with its reference. Versions that are not installed
are printed and skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED_VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PARITY_SCRIPT = ROOT / "tests/repo/wheel/numpy_parity.py"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
# Only the Python side differs between versions, so kernels are built without optimization.
SETTINGS = (
    "cmake.build-type=Debug",
    "cmake.define.NGRAM_NPU_CUDA=OFF",
    "cmake.define.NGRAM_NPU_ASCENDC=OFF",
    "cmake.define.NGRAM_NPU_WERROR=ON",
)
CHECK_CODE = """
import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")), "no Python.h"
"""


def find_python(version: str) -> Path | None:
    """Returns a Python of that version that can build extensions, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", CHECK_CODE], capture_output=True).returncode == 0:
            return Path(candidate)
    return None


def check_package(python: Path, wheel: Path | None = None) -> str:
    """Installs the wheel, or a wheel built from the sources, in a new environment and tests it.

    Returns:
        The first problem; empty if there is none.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="ngram-npu-") as folder:
        venv = Path(folder) / "venv"
        own_python = str(venv / "bin/python")
        settings = [f"--config-settings={s}" for s in (*SETTINGS, f"build-dir={folder}/build")]
        package = [*settings, str(ROOT)] if wheel is None else [str(wheel)]
        replay = ("replay", "--demo", "--tokenizer", "bytes", "--limit", "8")
        for command in (
            [str(python), "-m", "venv", str(venv)],
            [own_python, *PIP, "install", *package],
            [own_python, "-m", "ngram_npu_cli", "doctor"],
            [str(venv / "bin/ngram-npu"), *replay],
            [own_python, str(PARITY_SCRIPT)],
        ):
            problem = run_command(command, {**environment, "NGRAM_NPU_TORCH": "OFF"}, folder)
            if problem:
                return f"{' '.join(command)}\n{problem}"
    return ""


def run_command(command: list[str], environment: Mapping[str, str], folder: str) -> str:
    """Runs a command; returns its output and exit status if it failed, otherwise nothing."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{result.stdout}exit status {result.returncode}" if result.returncode else ""


def check_version(version: str) -> tuple[str, bool]:
    """Returns a report about that version, and whether it failed."""
    python = find_python(version)
    if python is None:
        return f"Python {version}: skipped, found none with headers and venv", False
    problem = check_package(python)
    outcome = f"failed: {problem}" if problem else "passed"
    return f"Python {version}: {outcome}", bool(problem)


def main() -> int:
    own_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = [version for version in SUPPORTED_VERSIONS if version != own_version]
    has_failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each version's tests use one core
        for future in as_completed(pool.submit(check_version, version) for version in versions):
            report, failed = future.result()
            has_failed |= failed
            print(report, flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
