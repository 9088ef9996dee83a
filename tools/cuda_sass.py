"""Checks the lookups' inner loop in the machine code, and the size of the device store's kernels.

    python -m tools.cuda_sass [--write]

Compiles the lookup kernels for four architectures (no GPU is needed), disassembles them with
nvdisasm (from the toolkit or the package nvidia-cuda-nvdisasm; tested with 13.5) and compares the
result with csrc/cuda/sass.json. The loop over the tiles of a row may have at most the recorded
number of instructions, and at most LIMIT. Tokens must be read by 16-byte loads of global memory.
No instruction that processes a tile may wait for the loads of the next tile. A kernel of the device
store may have at most GROWTH more instructions than recorded. ``--write`` records the result.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_resources import ROOT, SOURCES, read_compiler_version, shorten_name

RECORD = SOURCES / "sass.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
KERNELS = ("ngram_propose", "ngram_step")
SIZED = "device_store"
"""The source whose kernels have a recorded number of instructions."""
GROWTH = 0.1
LIMIT = 115
"""Maximum number of instructions of a warp for a tile (four vectors per thread) without a match."""
TILE_LOADS = 4
NO_SCOREBOARD = 7
"""The encoded scoreboard of an instruction that sets no scoreboard."""

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\d) )?\s*([A-Z][\w.]*)([^;]*);")
_ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/\s*$")
_KERNEL = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_JUMPS = ("EXIT", "BRA", "RET", "BRX", "KILL")
"""Instructions after which, unless they are conditional, the next instruction is not executed."""


Sizes = dict[str, int]
"""Instructions by kernel and architecture."""


@dataclass(frozen=True)
class Instruction:
    name: str
    is_conditional: bool
    target: str
    result_scoreboard: int
    """The scoreboard that is released when the result is available, or NO_SCOREBOARD."""
    awaited_scoreboards: int
    """A bit mask of the scoreboards that the instruction waits for."""


@dataclass
class Code:
    """A kernel's instructions, and the indices of the instructions at its labels."""

    instructions: list[Instruction]
    labels: dict[str, int]

    def list_successors(self, index: int) -> list[int]:
        """Returns the indices of the instructions that may follow instruction ``index``."""
        instruction = self.instructions[index]
        is_jump = instruction.name.split(".")[0] in _JUMPS and not instruction.is_conditional
        successors = [] if is_jump else [index + 1]
        if instruction.name.startswith("BRA") and instruction.target in self.labels:
            successors.append(self.labels[instruction.target])
        return [successor for successor in successors if successor < len(self.instructions)]


def parse_listing(text: str) -> Code:
    """Reads the listing of ``nvdisasm -hex``. An instruction has 128 bits; the line after it lists
    the upper 64. Bits 110 to 112 are the scoreboard that the instruction sets, bits 116 to 121 the
    mask of the scoreboards that it waits for (sm_70 and later)."""
    code = Code([], {})
    lines = text.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""], strict=False):
        if label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif match := _INSTRUCTION.match(line):
            _, predicate, name, operands = match.groups()
            target = _TARGET.search(operands)
            # A branch may have its predicate among its operands. Only warps with diverged threads
            # take BRA.DIV.
            is_conditional = bool(predicate) or name == "BRA.DIV"
            is_conditional |= name == "BRA" and bool(re.match(r"\s*!?U?P\d", operands))
            encoding = _ENCODING.search(next_line)
            bits = int(encoding[1], 16) if encoding else NO_SCOREBOARD << 46
            label_name = target[1] if target else ""
            code.instructions.append(
                Instruction(name, is_conditional, label_name, bits >> 46 & 7, bits >> 52 & 63)
            )
    return code


def find_shortest_loop(code: Code, start: int) -> list[int]:
    """Returns the shortest path from ``start`` to itself, without its end; empty if none exists."""
    previous: dict[int, int] = {}
    queue = deque([start])
    while queue:
        index = queue.popleft()
        for successor in code.list_successors(index):
            if successor == start:
                path = [index]
                while path[-1] != start:
                    path.append(previous[path[-1]])
                return path[::-1]
            if successor not in previous:
                previous[successor] = index
                queue.append(successor)
    return []


def count_waits_for_next_tile(code: Code, loads: list[int]) -> int:
    """Counts the instructions before a tile's vote that wait for the loads of the next tile."""
    scoreboards = {code.instructions[index].result_scoreboard for index in loads} - {NO_SCOREBOARD}
    waits = 0
    for index in find_shortest_loop(code, max(loads))[1:]:
        instruction = code.instructions[index]
        waits += any(instruction.awaited_scoreboards >> number & 1 for number in scoreboards)
        if instruction.name.startswith("VOTE"):
            break
    return waits


