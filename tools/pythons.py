"""Builds the package without torch for the other Pythons of this machine, and tests it with each.

    python -m tools.pythons

Each gets a fresh environment with the wheel and numpy, and runs `ngram-npu doctor`, a replay, and
every operator on numpy arrays against its reference. What is missing is said.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Only the Python side differs between them, so kernels are built without optimisation.
SETTINGS = (
    "cmake.build-type=Debug",
    "cmake.define.NGRAM_NPU_CUDA=OFF",
    "cmake.define.NGRAM_NPU_ASCENDC=OFF",
    "cmake.define.NGRAM_NPU_WERROR=ON",
)
CAN_BUILD = """
import ensurepip, os, sys, sysconfig, venv
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    sys.exit("it lacks its headers")
"""


def find(version: str, environment: Mapping[str, str]) -> tuple[Path | None, str]:
    """A Python of that version that can build extensions, on PATH or of pyenv; or None and why."""
    pyenv = Path(environment.get("PYENV_ROOT") or Path(environment.get("HOME", "/")) / ".pyenv")
    on_path = shutil.which(f"python{version}", path=environment.get("PATH", ""))
    candidates = [Path(on_path)] if on_path else []
    installed = pyenv.glob(f"versions/{version}.*/bin/python{version}")
    candidates += sorted(installed, key=_patch_level, reverse=True)
    reason = "not found"
    for candidate in candidates:
        probe = subprocess.run(
            [candidate, "-c", CAN_BUILD], capture_output=True, text=True, check=False
        )
        if probe.returncode == 0:
            return candidate, ""
        lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
        reason = f"{candidate}: {lines[-1]}"
    return None, reason


def _patch_level(python: Path) -> list[int]:
    """The version of a pyenv Python as numbers, because 3.12.10 is newer than 3.12.9."""
    return [int(number) for number in re.findall(r"\d+", python.parents[1].name)]


def commands(python: Path, folder: Path, wheel: Path | None = None) -> list[list[str]]:
    """The commands to run for one Python, in order, in a separate folder, with the wheel or with
    one that is built there."""
    home = folder / "venv"
    mine, pip = str(home / "bin/python"), ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    settings = [f"--config-settings={s}" for s in (*SETTINGS, f"build-dir={folder / 'build'}")]
    package = [*settings, str(ROOT)] if wheel is None else [str(wheel)]
    return [
        [str(python), "-m", "venv", str(home)],
        [mine, *pip, "install", "hypothesis>=6.100,<7", *package],
        [mine, "-m", "ngram_npu_cli", "doctor"],
        [str(home / "bin/ngram-npu"), "replay", "--demo", "--tokenizer", "bytes", "--limit", "8"],
        [mine, str(ROOT / "tests/repo/wheel/numpy_parity.py")],
    ]


def try_on(python: Path, wheel: Path | None = None) -> str:
    """The first problem found with that Python, or an empty text."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="ngram-npu-") as folder:
        for command in commands(python, Path(folder), wheel):
            done = subprocess.run(
                command,
                cwd=folder,
                env={**kept, "NGRAM_NPU_TORCH": "OFF"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                return f"{' '.join(command)}\n{done.stdout}exit status {done.returncode}"
    return ""


def verdict(version: str, environment: Mapping[str, str]) -> tuple[str, bool]:
    """What is said of that version, and whether it failed."""
    began = time.monotonic()
    python, reason = find(version, environment)
    if python is None:
        return f"Python {version}: {reason}, not tried", False
    problem = try_on(python)
    said = f"failed: {problem}" if problem else "passed"
    return f"Python {version} ({time.monotonic() - began:.0f} s): {said}", bool(problem)


def main() -> int:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [version for version in SUPPORTED if version != own]
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the parity of each takes one core
        for done in as_completed(pool.submit(verdict, v, os.environ) for v in others):
            said, bad = done.result()
            failed = failed or bad
            print(said, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
