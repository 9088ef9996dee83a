"""Tests the package with other torch releases, including those published for CUDA only.

    python -m tools.torches 2.14.1 2.15.0 [-- PYTEST-ARGUMENTS]

Each release is installed without its dependencies into build/torches/VERSION (1 GB). That folder
precedes the environment's own torch on PYTHONPATH; the environment does not change. In place of
the CUDA libraries (3 GB), torch loads stand-ins with the same names, versions and symbols. Each
function of a stand-in returns cudaErrorNoDevice, so torch finds no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_FOLDER = ROOT / "build" / "torches"
TESTS = ("tests/ops", "tests/core", "tests/async_state")
TEST_FILTER = ("-k", "not cuda_ and not ascendc_")  # the twins do not depend on torch
NVIDIA_LIBRARY = "lib(cu|nv|nccl)"
NO_DEVICE = 100  # cudaErrorNoDevice


def _run_readelf(library: Path, option: str) -> str:
    return subprocess.check_output(["readelf", "--wide", option, library], text=True)


def find_cuda_symbols(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Returns the symbols that the libraries in a folder need from NVIDIA's libraries, by library
    and version. A symbol without a version may belong to any library, so all libraries get it."""
    libraries: dict[str, dict[str, set[str]]] = {}
    undefined_symbols: dict[str, set[str]] = defaultdict(set)
    defined_symbols: set[str] = set()
    for library in folder.glob("*.so*"):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _run_readelf(library, "--dynamic")):
            if re.match(NVIDIA_LIBRARY, name):
                libraries.setdefault(name, {})
        versions: dict[str, set[str]] = {}
        for line in _run_readelf(library, "--version-info").splitlines():
            if file := re.search(r" File: (\S+) ", line):
                versions = libraries.get(file[1], {})
            elif version := re.search(r" Name: (\S+) .* Version: ", line):
                versions[version[1]] = undefined_symbols[version[1]]
        for line in _run_readelf(library, "--dyn-syms").splitlines():
            fields = line.split()
            if len(fields) > 7 and fields[4] == "GLOBAL":
                symbol, _, version_name = fields[7].partition("@")
                is_undefined = fields[6] == "UND"
                (undefined_symbols[version_name] if is_undefined else defined_symbols).add(symbol)
    candidates = undefined_symbols[""] - defined_symbols
    unversioned_symbols = {name for name in candidates if re.match("cu|nccl|nv", name)}
    for versions in libraries.values():
        version_name = next(iter(versions), "")
        versions[version_name] = versions.get(version_name, set()) | unversioned_symbols
    return libraries


def write_stand_ins(folder: Path) -> None:
    """Compiles a stand-in for each NVIDIA library into the folder in which torch searches."""
    for library, versions in find_cuda_symbols(folder).items():
        names = set().union(*versions.values())
        code = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
        script = folder / f"{library}.map"
        with script.open("w") as file:
            for version, symbols in versions.items():
                file.write(f"{version} {{ {' '.join(f'{symbol};' for symbol in symbols)} }};\n")
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", "-nostdlib", f"-Wl,-soname,{library}"]
        command = ["gcc", "-x", "c", "-", *flags, f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", folder / library], input=code, text=True, check=True)
        script.unlink()


def install_torch(version: str) -> Path:
    """Installs a torch release, unless it is installed; returns its folder for PYTHONPATH."""
    folder = TORCH_FOLDER / version
    if not folder.exists():
        partial_folder = TORCH_FOLDER / f"{version}.partial"
        shutil.rmtree(partial_folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, "--target", partial_folder, f"torch=={version}"], check=True)
        write_stand_ins(partial_folder / "torch" / "lib")
        partial_folder.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.torches", description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    has_failed = False
    for version in parser.parse_args(sys.argv[1:separator]).versions:
        environment = {**os.environ, "PYTHONPATH": str(install_torch(version))}
        command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
        loaded_version = subprocess.check_output(command, env=environment, text=True).strip()
        if loaded_version.partition("+")[0] != version:
            sys.exit(f"tools.torches: torch: expected {version}, got {loaded_version}")
        pytest = [sys.executable, "-m", "pytest", "-q", *TESTS, *TEST_FILTER]
        command = [*pytest, *sys.argv[separator + 1 :]]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        print(f"torch {loaded_version}: {'failed' if status else 'passed'}", flush=True)
        has_failed |= status != 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
