"""Checks the lookups' machine code, and the size of the store's kernels.

    python -m tools.cuda_sass [--write]

Compiles the kernels for four architectures (no GPU is needed), disassembles them with nvdisasm
(from the toolkit or the package nvidia-cuda-nvdisasm; tested with 13.5) and compares the result
with csrc/cuda/sass.json. For a short row, a lookup may wait for memory at most ROUND_TRIPS times in
a row. The instructions of a warp may exceed the recorded number by GROWTH, those of a kernel of the
store, too. Tokens must be read by 16-byte loads of global memory. All threads together must
not execute more instructions than the plain scan of the benchmarks (BASELINE). ``--write`` records
the result.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_resources import ROOT, SOURCES, read_compiler_version, shorten_name

RECORD = SOURCES / "sass.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
KERNELS = ("ngram_propose", "ngram_step")
BASELINE = ROOT / "tools" / "bench" / "plain_scan.cu"
SIZED = "store"
"""The source whose kernels have a recorded number of instructions."""
GROWTH = 0.1
ROUND_TRIPS = 4
"""Maximum number of loads of a lookup in a short row that wait for each other."""
WIDE_LOADS = 16
"""Number of 16-byte loads of a thread for its share of a row."""
LOADS = (1, 4, 8, 16)
"""Numbers of these loads after which a warp with fewer tokens skips the others (skips_from())."""
LAUNCHES = {
    **{(length, length): (1, 3) for length in (64, 512, 4096)},
    **{(length, 16384): (1, 8) for length in (64, 512, 4096, 16384)},
    (32768, 32768): (4, 4),
}
"""Blocks per row and warps per block by row length and capacity, for 128 rows on a GPU that runs at
least 512 blocks at a time (plan_lookup() in csrc/cuda/lookup.cuh)."""
NEARBY = 12
"""Distance in instructions of two loads, of which one is executed."""
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
    predicate: str
    is_conditional: bool
    target: str
    operands: str
    result_scoreboard: int
    """The scoreboard that is released when the result is available, or NO_SCOREBOARD."""
    awaited_scoreboards: int
    """A bit mask of the scoreboards that the instruction waits for."""


@dataclass
class Code:
    """A kernel's instructions, and the indices of the instructions at its labels."""

    instructions: list[Instruction]
    labels: dict[str, int]

    @property
    def names(self) -> list[str]:
        return [instruction.name for instruction in self.instructions]

    def find(self, *prefixes: str) -> list[int]:
        """Returns the indices of the instructions whose name begins with one of the prefixes."""
        return [i for i, name in enumerate(self.names) if name.startswith(prefixes)]

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
            is_conditional |= name in ("BRA", "BRA.U") and bool(re.match(r"\s*!?U?P\d", operands))
            encoding = _ENCODING.search(next_line)
            bits = int(encoding[1], 16) if encoding else NO_SCOREBOARD << 46
            label_name = target[1] if target else ""
            boards = bits >> 46 & 7, bits >> 52 & 63
            code.instructions.append(
                Instruction(name, predicate or "", is_conditional, label_name, operands, *boards)
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


def find_path(code: Code, waypoints: Sequence[set[int]], blocked: set[int]) -> list[int]:
    """Returns the shortest path from the first instruction through one instruction of each set, in
    this order; empty if none exists. A path may begin its next part where the last part ended."""
    path = [0]
    for goals in waypoints:
        previous: dict[int, int] = {}
        queue = deque([path[-1]])
        while queue and not previous.keys() & goals:
            index = queue.popleft()
            for successor in code.list_successors(index):
                if successor not in previous and successor not in blocked:
                    previous[successor] = index
                    queue.append(successor)
        reached = previous.keys() & goals
        if not reached:
            return []
        part = [reached.pop()]
        while previous[part[-1]] != path[-1]:
            part.append(previous[part[-1]])
        path += part[::-1]
    return path


def count_round_trips(code: Code, blocked: set[int]) -> int:
    """Returns how many loads of global memory wait for each other on the longest path without
    loops. A warp executes its instructions in order, so an instruction that waits for a load also
    delays all later loads. Of two loads with opposite predicates, only one is executed."""
    loads = code.find("LDG", "LD.")
    predicates = {i: code.instructions[i].predicate for i in loads}
    alternatives = {
        i
        for i in loads
        if any(
            {predicates[i], predicates[k]} == {predicate, f"!{predicate}"}
            for k in loads
            if abs(i - k) < NEARBY
            for predicate in [predicates[i].lstrip("!")]
        )
    }
    return max(
        _count_round_trips(
            code, blocked, {i for i in alternatives if predicates[i].startswith("!") == is_negated}
        )
        for is_negated in (False, True)
    )


def _count_round_trips(code: Code, blocked: set[int], skipped: set[int]) -> int:
    longest = 0
    # By instruction: the number of round trips before it, and until each scoreboard is released.
    states: dict[int, tuple[int, ...]] = {0: (0,) * 7}
    for index, instruction in enumerate(code.instructions):
        if index not in states or index in blocked:
            continue
        now, *released = states.pop(index)
        waits = (instruction.awaited_scoreboards >> number & 1 for number in range(6))
        now = max([now, *(time for time, wait in zip(released, waits, strict=True) if wait)])
        longest = max(longest, now)
        board = instruction.result_scoreboard
        if board != NO_SCOREBOARD and index not in skipped:
            is_load = instruction.name.startswith(("LDG", "LD."))
            released[board] = max(released[board], now + is_load)
        for successor in code.list_successors(index):
            if successor > index:
                other = states.get(successor, (0,) * 7)
                states[successor] = tuple(map(max, other, (now, *released)))
    return longest


def find_vector_registers(code: Code, copies: Sequence[int]) -> list[int]:
    """Returns the first register of each vector of a thread, in the order of the row. ``copies``
    are the instructions that copy them to shared memory."""
    registers = {}
    for copy in copies:
        address, register = code.instructions[copy].operands.rsplit("], R", 1)
        offset = re.search(r"0x([0-9a-f]+)$", address)
        registers[int(offset[1], 16) if offset else 0] = int(register)
    return [registers[offset] for offset in sorted(registers)]


def measure_lookup(text: str) -> dict[str, int]:
    """Returns the counts of a lookup: of a row without a candidate that one block searches at once,
    of each further share of a block, and of the whole kernel. All loads in loops are for further
    shares or for more than 32 sampled tokens; unconditional atomics are for several blocks.

    The first warp also reads the row, loads the suffix, the costs and the tokens at the edges, and
    drafts. Different lanes do this, so its count is that of all paths through these loads."""
    code = parse_listing(text)
    names = code.names
    wide_loads = code.find("LDG.E.EF.128", "LDG.E.128")
    loads_in_loops = {i for i in code.find("LDG") if find_shortest_loop(code, i)}
    first_loads = [i for i in wide_loads if i not in loads_in_loops]
    counts = {
        "wide_loads": len(first_loads),
        "generic_loads": len(code.find("LD.")),
        "local_accesses": len(code.find("LDL", "STL")),
        "instructions": len(names),
    }
    if not first_loads or len(wide_loads) == len(first_loads):
        return counts
    atomics = {
        i
        for i in code.find("ATOM", "RED", "MEMBAR")
        if not code.instructions[i].is_conditional and not names[i].startswith(("ATOMS", "REDUX"))
    }
    blocked = atomics | loads_in_loops
    next_loads = set(wide_loads) & loads_in_loops
    barriers, exits = code.find("BAR"), set(code.find("EXIT"))
    reduced = set(code.find("REDUX", "CREDUX"))
    copies = [i for i in code.find("STS.128") if i > max(first_loads)]

    def make_waypoints(num_loads: int) -> list[set[int]]:
        """Returns the last of the first ``num_loads`` loads, its copy and its comparison."""
        register = find_vector_registers(code, copies)[num_loads - 1]
        vector = re.compile("|".join(rf"\bR{register + k}\b" for k in range(4)))
        comparisons = [i for i in code.find("ISETP") if max(copies) < i < min(reduced)]
        used = {i for i in comparisons if vector.search(code.instructions[i].operands)}
        is_of_vector = re.compile(rf"^\s*R{register}\b|\], R{register}\b")
        loads, stores = (
            {i for i in group if is_of_vector.search(code.instructions[i].operands)}
            for group in (first_loads, copies)
        )
        return [loads, stores, {min(used)}]

    search = make_waypoints(WIDE_LOADS)
    row = {max(i for i in code.find("LDG") if i < min(barriers) and i not in blocked)}
    results = {max(i for i in code.find("STG") if names[i] == "STG.E" and i not in blocked)}
    accesses = [i for i in code.find("LDG", "STG") if i < barriers[1] and i not in blocked]
    for num_loads in LOADS:
        load, *others = make_waypoints(num_loads)
        end = [*others, reduced]
        first_warp = set()
        for access in set(accesses) - set(first_loads):
            begin = [{access}, row, load] if access < min(row) else [row, load, {access}]
            first_warp |= set(find_path(code, [*begin, *end, results, exits], blocked))
        name = f"with_{num_loads}_loads"
        counts[f"instructions_of_first_warp_{name}"] = len(first_warp)
        counts[f"instructions_per_warp_{name}"] = len(find_path(code, [load, *end, exits], blocked))
    first_share = find_path(code, search[:2], atomics)
    shares = find_path(code, [*search, next_loads, reduced, search[1]], atomics)
    return {
        "round_trips": count_round_trips(code, blocked),
        "instructions_per_idle_warp": len(find_path(code, [{barriers[0]}, exits], blocked)),
        "instructions_per_further_share": len(shares) - len(first_share),
        **counts,
    }


def count_thread_instructions(counts: dict[str, int]) -> dict[str, int]:
    """Returns the instructions of all threads for 128 rows without a candidate, by the length and
    the capacity of the rows."""
    instructions = {}
    for (length, capacity), (blocks, warps) in LAUNCHES.items():
        total = 0
        for warp in range(blocks * warps):
            num_loads = -(-(length - warp * 128 * WIDE_LOADS) // 128)
            size = next((n for n in LOADS if n >= num_loads), WIDE_LOADS)
            kind = "of_first_warp" if warp % warps == 0 else "per_warp"
            name = f"{kind}_with_{size}_loads" if num_loads > 0 else "per_idle_warp"
            total += counts[f"instructions_{name}"]
        instructions[f"128x{length} of {capacity}"] = 128 * 32 * total
    return instructions


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


def measure_baseline(text: str) -> dict[str, int]:
    """Returns the round trips of the plain scan, the instructions of a warp for 32 positions
    without a match, and those outside this loop. The first warp also writes the draft."""
    code = parse_listing(text)
    exits = set(code.find("EXIT"))
    scan = {next(i for i in code.find("LDG") if i > min(code.find("BAR")))}
    loop = find_shortest_loop(code, *scan)
    path = find_path(code, [scan, exits], set())
    after_loop = [i for i in code.find("LDG", "STG") if i > max(loop)]
    first_warp = {
        i for access in after_loop for i in find_path(code, [scan, {access}, exits], set())
    }
    return {
        "round_trips": count_round_trips(code, set()),
        "instructions_per_loop": len(loop),
        "other_instructions": len(path) - len(loop),
        "other_instructions_of_first_warp": len(first_warp | set(path)) - len(loop),
    }


def count_baseline_instructions(counts: dict[str, int]) -> dict[str, int]:
    """Returns the same as count_thread_instructions() for the plain scan, which has 8 warps."""
    others = 7 * counts["other_instructions"] + counts["other_instructions_of_first_warp"]
    return {
        f"128x{length}": 128
        * 32
        * (others + 8 * -(-length // 256) * counts["instructions_per_loop"])
        for length in sorted({length for length, _ in LAUNCHES})
    }


def find_problems(
    measured: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]
) -> list[str]:
    """Returns one message per problem. For a kernel with an empty record, only the limits that do
    not depend on the compiler apply."""
    problems = []
    for kernel, counts in measured.items():
        trips = counts.get("round_trips", 0)
        if not 0 < trips <= ROUND_TRIPS:
            problems.append(f"{kernel}: round_trips: expected 1 to {ROUND_TRIPS}, got {trips}")
        if counts["wide_loads"] != WIDE_LOADS:
            loads = counts["wide_loads"]
            problems.append(f"{kernel}: wide_loads: expected {WIDE_LOADS}, got {loads}")
        for name in ("generic_loads", "local_accesses"):
            if counts[name]:
                problems.append(f"{kernel}: {name}: expected 0, got {counts[name]}")
        for name, count in recorded.get(kernel, {}).items():
            if name.startswith("instructions") and not 0 < counts[name] <= (1 + GROWTH) * count:
                problems.append(f"{kernel}: {name}: {counts[name]}, recorded {count}")
    return problems + [f"{kernel}: not recorded" for kernel in measured.keys() - recorded.keys()]


def find_sizes_above_baseline(instructions: dict[str, Sizes]) -> list[str]:
    """Returns one message per size for which a lookup has more instructions than the plain scan."""
    problems = []
    for kernel in (name for name in instructions if not name.startswith(BASELINE.stem)):
        baseline = instructions[f"{BASELINE.stem}, {kernel.split(', ')[1]}"]
        for size, count in instructions[kernel].items():
            limit = baseline[size.split()[0]]
            if count > limit:
                problems.append(f"{kernel}: {size}: {count} instructions, plain scan {limit}")
    return problems


def find_disassembler() -> str | None:
    if path := shutil.which("nvdisasm"):
        return path
    folders = [Path(folder) / "nvidia" for folder in sys.path]
    return next((str(file) for f in folders for file in f.glob("*/bin/nvdisasm")), None)


def disassemble(nvcc: str, nvdisasm: str, source: Path, architecture: str) -> str:
    flags = (f"-arch={architecture}", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-cubin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        subprocess.run([nvcc, *flags, source, "-o", cubin.name], check=True)
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
    measured, baselines, sizes, instructions = {}, {}, {}, {}
    for arch in ARCHITECTURES:
        for kernel in KERNELS:
            text = disassemble(nvcc, nvdisasm, SOURCES / f"{kernel}.cu", arch)
            name = f"{kernel}, {arch}"
            measured[name] = measure_lookup(text)
            instructions[name] = count_thread_instructions(measured[name])
        text = disassemble(nvcc, nvdisasm, SOURCES / f"{SIZED}.cu", arch)
        for kernel, count in count_instructions(text).items():
            sizes[f"{kernel}, {arch}"] = count
        baseline = measure_baseline(disassemble(nvcc, nvdisasm, BASELINE, arch))
        baselines[f"{BASELINE.stem}, {arch}"] = baseline
        instructions[f"{BASELINE.stem}, {arch}"] = count_baseline_instructions(baseline)
    compiler = read_compiler_version(nvcc)
    if options.write:
        record = {
            "compiler": compiler,
            "kernels": measured,
            "baselines": baselines,
            "instructions": sizes,
            "thread_instructions": instructions,
        }
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    record = json.loads(RECORD.read_text())
    recorded = record["kernels"] if record["compiler"] == compiler else {k: {} for k in measured}
    problems = find_problems(measured, recorded) + find_sizes_above_baseline(instructions)
    if record["compiler"] == compiler:
        problems += find_larger_kernels(sizes, record["instructions"])
    print(*problems, f"{len(measured) + len(sizes)} kernels, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