def measure_code(text: str) -> dict[str, int]:
    """Returns the number of instructions in the loop that loads a tile, and of loads by kind."""
    code = parse_listing(text)
    names = [instruction.name for instruction in code.instructions]
    wide_loads = [i for i, name in enumerate(names) if name.startswith("LDG.E.128")]
    loops = {i: find_shortest_loop(code, i) for i in wide_loads}
    # The loads of a tile are all in one loop, which is inside the loop over requests.
    counts = Counter(len(loop) for loop in loops.values() if loop)
    length = min((n for n, count in counts.items() if count >= TILE_LOADS), default=0)
    loads = [i for i in wide_loads if length and len(loops[i]) == length]
    loop = [names[i] for i in loops[loads[0]]] if loads else []
    return {
        "instructions_per_tile": length,
        "loads_per_tile": len(loads),
        "waits_for_the_next_tile": count_waits_for_next_tile(code, loads) if loads else 0,
        "global_loads": sum(name.startswith("LDG") for name in names),
        "generic_loads": sum(name in ("LD", "LD.E") or name.startswith("LD.E.") for name in loop),
        "local_accesses": sum(name.startswith(("LDL", "STL")) for name in names),
        "instructions": len(names),
    }


def count_instructions(text: str) -> dict[str, int]:
    """Returns the number of instructions of each kernel, without the padding after its end."""
    _, *parts = _KERNEL.split(text)
    counts = {}
    for mangled, listing in zip(parts[::2], parts[1::2], strict=True):
        demangled = subprocess.check_output(["c++filt", mangled], text=True).strip()
        instructions = parse_listing(listing).instructions
        counts[shorten_name(demangled)] = sum(i.name != "NOP" for i in instructions)
    return counts


def find_larger_kernels(measured: Sizes, recorded: Sizes) -> list[str]:
    """Returns one message per kernel with more instructions than recorded."""
    problems = [f"{name}: recorded but not built" for name in recorded.keys() - measured.keys()]
    for name, count in measured.items():
        if name not in recorded:
            problems.append(f"{name}: not recorded")
        elif not 0 < count <= (1 + GROWTH) * recorded[name]:
            problems.append(f"{name}: {count} instructions, recorded {recorded[name]}")
    return problems


def find_problems(
    measured: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]
) -> list[str]:
    """Returns one message per problem. For a kernel with an empty record, only LIMIT applies."""
    problems = []
    for kernel, counts in measured.items():
        limit = min(recorded.get(kernel, {}).get("instructions_per_tile", LIMIT), LIMIT)
        length, loads = counts["instructions_per_tile"], counts["loads_per_tile"]
        if not 0 < length <= limit:
            problems.append(f"{kernel}: instructions_per_tile: expected 1 to {limit}, got {length}")
        if loads != TILE_LOADS:
            problems.append(f"{kernel}: loads_per_tile: expected {TILE_LOADS}, got {loads}")
        for name in ("waits_for_the_next_tile", "generic_loads", "local_accesses"):
            if counts[name]:
                problems.append(f"{kernel}: {name}: expected 0, got {counts[name]}")
    return problems + [f"{kernel}: not recorded" for kernel in measured.keys() - recorded.keys()]


def find_disassembler() -> str | None:
    if path := shutil.which("nvdisasm"):
        return path
    folders = [Path(folder) / "nvidia" for folder in sys.path]
    return next((str(file) for f in folders for file in f.glob("*/bin/nvdisasm")), None)


def disassemble(nvcc: str, nvdisasm: str, kernel: str, architecture: str) -> str:
    flags = (f"-arch={architecture}", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-cubin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        subprocess.run([nvcc, *flags, SOURCES / f"{kernel}.cu", "-o", cubin.name], check=True)
        return subprocess.check_output([nvdisasm, "-c", "-hex", cubin.name], text=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the result")
    options = parser.parse_args(argv)
    nvcc, nvdisasm = shutil.which("nvcc"), find_disassembler()
    if nvcc is None or nvdisasm is None:
        missing = "nvcc" if nvcc is None else "nvdisasm (pip install nvidia-cuda-nvdisasm)"
        sys.stderr.write(f"cuda_sass: {missing} is not installed\n")
        return 2
    measured = {
        f"{kernel}, {arch}": measure_code(disassemble(nvcc, nvdisasm, kernel, arch))
        for arch in ARCHITECTURES
        for kernel in KERNELS
    }
    sizes = {
        f"{kernel}, {arch}": count
        for arch in ARCHITECTURES
        for kernel, count in count_instructions(disassemble(nvcc, nvdisasm, SIZED, arch)).items()
    }
    compiler = read_compiler_version(nvcc)
    if options.write:
        record = {"compiler": compiler, "kernels": measured, "instructions": sizes}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    record = json.loads(RECORD.read_text())
    # If another compiler made the record, only the limit applies.
    recorded = record["kernels"] if record["compiler"] == compiler else {k: {} for k in measured}
    problems = find_problems(measured, recorded)
    if record["compiler"] == compiler:
        problems += find_larger_kernels(sizes, record["instructions"])
    print(*problems, f"{len(measured) + len(sizes)} kernels, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
