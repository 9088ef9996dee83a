"""Checks registers, shared memory and spills of every CUDA kernel on every target architecture.

    python -m tools.cuda_resources [--write]

Compiles csrc/cuda/*.cu with nvcc (no GPU is needed) and compares the compiler's output with
the record, csrc/cuda/resources.json. A kernel fails if it spills, if only the output or only the
record contains it, if its number of registers differs by more than 4, or if it needs more shared
memory or stack than recorded. ``--write`` records the output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "cuda"
RECORD = SOURCES / "resources.json"
REGISTER_TOLERANCE = 4
"""Unrelated changes alter the number of registers by less than this. The hardware allocates
registers in units of 8, so such a small difference rarely matters."""

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_INNER_OBJECT = re.compile(r"(?<={)[^{}]*(?=})")
_SHARED_BYTES = re.compile(r"(\d+) bytes smem")


Resources = dict[str, int]
"""registers, shared_bytes, stack_bytes and spill_bytes (stored and loaded) of a kernel."""
Kernels = dict[str, dict[str, Resources]]
"""Resources by kernel name, then by architecture."""


def parse_ptxas_output(output: str) -> dict[tuple[str, str], Resources]:
    """Returns the resources in the output of ``ptxas -v`` by mangled name and architecture."""
    resources = {}
    for name, architecture, stack, stores, loads, registers, line_end in _ENTRY.findall(output):
        shared = _SHARED_BYTES.search(line_end)
        resources[name, architecture] = {
            "registers": int(registers),
            "shared_bytes": int(shared[1]) if shared else 0,
            "stack_bytes": int(stack),
            "spill_bytes": int(stores) + int(loads),
        }
    return resources


def shorten_name(demangled: str) -> str:
    """Returns ``name<7>`` of ``ngram_npu::cuda::(anonymous)::name<7>(Params)``."""
    return re.sub(r"^(?:void )?(?:[\w() ]+::)*", "", demangled.split("(ngram_npu::")[0])


def find_problems(
    measured: Kernels, recorded: Kernels, architectures: Sequence[str], same_compiler: bool
) -> list[str]:
    """Returns one message per problem. Registers, shared memory and stack are compared with the
    record only if the compiler is the same."""
    if not measured:
        return ["no kernel in the compiler's output"]
    problems = [f"{name}: recorded but not built" for name in recorded.keys() - measured.keys()]
    problems += [f"{name}: not recorded" for name in measured.keys() - recorded.keys()]
    for name, by_architecture in sorted(measured.items()):
        missing = [a for a in architectures if a not in by_architecture]
        problems += [f"{name}: not built for {architecture}" for architecture in missing]
        for architecture, resources in by_architecture.items():
            kernel = f"{name}, {architecture}"
            if resources["spill_bytes"]:
                problems.append(f"{kernel}: spills {resources['spill_bytes']} bytes")
            record = recorded.get(name, {}).get(architecture)
            if record is None or not same_compiler:
                continue
            if abs(resources["registers"] - record["registers"]) > REGISTER_TOLERANCE:
                problems.append(
                    f"{kernel}: {resources['registers']} registers, recorded {record['registers']}"
                )
            for field in ("shared_bytes", "stack_bytes"):
                if resources[field] > record[field]:
                    problems.append(
                        f"{kernel}: {field} {resources[field]}, recorded {record[field]}"
                    )
    return problems


def read_architectures(kind: str = "real") -> list[str]:
    """Returns the architectures in CMakeLists.txt with binaries ("real") or PTX ("virtual")."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (numbers,) = re.findall(r'set\(NGRAM_NPU_CUDA_ARCHITECTURES "([^"]+)"', text)
    items = [item.partition("-") for item in numbers.split(";")]
    return [f"sm_{number}" for number, _, suffix in items if suffix in ("", kind)]


def compile_kernels(nvcc: str, targets: Sequence[str], jobs: int) -> Kernels:
    """Compiles all kernels and returns the resources that ptxas reports."""
    numbers = [target.removeprefix("sm_") for target in targets]
    gencode_flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    flags = ["-c", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-Xptxas=-v", *gencode_flags]

    def compile_source(source: Path) -> str:
        with tempfile.NamedTemporaryFile(suffix=".o") as object_file:
            command = [nvcc, *flags, str(source), "-o", object_file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
        return done.stderr

    with ThreadPoolExecutor(jobs) as pool:
        outputs = list(pool.map(compile_source, sorted(SOURCES.glob("*.cu"))))
    kernels: Kernels = {}
    for output in outputs:
        for (mangled, target), resources in parse_ptxas_output(output).items():
            demangled = subprocess.check_output(["c++filt", mangled], text=True)
            kernel = kernels.setdefault(shorten_name(demangled.strip()), {})
            if target in kernel:
                raise RuntimeError(f"two kernels have the name {shorten_name(demangled.strip())}")
            kernel[target] = resources
    return kernels


def read_compiler_version(nvcc: str) -> str:
    text = subprocess.check_output([nvcc, "--version"], text=True)
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the compiler's output")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.stderr.write("cuda_resources: expected nvcc in PATH: install the CUDA toolkit\n")
        return 2
    targets = read_architectures()
    kernels = compile_kernels(nvcc, targets, options.jobs)
    compiler = read_compiler_version(nvcc)
    if options.write:
        by_name = {name: {t: kernels[name][t] for t in targets} for name in sorted(kernels)}
        text = json.dumps({"compiler": compiler, "kernels": by_name}, indent=2)
        # One line per kernel and architecture.
        RECORD.write_text(_INNER_OBJECT.sub(lambda match: " ".join(match[0].split()), text) + "\n")
    record = json.loads(RECORD.read_text())
    same_compiler = compiler == record["compiler"]
    problems = find_problems(kernels, record["kernels"], targets, same_compiler)
    summary = f"{len(kernels)} kernels for {len(targets)} architectures, {len(problems)} problems"
    print(*problems, summary, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
