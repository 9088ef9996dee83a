"""Builds stand-ins for the parts of CANN that a torch_npu needs: CMake functions and libraries.

    python tests/npu/stand_ins.py TORCH_NPU_PACKAGE FOLDER

FOLDER can then be used as ASCEND_HOME_PATH. torch_npu loads the libraries and finds one device with
its memory on the host. torch_npu needs hundreds of functions of CANN. Those in cann/acl.cpp work,
and the others do nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = ("hccl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "atb", "opapi")
"""Libraries that only link to libascendcl.so, which contains all functions."""


def build_stand_ins(torch_npu: Path, folder: Path) -> None:
    cmake_folder = folder / "tools/tikcpp/ascendc_kernel_cmake"
    libraries = folder / "lib64"
    for path in (cmake_folder, libraries):
        path.mkdir(parents=True, exist_ok=True)
    for source in ("ascendc.cmake", "kernels.cpp", "stand_in.h"):
        shutil.copy(HERE / "cann" / source, cmake_folder)

    device = HERE / "cann" / "acl.cpp"
    empty_functions = folder / "empty_functions.c"
    names = sorted(
        _find_functions(torch_npu) - set(re.findall(r"\b(acl\w+)\(", device.read_text()))
    )
    empty_functions.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    shared_options = ["-w", "-O1", "-shared", "-fPIC"]
    include = f"-isystem{torch_npu}/include"
    library = libraries / "libascendcl.so"
    hook_options = ["-finstrument-functions", "-Wl,-Bsymbolic"]
    sources = [device, "-x", "c", empty_functions]
    _run(["g++", "-std=c++17", *shared_options, *hook_options, include, *sources, "-o", library])
    empty_source = folder / "empty.c"
    empty_source.touch()
    for name in LIBRARIES:
        link = ["-Wl,--no-as-needed", f"-L{libraries}", "-lascendcl"]
        _run(["gcc", *shared_options, empty_source, "-o", libraries / f"lib{name}.so", *link])


def _find_functions(torch_npu: Path) -> set[str]:
    """Returns the functions of CANN that torch_npu's libraries link to or look up by name."""
    functions = set()
    for library in [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]:
        functions |= _list_undefined_symbols(library)
        names = re.findall(rb"\x00((?:acl|Hccl)[A-Za-z0-9]+)(?=\x00)", library.read_bytes())
        functions |= {name.decode() for name in names}
    return {name for name in functions if re.match(r"acl|Hccl|Msprof|rt[A-Z]|_ZN3atb", name)}


def _list_undefined_symbols(library: Path) -> set[str]:
    lines = _run(["nm", "-D", "--undefined-only", library]).splitlines()
    return {line.split()[-1] for line in lines}


def _run(command: list[str | Path]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{command[0]}: {result.stderr}")
    return result.stdout


if __name__ == "__main__":
    build_stand_ins(Path(sys.argv[1]), Path(sys.argv[2]))
