"""Tests the package with other releases of torch, among them those published for CUDA only.

    python -m tools.torches 2.14.1 2.15.0 [-- PYTEST-ARGUMENTS]

Each release is installed without its dependencies into build/torches/VERSION (1 GB). That folder
precedes the environment's own torch on PYTHONPATH, and the environment does not change. The CUDA
libraries, 3 GB, are replaced by stand-ins that have their names, versions and symbols. Each
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
TORCHES = ROOT / "build" / "torches"
TESTS = ("tests/ops", "tests/core/index", "tests/core/store", "tests/core", "tests/async_state")
NVIDIA = "lib(cu|nv|nccl)"
NO_DEVICE = 100  # cudaErrorNoDevice
# The twins do not depend on torch.
WITHOUT_TWINS = ("-k", "not cuda_ and not ascendc_")


def _readelf(library: Path, option: str) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuda_libraries(folder: Path) -> dict[str, dict[str, set[str]]]:
    """NVIDIA's libraries that those in `folder` need: by name, the symbols that each version of it
    must define. Symbols without a version may be of any, so each gets them."""
    libraries: dict[str, dict[str, set[str]]] = {}
    wanted: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    for library in folder.glob("*.so*"):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf(library, "--dynamic")):
            if re.match(NVIDIA, name):
                libraries.setdefault(name, {})
        versions: dict[str, set[str]] = {}
        for line in _readelf(library, "--version-info").splitlines():
            if file := re.search(r" File: (\S+) ", line):
                versions = libraries.get(file[1], {})
            elif name := re.search(r" Name: (\S+) .* Version: ", line):
                versions[name[1]] = wanted[name[1]]
        for line in _readelf(library, "--dyn-syms").splitlines():
            fields = line.split()
            if len(fields) > 7 and fields[4] == "GLOBAL":
                symbol, _, version = fields[7].partition("@")
                (wanted[version] if fields[6] == "UND" else defined).add(symbol)
    unversioned = {name for name in wanted[""] - defined if re.match("cu|nccl|nv", name)}
    for versions in libraries.values():
        first = next(iter(versions), "")
        versions[first] = versions.get(first, set()) | unversioned
    return libraries


def write_stand_ins(folder: Path) -> None:
    """Puts a stand-in for each of NVIDIA's libraries into the folder, where torch searches."""
    for library, versions in cuda_libraries(folder).items():
        names = set().union(*versions.values())
        code = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
        script = folder / f"{library}.map"
        script.write_text(
            "".join(
                f"{version} {{ {' '.join(f'{name};' for name in symbols)} }};\n"
                for version, symbols in versions.items()
            )
        )
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", "-nostdlib", f"-Wl,-soname,{library}"]
        command = ["gcc", "-x", "c", "-", *flags, f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", folder / library], input=code, text=True, check=True)
        script.unlink()


def install(version: str) -> Path:
    """The folder with that release, for PYTHONPATH."""
    folder = TORCHES / version
    if not folder.exists():
        partial = TORCHES / f"{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, "--target", partial, f"torch=={version}"], check=True)
        write_stand_ins(partial / "torch" / "lib")
        partial.rename(folder)
    return folder


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="python -m tools.torches", description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    failed = False
    for version in parser.parse_args(sys.argv[1:at]).versions:
        environment = {**os.environ, "PYTHONPATH": str(install(version))}
        ask = [sys.executable, "-c", "import torch; print(torch.__version__)"]
        found = subprocess.check_output(ask, env=environment, text=True).strip()
        if found.partition("+")[0] != version:
            sys.exit(f"torches: expected torch {version}, got {found}")
        tests = [sys.executable, "-m", "pytest", "-q", *TESTS, *WITHOUT_TWINS, *sys.argv[at + 1 :]]
        done = subprocess.run(tests, cwd=ROOT, env=environment, check=False)
        print(f"torch {found}: {'failed' if done.returncode else 'passed'}", flush=True)
        failed = failed or done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
