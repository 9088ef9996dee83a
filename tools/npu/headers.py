"""Compiles all AscendC kernels with the real headers and clang, without CANN's compiler.

    python -m tools.npu.headers DEVKIT

DEVKIT is a checkout of Ascend C's devkit (asc-devkit), which is not part of this project. Needs
clang 15 or later (Debian: clang-15), because CANN's compiler is a clang 15. Kernels are compiled as
CUDA device code, so that clang knows address spaces and functions of the device: global memory and
the unified buffer are different spaces, and `__aicore__` functions may call no host functions and
not throw. The tool declares the names of CANN's compiler that declarations in the headers need,
such as `::Part`. It does not declare the compiler's intrinsics, so clang reports many errors in the
headers. The tool reports only errors in our files and, for the 2201, errors in templates that our
files instantiate, except errors about an intrinsic. (For the 3510, the headers need more of the
compiler.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (2201, 3510)
HOST_FILES = ("launch.cpp", "loaded_kernels.cpp")
_OPTIONS = (
    "-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=sm_70", "-nocudainc", "-nocudalib",
    "-std=c++17", "-fsyntax-only", "-w", "-ferror-limit=0", "-D__CCE_AICORE__=220",
)  # fmt: skip
_ADDRESS_SPACES = ("gm", "ubuf", "cbuf", "ca", "cb", "cc", "fbuf", "ssbuf", "biasbuf")
_KEYWORDS = (
    "global__", "simd_vf__", "simd_callee__", "no_simd_vf_fusion__", "sync_alias__",
    "sync_noalias__", "check_sync_alias__", "sync_in__", "sync_out__", "inout_pipe__(pipe)",
    "in_pipe__(pipe)", "out_pipe__(pipe)",
)  # fmt: skip
_OPAQUE_TYPES = (
    "vector_bool", "vector_u8", "vector_s8", "vector_u16", "vector_s16", "vector_f16",
    "vector_bf16", "vector_u32", "vector_s32", "vector_f32", "vector_u64", "vector_s64",
    "vector_align", "vector_address", "int4x2_t", "hifloat8_t", "fp8_e4m3fn_t", "fp8_e5m2_t",
    "fp8_e8m0_t", "fp4x2_e1m2_t", "fp4x2_e2m1_t", "float8_e8m0_t", "float8_e5m2_t",
    "float8_e4m3_t", "float4_e1m2x2_t", "float4_e2m1x2_t", "hifloat4x2_t",
)  # fmt: skip
_DECLARATIONS = """
#include <cstddef>
#include <cstdint>
struct Part;
struct half {
  half() = default;
  template <class T> constexpr half(T) {}
  constexpr operator float() const { return 0; }
};
struct bfloat16_t : half { using half::half; };
enum class Mode {};
enum pad_t { PAD_NONE };
enum QuantMode_t { NoQuant };
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6 };
"""
_ERROR = re.compile(r"^(\S+?):\d+:\d+: error: (.*)")
_INTRINSIC = re.compile(r"use of undeclared identifier '\w+'")


def find_clang() -> str | None:
    """Returns the newest clang++ of this machine, None if there is none of 15 or later."""
    names = (f"clang++-{version}" for version in range(30, 14, -1))
    return next((name for name in names if shutil.which(name)), None)


def main() -> int:
    devkit, sources = Path(sys.argv[1]), ROOT / "csrc"
    files = sorted((sources / "ascendc").glob("*.cpp"))
    kernels = [file for file in files if file.name not in HOST_FILES]
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        write_stand_ins(devkit, Path(folder))
        includes = [devkit / "include", devkit / "include/basic_api", devkit, sources]
        for arch in ARCHITECTURES:
            for kernel in kernels:
                output = compile_kernel(kernel, Path(folder), includes, arch)
                messages = find_problems(output, str(sources), with_templates=arch == 2201)
                print(f"{arch} {kernel.name}: {len(messages)} problems", *messages, sep="\n  ")
                errors += messages
    return bool(errors)


def compile_kernel(source: Path, folder: Path, includes: Sequence[Path], arch: int) -> str:
    """Returns clang's messages about a kernel. ``folder`` is that of `write_stand_ins`."""
    clang = find_clang()
    if clang is None:
        sys.exit("clang++ 15 or later is missing (Debian, Ubuntu: apt-get install clang-15)")
    command = [clang, *_OPTIONS, f"-D__NPU_ARCH__={arch}", f"-I{folder}"]
    command += [*(f"-I{path}" for path in includes), "-include", str(folder / "names.h")]
    result = subprocess.run(
        [*command, source], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return result.stderr


def write_stand_ins(devkit: Path, folder: Path) -> None:
    """Writes names.h, which declares the names of CANN's compiler, and empty files in place of the
    headers that the kernels do not use."""
    for part in ("adv_api", "simt_api"):
        for header in (devkit / "include" / part).rglob("*.h"):
            for parent in ("include", ""):
                empty_header = folder / parent / header.relative_to(devkit / "include")
                empty_header.parent.mkdir(parents=True, exist_ok=True)
                empty_header.touch()
    lines = ["#define __aicore__ __attribute__((device))"]
    lines += [
        f"#define __{name}__ __attribute__((address_space({number})))"
        for number, name in enumerate(_ADDRESS_SPACES, 1)
    ]
    lines += [f"#define __{word}" for word in _KEYWORDS]
    lines += [f"struct {name} {{}};" for name in _OPAQUE_TYPES]
    (folder / "names.h").write_text("\n".join([*lines, _DECLARATIONS]))


def find_problems(output: str, sources: str, *, with_templates: bool) -> list[str]:
    """Returns the errors in our files and, ``with_templates``, those in templates that our files
    instantiate. The lines after an error name the instantiations that lead to it."""
    errors: list[tuple[re.Match[str], list[str]]] = []
    for line in output.splitlines():
        if error := _ERROR.match(line):
            errors.append((error, []))
        elif errors:
            errors[-1][1].append(line)
    return [
        error[0]
        for error, notes in errors
        if error[1].startswith(sources)
        or (
            (with_templates and not _INTRINSIC.match(error[2]))
            and any(note.startswith(sources) and "requested here" in note for note in notes)
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
