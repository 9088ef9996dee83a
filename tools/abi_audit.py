"""Audits the shared libraries of a package: their dependencies, exports and search paths.

    python tools/abi_audit.py FOLDER

A wheel must load with any torch from 2.10 on, on a machine without a compiler. Its libraries may
therefore depend only on the C and C++ runtimes (libngram_npu.so also on symbols that libtorch_cpu
exports in the oldest supported torch). They must not export C++ symbols, must search only their own
folder for libraries, and must not contain paths of the build machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RUNTIME_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0"}
RUNTIME_LIBRARIES |= {"libdl.so.2", "ld-linux-x86-64.so.2"}
LIBRARIES = {
    "libngram_npu.so": ({"libtorch_cpu.so"}, r"ngram_npu_\w+"),
    "libngram_npu_cpu.so": (set(), r"ngram_npu_cpu_\w+"),
    "libngram_npu_cuda.so": ({"librt.so.1"}, r"ngram_npu_cuda_\w+"),
    "libngram_npu_launch.so": (
        {"libascendcl.so", "libtorch_npu.so", "libc10.so"},
        r"ngram_npu_ascendc_\w+",
    ),
    "_C": ({"libngram_npu_cpu.so"}, r"PyInit_\w+"),
}
"""By library: the libraries that it needs besides RUNTIME_LIBRARIES, and a regex of its exports."""
MIN_TORCH_VERSION = (2, 10)
TORCH_SYMBOLS = r"(aoti_)?torch_\w+|PyErr_SetString|PyExc_ValueError"
"""Symbols of torch's stable ABI, and the symbols with which libngram_npu.so raises ValueError.
TORCH_TARGET_VERSION (csrc/api) hides symbols newer than MIN_TORCH_VERSION from the compiler."""
MAX_VERSIONS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}


def _run_readelf(option: str, path: Path) -> str:
    return subprocess.check_output(["readelf", "-W", option, path], text=True)


def find_problems(path: Path) -> list[str]:
    if path.name == "libngram_npu_ascendc.so":
        return []  # CANN generates this library: it needs CANN and exports CANN's own symbols
    name = path.name if path.name.startswith("lib") else path.name.split(".")[0]
    if name not in LIBRARIES:
        return [f"{path.name}: unknown library"]
    allowed_libraries, export_pattern = LIBRARIES[name]
    dynamic, symbols = _run_readelf("-d", path), _run_readelf("--dyn-syms", path)
    needed_libraries = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    search_paths = set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic))
    known_libraries = allowed_libraries | RUNTIME_LIBRARIES
    problems = {f"needs {library}" for library in needed_libraries - known_libraries}
    problems |= {f"searches {folder}" for folder in search_paths - {"$ORIGIN"}}
    own_libraries = {library for library in needed_libraries if library.startswith("libngram_npu_")}
    if "$ORIGIN" not in search_paths:
        problems |= {f"does not search its own folder for {library}" for library in own_libraries}
    for fields in map(str.split, symbols.splitlines()):
        if len(fields) < 8 or fields[4] not in {"GLOBAL", "WEAK", "UNIQUE"}:
            continue
        symbol = fields[7]
        if fields[6] != "UND":
            if not re.fullmatch(export_pattern, symbol.split("@")[0]):
                problems.add(f"exports {symbol}")
        # Symbols of the C and C++ runtimes are versioned; others belong to torch or Python.
        elif (
            name == "libngram_npu.so"
            and fields[4] == "GLOBAL"
            and not ("@" in symbol or re.fullmatch(TORCH_SYMBOLS, symbol))
        ):
            problems.add(f"needs {symbol}, which is not part of torch's stable ABI")
    for source in re.findall(rb"\0(/[^\0]*\.(?:h|hpp|cpp|cuh?))\0", path.read_bytes()):
        problems.add(f"contains the path {source.decode()}")
    for library, version in re.findall(r"@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", symbols):
        if tuple(map(int, version.split("."))) > MAX_VERSIONS[library]:
            problems.add(f"needs {library}_{version}")
    return sorted(f"{path.name}: {problem}" for problem in problems)


def main(folder: Path) -> int:
    libraries = sorted(folder.glob("*.so"))
    problems = [problem for path in libraries for problem in find_problems(path)]
    if not libraries:
        problems = [f"{folder}: no libraries"]
    print(*problems, f"{len(libraries)} libraries, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
