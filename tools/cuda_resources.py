"""Checks registers, shared memory and spills of every CUDA kernel on every target architecture.

    python -m tools.cuda_resources [--write]

Compiles csrc/cuda/*.cu with nvcc (no GPU is needed) and compares the compiler's output with
csrc/cuda/resources.json. A kernel fails if it spills, is missing on either side, or needs clearly
more or fewer registers than recorded. ``--write`` records the output.
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
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "cuda"
RECORD = SOURCES / "resources.json"
REGISTER_TOLERANCE = 4
"""More than unrelated changes cause, less than a step of occupancy (8 registers)."""

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    """Stored and loaded."""


Kernels = dict[str, dict[str, Resources]]
"""By kernel, then by architecture."""


def parse(output: str) -> dict[tuple[str, str], Resources]:
    """Reads the output of ``ptxas -v``: resources by mangled name and architecture."""
    resources = {}
    for name, architecture, stack, stores, loads, registers, rest in _ENTRY.findall(output):
        shared = _SHARED.search(rest)
        resources[name, architecture] = Resources(
            registers=int(registers),
            shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=int(stack),
            spill_bytes=int(stores) + int(loads),
        )
    return resources


def shorten_name(demangled: str) -> str:
    """Returns ``name<7>`` of ``ngram_npu::cuda::(anonymous)::name<7>(Params)``."""
    return re.sub(r"^(?:void )?(?:[\w() ]+::)*", "", demangled.split("(ngram_npu::")[0])


def find_problems(
    measured: Kernels, recorded: Kernels, architectures: Sequence[str], same_compiler: bool
) -> list[str]:
    """Returns why kernels fail the check. Counts are compared only if the compiler is the same."""
    if not measured:
        return ["no kernel in the compiler's output"]
    problems = []
    for name in sorted(measured.keys() | recorded.keys()):
        if name not in measured:
            problems.append(f"{name}: recorded but not built")
            continue
        if name not in recorded:
            problems.append(f"{name}: not recorded")
        built = measured[name]
        problems += [f"{name}: not built for {a}" for a in architectures if a not in built]
        for architecture, new in built.items():
            kernel = f"{name}, {architecture}"
            if new.spill_bytes:
                problems.append(f"{kernel}: spills {new.spill_bytes} bytes")
            old = recorded.get(name, {}).get(architecture)
            if old is None or not same_compiler:
                continue
            if abs(new.registers - old.registers) > REGISTER_TOLERANCE:
                problems.append(f"{kernel}: {new.registers} registers, recorded {old.registers}")
            for field in ("shared_bytes", "stack_bytes"):
                got, expected = getattr(new, field), getattr(old, field)
                if got > expected:
                    problems.append(f"{kernel}: {field} {got}, recorded {expected}")
    return problems


def read_architectures(kind: str = "real") -> list[str]:
    """Returns the architectures in CMakeLists.txt that have binaries, or PTX ("virtual")."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (numbers,) = re.findall(r'set\(NGRAM_NPU_CUDA_ARCHITECTURES "([^"]+)"', text)
    items = [item.partition("-") for item in numbers.split(";")]
    return [f"sm_{number}" for number, _, suffix in items if suffix in ("", kind)]


def compile_source(nvcc: str, source: Path, targets: Sequence[str], folder: str) -> str:
    """Returns the output of ptxas."""
    numbers = [target.removeprefix("sm_") for target in targets]
    generate = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    command = [nvcc, "-c", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-Xptxas=-v", *generate]
    command += [str(source), "-o", f"{folder}/{source.stem}.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    return done.stderr


def measure(nvcc: str, targets: Sequence[str], jobs: int) -> Kernels:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        sources = sorted(SOURCES.glob("*.cu"))
        outputs = list(pool.map(lambda s: compile_source(nvcc, s, targets, folder), sources))
    kernels: Kernels = {}
    for output in outputs:
        for (mangled, target), resources in parse(output).items():
            demangled = subprocess.check_output(["c++filt", mangled], text=True)
            kernel = kernels.setdefault(shorten_name(demangled.strip()), {})
            if target in kernel:
                raise RuntimeError(f"two kernels have the name {shorten_name(demangled.strip())}")
            kernel[target] = resources
    return kernels


def compiler_version(nvcc: str) -> str:
    text = subprocess.check_output([nvcc, "--version"], text=True)
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


def write_record(compiler: str, kernels: Kernels) -> None:
    """Writes one line per kernel and architecture."""
    lines = []
    for name, by_target in sorted(kernels.items()):
        each = [f'      "{t}": {json.dumps(asdict(r))}' for t, r in by_target.items()]
        lines.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(each) + "\n    }")
    body = ",\n".join(lines)
    RECORD.write_text(f'{{\n  "compiler": "{compiler}",\n  "kernels": {{\n{body}\n  }}\n}}\n')


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the compiler's output")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.stderr.write("cuda_resources: nvcc is not installed\n")
        return 2
    targets = read_architectures()
    kernels, compiler = measure(nvcc, targets, options.jobs), compiler_version(nvcc)
    if options.write:
        write_record(compiler, kernels)
    record = json.loads(RECORD.read_text())
    recorded = {
        name: {target: Resources(**values) for target, values in by_target.items()}
        for name, by_target in record["kernels"].items()
    }
    problems = find_problems(kernels, recorded, targets, compiler == record["compiler"])
    summary = f"{len(kernels)} kernels for {len(targets)} architectures, {len(problems)} problems"
    print(*problems, summary, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
