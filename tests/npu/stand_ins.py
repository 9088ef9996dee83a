"""Builds stand-ins for CANN that suit a torch_npu: build functions, libraries and a device.

    python tests/npu/stand_ins.py TORCH_NPU_PACKAGE FOLDER

FOLDER can then be used as ASCEND_HOME_PATH. torch_npu loads with it and finds one device with its
memory on the host. Of the hundreds of functions that torch_npu needs, those in cann/acl.cpp work.
The others do nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = ("hccl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "atb", "opapi")
"""Other library names. They link to libascendcl.so, which contains all functions."""


def build(torch_npu: Path, folder: Path) -> None:
    cmake = folder / "tools/tikcpp/ascendc_kernel_cmake"
    libraries = folder / "lib64"
    for path in (cmake, libraries):
        path.mkdir(parents=True, exist_ok=True)
    for source in ("ascendc.cmake", "kernels.cpp", "stand_in.h"):
        shutil.copy(HERE / "cann" / source, cmake)

    device = HERE / "cann" / "acl.cpp"
    empty_functions = folder / "empty_functions.c"
    names = sorted(
        _find_functions(torch_npu) - set(re.findall(r"\b(acl\w+)\(", device.read_text()))
    )
    empty_functions.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    shared = ["-w", "-O1", "-shared", "-fPIC"]
    headers = f"-isystem{torch_npu}/include"
    library = libraries / "libascendcl.so"
    instrumented = ["-finstrument-functions", "-Wl,-Bsymbolic"]
    sources = [device, "-x", "c", empty_functions]
    _run(["g++", "-std=c++17", *shared, *instrumented, headers, *sources, "-o", library])
    empty = folder / "empty.c"
    empty.touch()
    for name in LIBRARIES:
        link = ["-Wl,--no-as-needed", f"-L{libraries}", "-lascendcl"]
        _run(["gcc", *shared, empty, "-o", libraries / f"lib{name}.so", *link])


def _find_functions(torch_npu: Path) -> set[str]:
    """Returns the functions of CANN that torch_npu's libraries link to or look up by name."""
    functions = set()
    for library in [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]:
        functions |= _undefined_symbols(library)
        names = re.findall(rb"\x00((?:acl|Hccl)[A-Za-z0-9]+)(?=\x00)", library.read_bytes())
        functions |= {name.decode() for name in names}
    return {name for name in functions if re.match(r"acl|Hccl|Msprof|rt[A-Z]|_ZN3atb", name)}


def _undefined_symbols(library: Path) -> set[str]:
    lines = _run(["nm", "-D", "--undefined-only", library]).splitlines()
    return {line.split()[-1] for line in lines}


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
