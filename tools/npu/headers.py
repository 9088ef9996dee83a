"""Compiles all AscendC kernels with the real headers and g++, without CANN's compiler.

    python -m tools.npu.headers DEVKIT

DEVKIT is a checkout of Ascend C's devkit (asc-devkit), which is not part of this project. This tool
declares the names of CANN's compiler that declarations in the headers need, such as `::Part`. It
does not declare the compiler's intrinsics, so g++ reports many errors in the headers. The tool
reports only errors in our files, and errors in templates that our files instantiate, except errors
about an intrinsic.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (2201, 3510)
_COMPILER = ("g++", "-std=c++17", "-fsyntax-only", "-fpermissive", "-w", "-fmax-errors=0")
_KEYWORDS = (
    "aicore", "global", "gm", "ubuf", "cbuf", "ca", "cb", "cc", "fbuf", "ssbuf", "biasbuf",
    "simd_vf", "simd_callee", "no_simd_vf_fusion", "sync_alias", "sync_noalias", "check_sync_alias",
    "sync_in", "sync_out", "inout_pipe__(pipe)", "in_pipe__(pipe)", "out_pipe__(pipe)",
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
  template <class T> half(T) {}
  operator float() const { return 0; }
};
struct bfloat16_t : half { using half::half; };
enum class Mode {};
enum pad_t { PAD_NONE };
enum QuantMode_t { NoQuant };
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6 };
"""
_ERROR = re.compile(r"^(\S+?):\d+:\d+: error: (.*)")
_INTRINSIC = re.compile(
    r"'\w+' (was not declared in this scope|has not been declared|does not name a type)"
    r"|there are no arguments to '\w+'"
)


def main() -> int:
    devkit, sources = Path(sys.argv[1]), ROOT / "csrc"
    files = sorted((sources / "ascendc").glob("*.cpp"))
    kernels = [file for file in files if "NGRAM_NPU_KERNEL(" in file.read_text()]
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        header = write_stand_ins(devkit, Path(folder))
        include = [folder, devkit / "include", devkit / "include/basic_api", devkit, sources]
        for arch in ARCHITECTURES:
            for kernel in kernels:
                result = subprocess.run(
                    [*_COMPILER, f"-D__NPU_ARCH__={arch}", *(f"-I{path}" for path in include),
                     "-include", header, kernel],
                    capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"},
                )  # fmt: skip
                messages = find_problems(result.stderr, str(sources))
                print(f"{arch} {kernel.name}: {len(messages)} problems", *messages, sep="\n  ")
                errors += messages
    return bool(errors)


def write_stand_ins(devkit: Path, folder: Path) -> Path:
    """Writes empty files in place of the headers that the kernels do not use, and a header that
    declares the names of CANN's compiler. Returns the path of this header."""
    for part in ("adv_api", "simt_api"):
        for header in (devkit / "include" / part).rglob("*.h"):
            for parent in ("include", ""):
                empty_header = folder / parent / header.relative_to(devkit / "include")
                empty_header.parent.mkdir(parents=True, exist_ok=True)
                empty_header.touch()
    names_header = folder / "names.h"
    lines = [f"#define __{word}{'' if ')' in word else '__'}" for word in _KEYWORDS]
    lines += [f"struct {name} {{}};" for name in _OPAQUE_TYPES]
    names_header.write_text("\n".join([*lines, _DECLARATIONS]))
    return names_header


def find_problems(output: str, sources: str) -> list[str]:
    """Returns the errors in our files and in templates that our files instantiate."""
    errors = []
    is_in_our_files = False
    for line in output.splitlines():
        if "In instantiation of" in line or "In file included from" in line:
            is_in_our_files = False
        is_in_our_files = is_in_our_files or (line.startswith(sources) and "required from" in line)
        error = _ERROR.match(line)
        if error is None:
            continue
        if error[1].startswith(sources) or (is_in_our_files and not _INTRINSIC.match(error[2])):
            errors.append(line)
    return errors


if __name__ == "__main__":
    sys.exit(main())
