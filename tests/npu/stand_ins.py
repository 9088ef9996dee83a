"""Stand-ins for CANN, made for the torch_npu at hand: its build functions, its libraries, a device.

    python tests/npu/stand_ins.py TORCH_NPU_PACKAGE FOLDER

makes FOLDER a stand-in that ASCEND_HOME_PATH may point to. torch_npu loads with it and finds one
device whose memory is the host's. Of the hundreds of functions that torch_npu needs, those in
cann/acl.cpp work; the others do nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = ("hccl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "atb", "opapi")
"""Other library names, linked to libascendcl.so, which has all functions."""


def make(torch_npu: Path, folder: Path) -> None:
    cmake = folder / "tools/tikcpp/ascendc_kernel_cmake"
    libraries = folder / "lib64"
    for path in (cmake, libraries):
        path.mkdir(parents=True, exist_ok=True)
    for source in ("ascendc.cmake", "kernels.cpp", "stand_in.h"):
        shutil.copy(HERE / "cann" / source, cmake)

    device = HERE / "cann" / "acl.cpp"
    rest = folder / "nothing.c"
    names = sorted(_wanted(torch_npu) - set(re.findall(r"\b(acl\w+)\(", device.read_text())))
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    shared = ["-w", "-O1", "-shared", "-fPIC"]
    headers = f"-isystem{torch_npu}/include"
    all_in_one = libraries / "libascendcl.so"
    noted = ["-finstrument-functions", "-Wl,-Bsymbolic"]
    sources = [device, "-x", "c", rest]
    _run(["g++", "-std=c++17", *shared, *noted, headers, *sources, "-o", all_in_one])
    empty = folder / "empty.c"
    empty.touch()
    for name in LIBRARIES:
        leads_to = ["-Wl,--no-as-needed", f"-L{libraries}", "-lascendcl"]
        _run(["gcc", *shared, empty, "-o", libraries / f"lib{name}.so", *leads_to])


def _wanted(torch_npu: Path) -> set[str]:
    """CANN's functions that torch_npu's libraries link to, or look for by name."""
    found = set()
    for library in [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]:
        found |= _symbols("--undefined-only", library)
        names = re.findall(rb"\x00((?:acl|Hccl)[A-Za-z0-9]+)(?=\x00)", library.read_bytes())
        found |= {name.decode() for name in names}
    return {name for name in found if re.match(r"acl|Hccl|Msprof|rt[A-Z]|_ZN3atb", name)}


def _symbols(which: str, library: Path) -> set[str]:
    lines = _run(["nm", "-D", which, library]).splitlines()
    return {line.split()[-1] for line in lines}


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
