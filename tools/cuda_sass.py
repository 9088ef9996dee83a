"""Checks the instructions of the lookup's inner loop in the machine code.

    python -m tools.cuda_sass [--write]

Compiles the lookups' kernels for four architectures (no GPU is needed), disassembles them with
nvdisasm (of the toolkit, or the package nvidia-cuda-nvdisasm; 13.5 was tried) and compares with
csrc/cuda/sass.json: the loop over the tiles of a row may take as many instructions as recorded and
no more than the limit, the tokens have to be read by loads of global memory, 16 bytes each, and
nothing that looks at a tile may wait for the loads of the next one. ``--write`` records.
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

from tools.cuda_resources import ROOT, SOURCES, compiler_version

RECORD = SOURCES / "sass.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
KERNELS = ("ngram_propose", "ngram_step")
LIMIT = 115
"""Instructions of a warp for a tile of four vectors a thread in which nothing is found."""
TILE_LOADS = 4

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\d) )?\s*([A-Z][\w.]*)([^;]*);")
_ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_ENDS = ("EXIT", "BRA", "RET", "BRX", "KILL")


@dataclass(frozen=True)
class Instruction:
    name: str
    predicated: bool
    target: str
    sets: int = 7
    """The scoreboard that its result is announced by; 7: none."""
    waits: int = 0
    """The scoreboards that it waits for, a bit each."""


@dataclass
class Code:
    """A kernel's instructions, and where its labels point."""

    instructions: list[Instruction]
    labels: dict[str, int]

    def following(self, at: int) -> list[int]:
        one = self.instructions[at]
        ends = one.name.split(".")[0] in _ENDS and not one.predicated
        next_ones = [] if ends else [at + 1]
        if one.name.startswith("BRA") and one.target in self.labels:
            next_ones.append(self.labels[one.target])
        return [n for n in next_ones if n < len(self.instructions)]


def parse(text: str) -> Code:
    """The listing of ``nvdisasm -hex``: the second half of an instruction's bits is in the line
    after it. Bits 110 to 112 of these 128 are the scoreboard that it sets, 116 to 121 those that it
    waits for (on sm_70 and later)."""
    code = Code([], {})
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if label := _LABEL.match(line):
            code.labels[label.group(1)] = len(code.instructions)
        elif match := _INSTRUCTION.match(line):
            _, predicate, name, operands = match.groups()
            target = _TARGET.search(operands)
            # A branch may have its predicate among its operands; one for threads that have
            # diverged is not taken by a warp that has not.
            conditional = bool(predicate) or name == "BRA.DIV"
            conditional |= name == "BRA" and bool(re.match(r"\s*!?U?P\d", operands))
            half = _ENCODING.search(after)
            bits = int(half.group(1), 16) if half else 7 << 46
            code.instructions.append(
                Instruction(
                    name,
                    conditional,
                    target.group(1) if target else "",
                    bits >> 46 & 7,
                    bits >> 52 & 63,
                )
            )
    return code


def shortest_loop(code: Code, through: int) -> list[int]:
    """The shortest loop from an instruction back to it, without itself; []: there is none."""
    before: dict[int, int] = {}
    queue = deque([through])
    while queue:
        at = queue.popleft()
        for n in code.following(at):
            if n == through:
                path = [at]
                while path[-1] != through:
                    path.append(before[path[-1]])
                return path[::-1]
            if n not in before:
                before[n] = at
                queue.append(n)
    return []


def waits_for_the_next_tile(code: Code, loads: list[int]) -> int:
    """Instructions between a tile's loads and the vote on the tile before it that wait for them."""
    last = max(loads)
    under_way = {code.instructions[at].sets for at in loads} - {7}
    waiting = 0
    for at in shortest_loop(code, last)[1:]:
        one = code.instructions[at]
        waiting += any(one.waits >> board & 1 for board in under_way)
        if one.name.startswith("VOTE"):
            break
    return waiting


