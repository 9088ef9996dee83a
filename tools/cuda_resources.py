"""Registers, shared memory and spills of every CUDA kernel on every architecture it is built for.

    python -m tools.cuda_resources [--write]

Compiles csrc/cuda/*.cu with nvcc (no GPU is needed) and compares what the compiler says with
csrc/cuda/resources.json: a kernel that spills, that is missing on either side, or that needs
clearly more or fewer registers than recorded is a problem. ``--write`` records.
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
"""More than unrelated source changes cause, less than a step of occupancy (8 registers)."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
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
    """What ``ptxas -v`` says, by mangled name and architecture."""
    found = {}
    entry = frame = None
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            entry, frame = match.groups(), None
        elif match := _FRAME.search(line):
            frame = [int(number) for number in match.groups()]
        elif (match := _USED.search(line)) and entry and frame:
            shared = _SHARED.search(line)
            found[entry] = Resources(
                registers=int(match.group(1)),
                shared_bytes=int(shared.group(1)) if shared else 0,
                stack_bytes=frame[0],
                spill_bytes=frame[1] + frame[2],
            )
            entry = None
    return found


def short_name(demangled: str) -> str:
    """``ngram_npu::cuda::(anonymous)::name<7>(Params)`` as ``name<7>``."""
    return re.sub(r"^(?:void )?(?:[\w() ]+::)*", "", demangled.split("(ngram_npu::")[0])


def problems(
    measured: Kernels, recorded: Kernels, architectures: Sequence[str], same_compiler: bool
) -> list[str]:
    """Why the kernels do not pass. Registers are compared only with the compiler of the record."""
    if not measured:
        return ["no kernel was found in the compiler's output"]
    found = []
    for name in sorted(measured.keys() | recorded.keys()):
        mine, old = measured.get(name, {}), recorded.get(name, {})
        if not mine:
            found.append(f"{name}: recorded but not built")
            continue
        if not old:
            found.append(f"{name}: not recorded")
        found += [f"{name}: not built for {a}" for a in architectures if a not in mine]
        for architecture, now in mine.items():
            where = f"{name}, {architecture}"
            if now.spill_bytes:
                found.append(f"{where}: spills {now.spill_bytes} bytes")
            then = old.get(architecture)
            if then is None or not same_compiler:
                continue
            if abs(now.registers - then.registers) > REGISTER_TOLERANCE:
                found.append(f"{where}: {now.registers} registers, recorded {then.registers}")
            for what in ("shared_bytes", "stack_bytes"):
                if getattr(now, what) > getattr(then, what):
                    found.append(
                        f"{where}: {what} {getattr(now, what)}, recorded {getattr(then, what)}"
                    )
    return found


def architectures(kind: str = "real") -> list[str]:
    """Those of NGRAM_NPU_CUDA_ARCHITECTURES in CMakeLists.txt that have binaries; of the kind
    "virtual": PTX."""
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r'set\(NGRAM_NPU_CUDA_ARCHITECTURES "([^"]+)"', text)
    assert match is not None
    found = [item.partition("-") for item in match.group(1).split(";")]
    return [f"sm_{number}" for number, _, suffix in found if suffix in ("", kind)]


def _compile(nvcc: str, source: Path, targets: Sequence[str], folder: str) -> str:
    numbers = [target.removeprefix("sm_") for target in targets]
    generate = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    command = [nvcc, "-c", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-Xptxas=-v", *generate]
    done = subprocess.run(
        [*command, str(source), "-o", f"{folder}/{source.stem}.o"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    return done.stderr


def measure(nvcc: str, targets: Sequence[str], jobs: int) -> Kernels:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        outputs = pool.map(
            lambda source: _compile(nvcc, source, targets, folder), sorted(SOURCES.glob("*.cu"))
        )
        parsed = [parse(output) for output in outputs]
    mangled = sorted({name for found in parsed for name, _ in found})
    demangled = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    names = dict(zip(mangled, map(short_name, demangled.stdout.splitlines()), strict=True))
    kernels: Kernels = {}
    for found in parsed:
        for (name, target), resources in found.items():
            of_kernel = kernels.setdefault(names[name], {})
            if target in of_kernel:
                raise RuntimeError(f"two kernels are called {names[name]}")
            of_kernel[target] = resources
    return kernels


def compiler_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else "unknown"


def _recorded() -> tuple[str, Kernels]:
    if not RECORD.exists():
        return "", {}
    record = json.loads(RECORD.read_text())
    kernels = {
        name: {target: Resources(**values) for target, values in of_kernel.items()}
        for name, of_kernel in record["kernels"].items()
    }
    return record["compiler"], kernels


def _write(compiler: str, kernels: Kernels) -> None:
    lines = []
    for name, of_kernel in sorted(kernels.items()):
        each = [f'      "{t}": {json.dumps(asdict(r))}' for t, r in of_kernel.items()]
        lines.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(each) + "\n    }")
    body = ",\n".join(lines)
    RECORD.write_text(f'{{\n  "compiler": "{compiler}",\n  "kernels": {{\n{body}\n  }}\n}}\n')


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what was measured")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.stderr.write("cuda_resources: nvcc is not installed\n")
        return 2
    targets = architectures()
    kernels = measure(nvcc, targets, arguments.jobs)
    compiler = compiler_version(nvcc)
    if arguments.write:
        _write(compiler, kernels)
    recorded_by, recorded = _recorded()
    found = problems(kernels, recorded, targets, compiler == recorded_by)
    summary = f"{len(kernels)} kernels for {len(targets)} architectures, {len(found)} problems"
    sys.stdout.write("\n".join([*found, summary]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
