"""Audits the shared libraries of a package: their dependencies, exports and search paths.

    python tools/abi_audit.py FOLDER

A wheel must load beside any torch from 2.10 on, without the libraries of a compiler, so it may
depend only on the C and C++ runtimes (the torch side: and what libtorch_cpu of the oldest torch
exports), must not export C++ symbols, must look for our own libraries beside itself and search
nothing else, and must not name files of the machine that built it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RUNTIME = {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
}
NEEDED = {
    "libngram_npu.so": RUNTIME | {"libtorch_cpu.so", "ld-linux-x86-64.so.2"},
    "libngram_npu_cpu.so": RUNTIME | {"ld-linux-x86-64.so.2"},
    "libngram_npu_cuda.so": RUNTIME | {"ld-linux-x86-64.so.2", "librt.so.1"},
    "libngram_npu_launch.so": RUNTIME
    | {"libascendcl.so", "libtorch_npu.so", "libc10.so"}
    | {"ld-linux-x86-64.so.2"},
    "_C": RUNTIME | {"libngram_npu_cpu.so", "ld-linux-x86-64.so.2"},
}
EXPORTED = {
    "libngram_npu.so": r"ngram_npu_\w+",
    "libngram_npu_cpu.so": r"ngram_npu_cpu_\w+",
    "libngram_npu_cuda.so": r"ngram_npu_cuda_\w+",
    "libngram_npu_launch.so": r"ngram_npu_ascendc_\w+",
}
EXPORTED_BY_MODULE = r"PyInit_\w+"
TORCH_FLOOR = (2, 10)
# What libngram_npu.so may take from libtorch_cpu, with the torch that had it first. From PyTorch's
# torch/csrc/stable/c/shim_function_versions.txt, which lacks what is older than 2.10: 2.9 here.
_BEFORE = """
    abi_version create_device_guard delete_device_guard delete_library_object delete_stream
    delete_tensor_object dtype_bfloat16 dtype_bool dtype_element_size dtype_float16
    dtype_float32 dtype_float64 dtype_int16 dtype_int32 dtype_int64 dtype_int8 dtype_uint16
    dtype_uint32 dtype_uint64 dtype_uint8 empty_strided get_current_stream get_data_ptr
    get_device_index get_device_type get_dim get_dtype get_sizes get_strides is_defined
    library_def library_init_def library_init_fragment library_init_impl new_tensor_handle
"""
_SINCE_2_10 = "call_dispatcher get_mutable_data_ptr get_num_threads library_impl parallel_for"
TORCH_SYMBOLS = {f"aoti_torch_{name}": (2, 9) for name in _BEFORE.split()}
TORCH_SYMBOLS |= {f"torch_{name}": (2, 10) for name in _SINCE_2_10.split()}
# Python's, by which pybind11 raises ValueError.
PYTHON_SYMBOLS = {"PyErr_SetString", "PyExc_ValueError"}
MAX_VERSIONS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}


def _readelf(option: str, path: Path) -> str:
    done = subprocess.run(
        ["readelf", "-W", option, path], capture_output=True, text=True, check=True
    )
    return done.stdout


def torch_problems(symbol: str, floor: tuple[int, int] = TORCH_FLOOR) -> list[str]:
    """Why the oldest supported torch may lack that symbol; empty if it or Python has it."""
    if symbol in PYTHON_SYMBOLS:
        return []
    since = TORCH_SYMBOLS.get(symbol)
    if since is None:
        return [f"needs {symbol}: TORCH_SYMBOLS does not say since which torch it is there"]
    if since > floor:
        return [f"needs {symbol}, which is there since torch {since[0]}.{since[1]} only"]
    return []


def problems(path: Path) -> list[str]:
    if path.name == "libngram_npu_ascendc.so":
        return []  # CANN's making: it needs CANN, and exports what CANN's generator wants
    name = path.name if path.name.startswith("lib") else path.name.split(".")[0]
    if name not in NEEDED:
        return [f"{path.name}: an unknown library"]
    found = []
    dynamic = _readelf("-d", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    found += [f"{path.name}: needs {extra}" for extra in sorted(needed - NEEDED[name])]
    searched = set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic))
    found += [f"{path.name}: searches {place}" for place in searched - {"$ORIGIN"}]
    beside = {library for library in needed if library.startswith("libngram_npu_")}
    if beside and "$ORIGIN" not in searched:
        found += [f"{path.name}: does not find {library} beside it" for library in beside]
    symbols = _readelf("--dyn-syms", path)
    for line in symbols.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[4] not in {"GLOBAL", "WEAK", "UNIQUE"}:
            continue
        if fields[6] == "UND":
            # The runtimes' symbols have versions, so what has none comes from torch or Python.
            if name == "libngram_npu.so" and fields[4] == "GLOBAL" and "@" not in fields[7]:
                found += [f"{path.name}: {problem}" for problem in torch_problems(fields[7])]
            continue
        if not re.fullmatch(EXPORTED.get(name, EXPORTED_BY_MODULE), fields[7].split("@")[0]):
            found.append(f"{path.name}: exports {fields[7]}")
    for source in re.findall(rb"\0(/[^\0]*\.(?:h|hpp|cpp|cuh?))\0", path.read_bytes()):
        found.append(f"{path.name}: names {source.decode()}")
    for library, version in re.findall(r"@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", symbols):
        if tuple(map(int, version.split("."))) > MAX_VERSIONS[library]:
            found.append(f"{path.name}: needs {library}_{version}")
    return sorted(set(found))


def main(folder: Path) -> int:
    libraries = sorted(folder.glob("*.so"))
    found = [problem for path in libraries for problem in problems(path)]
    if not libraries:
        found = [f"{folder}: no libraries"]
    sys.stdout.write(
        "\n".join([*found, f"{len(libraries)} libraries, {len(found)} problems"]) + "\n"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