def measure(text: str) -> dict[str, int]:
    """
    Returns:
        Instructions of the loop that loads a tile, and how many loads the kernel has of which kind.
    """
    code = parse(text)
    names = [i.name for i in code.instructions]
    wide = [at for at, name in enumerate(names) if name.startswith("LDG.E.128")]
    loops = {at: len(shortest_loop(code, at)) for at in wide}
    # A tile's loads are all in one loop, which is inside another, over the requests.
    by_length = Counter(length for length in loops.values() if length)
    length, loads = min(
        (item for item in by_length.items() if item[1] >= TILE_LOADS), default=(0, 0)
    )
    of_a_tile = [at for at in wide if length and loops[at] == length]
    loop = [names[at] for at in shortest_loop(code, of_a_tile[0])] if of_a_tile else []
    return {
        "instructions_per_tile": length,
        "loads_per_tile": loads,
        "waits_for_the_next_tile": waits_for_the_next_tile(code, of_a_tile) if of_a_tile else 0,
        "global_loads": sum(name.startswith("LDG") for name in names),
        "generic_loads": sum(name in ("LD", "LD.E") or name.startswith("LD.E.") for name in loop),
        "local_accesses": sum(name.startswith(("LDL", "STL")) for name in names),
        "instructions": len(names),
    }


def problems(measured: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """Why the kernels do not pass; recorded counts are compared if there are any."""
    found = []
    for kernel, now in measured.items():
        most = recorded.get(kernel, {}).get("instructions_per_tile", LIMIT)
        if not 0 < now["instructions_per_tile"] <= min(most, LIMIT):
            found.append(
                f"{kernel}: {now['instructions_per_tile']} instructions a tile, expected at most "
                f"{min(most, LIMIT)}"
            )
        if now["loads_per_tile"] != TILE_LOADS:
            found.append(f"{kernel}: {now['loads_per_tile']} loads a tile, expected {TILE_LOADS}")
        found += [
            f"{kernel}: {now[what]} {what.replace('_', ' ')}, expected none"
            for what in ("waits_for_the_next_tile", "generic_loads", "local_accesses")
            if now[what]
        ]
    found += [f"{kernel}: not recorded" for kernel in measured.keys() - recorded.keys()]
    return found


def disassembler() -> str | None:
    if on_path := shutil.which("nvdisasm"):
        return on_path
    places = [Path(place) / "nvidia" for place in sys.path]
    return next((str(f) for p in places for f in p.glob("*/bin/nvdisasm")), None)


def _disassembled(nvcc: str, nvdisasm: str, kernel: str, architecture: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/{kernel}.cubin"
        source = SOURCES / f"{kernel}.cu"
        compiled = (f"-arch={architecture}", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-cubin")
        subprocess.run([nvcc, *compiled, str(source), "-o", cubin], check=True)
        done = subprocess.run(
            [nvdisasm, "-c", "-hex", cubin], check=True, capture_output=True, text=True
        )
        return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what was measured")
    arguments = parser.parse_args(argv)
    nvcc, nvdisasm = shutil.which("nvcc"), disassembler()
    if nvcc is None or nvdisasm is None:
        missing = "nvcc" if nvcc is None else "nvdisasm (pip install nvidia-cuda-nvdisasm)"
        sys.stderr.write(f"cuda_sass: {missing} is not installed\n")
        return 2
    measured = {
        f"{kernel}, {architecture}": measure(_disassembled(nvcc, nvdisasm, kernel, architecture))
        for architecture in ARCHITECTURES
        for kernel in KERNELS
    }
    compiler = compiler_version(nvcc)
    if arguments.write:
        record = {"compiler": compiler, "kernels": measured}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    recorded = json.loads(RECORD.read_text())
    # With another compiler only the limit applies.
    known = recorded["kernels"] if recorded["compiler"] == compiler else {k: {} for k in measured}
    found = problems(measured, known)
    sys.stdout.write("\n".join([*found, f"{len(measured)} kernels, {len(found)} problems"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
