"""Tests that the checks of the CUDA kernels' resources and of the lookups' machine code reject
worse compiler output and worse code."""

from __future__ import annotations

import json

import pytest

from tools import cuda_resources, cuda_sass
from tools.cuda_resources import SOURCES, read_architectures, shorten_name
from tools.cuda_sass import (
    ROUND_TRIPS,
    WIDE_LOADS,
    count_baseline_instructions,
    count_thread_instructions,
    measure_baseline,
    measure_lookup,
)

OUTPUT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zone' for 'sm_90'
ptxas info    : Function properties for _Zone
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 296 bytes smem
ptxas info    : Compiling entry function '_Zone' for 'sm_120'
ptxas info    : Function properties for _Zone
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 61 registers, used 0 barriers
"""
ARCHITECTURES = ("sm_80", "sm_90")
RESOURCES = {"registers": 40, "shared_bytes": 288, "stack_bytes": 0, "spill_bytes": 0}
KERNELS = {name: dict.fromkeys(ARCHITECTURES, RESOURCES) for name in ("one", "two")}


def find_problems(measured: cuda_resources.Kernels, same_compiler: bool = True) -> list[str]:
    return cuda_resources.find_problems(measured, KERNELS, ARCHITECTURES, same_compiler)


def test_parse_ptxas_output_returns_resources_by_kernel() -> None:
    assert cuda_resources.parse_ptxas_output(OUTPUT) == {
        ("_Zone", "sm_90"): dict(zip(RESOURCES, (40, 296, 16, 20), strict=True)),
        ("_Zone", "sm_120"): dict(zip(RESOURCES, (61, 0, 0, 0), strict=True)),
    }
    assert cuda_resources.parse_ptxas_output("nvcc: command not understood") == {}
    inner = "ngram_npu::cuda::(anonymous namespace)"
    assert shorten_name(f"{inner}::step_kernel(ngram_npu::StepParams)") == "step_kernel"
    assert shorten_name("ngram_npu::cuda::_GLOBAL__N__ebd2::b(ngram_npu::P, int)") == "b"
    assert shorten_name(f"void {inner}::c<7, true>(ngram_npu::P)") == "c<7, true>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 44}, None),
        ({"spill_bytes": 4}, "spills 4 bytes"),
        ({"registers": 45}, "45 registers, recorded 40"),
        ({"shared_bytes": 289}, "shared_bytes 289, recorded 288"),
        ({"stack_bytes": 8}, "stack_bytes 8, recorded 0"),
    ],
)
def test_kernel_that_needs_more_resources_fails(change: dict[str, int], message: str) -> None:
    kernels = {**KERNELS, "two": {**KERNELS["two"], "sm_90": RESOURCES | change}}
    assert find_problems(kernels) == ([f"two, sm_90: {message}"] if message else [])
    problems = find_problems(kernels, same_compiler=False)
    assert bool(problems) == ("spill_bytes" in change)


def test_kernel_missing_in_build_or_record_fails() -> None:
    assert find_problems({"one": KERNELS["one"]}) == ["two: recorded but not built"]
    assert find_problems({**KERNELS, "new": KERNELS["one"]}) == ["new: not recorded"]
    assert find_problems({}) == ["no kernel in the compiler's output"]
    kernels = {**KERNELS, "one": {"sm_80": RESOURCES}}
    assert find_problems(kernels) == ["one: not built for sm_90"]


def test_architecture_with_ptx_has_its_own_launch_bounds() -> None:
    """Only the number of an architecture distinguishes the code for PTX from that for a binary."""
    real_architectures = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert read_architectures() == real_architectures
    (virtual_architecture,) = read_architectures("virtual")
    text = (SOURCES / "lookup.cuh").read_text()
    number = virtual_architecture.removeprefix("sm_")
    guard = f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == {number}0\n"
    assert guard + "constexpr int32_t kLookupBlocks = 1;\n#else" in text
    assert virtual_architecture not in real_architectures


BARRIER = "BAR.SYNC 0x0"
REGISTERS = range(8, 8 + 4 * WIDE_LOADS, 4)
"""The first register of each vector."""
GROUPS = [
    REGISTERS[begin:end] for begin, end in zip((0, *cuda_sass.LOADS), cuda_sass.LOADS, strict=False)
]
"""The vectors that a warp with fewer tokens skips at once, except for the first group."""


def skip_groups(label: str, template: str, repetitions: int = 1) -> list[str]:
    """Returns one instruction per vector, and a branch to ``label`` before each later group."""
    lines = []
    for number, group in enumerate(GROUPS):
        lines += [f"@P0 BRA `({label})"] if number > 0 else []
        lines += [
            template.format(register + i, 4 * register)
            for register in group
            for i in range(repetitions)
        ]
    return [*lines, f"{label}:"]


LOOKUP = [
    "S2R R0, SR_TID.X",
    "@P6 BRA `(.L_0)",
    "@P0 LDG.E R2, desc[UR4][R2.64]",  # the row
    ".L_0:",
    BARRIER,
    "@P6 EXIT",  # an idle warp
    *skip_groups(".L_10", "LDG.E.EF.128 R{}, desc[UR4][R2.64]"),
    "@P2 BRA `(.L_1)",
    "LDG.E R4, desc[UR4][R4.64]",  # the costs
    ".L_1:",
    *skip_groups(".L_11", "@!P1 STS.128 [R3+0x{1:x}], R{0}"),
    BARRIER,
    "LDS R4, [R3]",
    *skip_groups(".L_12", "ISETP.NE P1, PT, R4, R{}, PT", 4),
    "@P5 BRA `(.L_3)",
    *["LDG.E.EF.128 R8, desc[UR4][R2.64]"] * WIDE_LOADS,
    ".L_3:",
    "@!P1 BRA `(.L_4)",
    "IADD3 R1, R1, 0x1, RZ",  # only with a candidate
    ".L_4:",
    "REDUX.MAX UR4, R3",
    "@P3 BRA `(.L_1)",
    "@P6 EXIT",  # not the first warp
    "LDG.E R6, desc[UR4][R6.64]",  # the draft
    "STG.E desc[UR4][R6.64], R6",
    "EXIT",
]
NUM_BRANCHES = len(cuda_sass.LOADS) - 1
MEASURED = {
    "round_trips": 4,
    "instructions_per_idle_warp": 4,
    "instructions_per_further_share": 6 * WIDE_LOADS + 2 * NUM_BRANCHES + 6,
    "wide_loads": WIDE_LOADS,
    "generic_loads": 0,
    "local_accesses": 0,
    "instructions": len([line for line in LOOKUP if not line.endswith(":")]),
}
for num_loads in cuda_sass.LOADS:
    # A warp takes the branch after its last group, unless this is the last group.
    searched = 6 * num_loads + 3 * min(cuda_sass.LOADS.index(num_loads) + 1, NUM_BRANCHES)
    MEASURED[f"instructions_of_first_warp_with_{num_loads}_loads"] = searched + 17
    MEASURED[f"instructions_per_warp_with_{num_loads}_loads"] = searched + 12


def make_listing(lines: list[str]) -> str:
    """Returns the lines as nvdisasm lists them with ``-hex``. Loads set scoreboard 0. All other
    instructions wait for it, except for the branches of skip_groups()."""
    listing = []
    for line in lines:
        if line.endswith(":"):
            listing.append(line)
            continue
        board, mask = (0, 0) if "LDG" in line else (7, not line.startswith("@P0 BRA"))
        listing.append(f"        /*0000*/ {'' if line[0] == '@' else '    '} {line} ;")
        listing.append(f"{'':50}/* 0x{board << 46 | mask << 52:016x} */")
    return "\n".join(listing)


def test_measure_lookup_counts_short_row_without_candidate() -> None:
    """The listing waits for the row, its tokens, the costs and the draft, one after the other."""
    assert measure_lookup(make_listing(LOOKUP)) == MEASURED


def test_count_round_trips_ignores_loads_that_are_not_executed() -> None:
    draft = LOOKUP.index("LDG.E R6, desc[UR4][R6.64]")
    pair = ["@P0 LDG.E R6, desc[UR4][R6.64]", "@P0 MOV R7, R6", "@!P0 LDG.E R6, desc[UR4][R6.64]"]
    listing = make_listing([*LOOKUP[:draft], *pair, *LOOKUP[draft + 1 :]])
    assert measure_lookup(listing)["round_trips"] == 4
    listing = make_listing([*LOOKUP[:draft], "LDG.E R6, [R6]", "MOV R7, R6", *LOOKUP[draft:]])
    assert measure_lookup(listing)["round_trips"] == 5


def test_measure_lookup_without_wide_loads_returns_no_path() -> None:
    counts = measure_lookup(make_listing(["LD.E R2, [R2]", "STL [R1], R2", "EXIT"]))
    assert counts["generic_loads"] == counts["local_accesses"] == 1
    assert len(cuda_sass.find_problems({"one": counts}, {"one": {}})) == 4


@pytest.mark.parametrize(
    ("count", "value", "problem"),
    [
        ("round_trips", ROUND_TRIPS + 1, f": expected 1 to {ROUND_TRIPS}, got {ROUND_TRIPS + 1}"),
        ("wide_loads", 17, ": expected 16, got 17"),
        ("generic_loads", 1, ": expected 0, got 1"),
        ("local_accesses", 2, ": expected 0, got 2"),
        ("instructions_per_idle_warp", 5, ": 5, recorded 4"),
        ("instructions", 199, f": 199, recorded {MEASURED['instructions']}"),
    ],
)
def test_worse_machine_code_fails(count: str, value: int, problem: str) -> None:
    worse = {"one": MEASURED | {count: value}}
    assert cuda_sass.find_problems(worse, {"one": MEASURED}) == [f"one: {count}{problem}"]
    is_compiler_dependent = count.startswith("instructions")
    assert len(cuda_sass.find_problems(worse, {"one": {}})) == (not is_compiler_dependent)


def test_record_has_every_kernel_and_no_problem() -> None:
    assert cuda_sass.find_problems({"one": MEASURED}, {}) == ["one: not recorded"]
    record = json.loads(cuda_sass.RECORD.read_text())
    assert len(record["kernels"]) == len(cuda_sass.KERNELS) * len(cuda_sass.ARCHITECTURES)
    assert cuda_sass.find_problems(record["kernels"], record["kernels"]) == []
    for kernel, counts in record["kernels"].items():
        assert record["thread_instructions"][kernel] == count_thread_instructions(counts)


def test_size_above_baseline_fails() -> None:
    totals = json.loads(cuda_sass.RECORD.read_text())["thread_instructions"]
    assert cuda_sass.find_sizes_above_baseline(totals) == []
    worse = {"step, sm_80": {"128x64 of 64": 3}, "plain_scan, sm_80": {"128x64": 2}}
    problem = "step, sm_80: 128x64 of 64: 3 instructions, plain scan 2"
    assert cuda_sass.find_sizes_above_baseline(worse) == [problem]


def test_count_thread_instructions_adds_warps_by_their_number_of_loads() -> None:
    counts = {"instructions_per_idle_warp": 1}
    for size, count in zip(cuda_sass.LOADS, (10, 100, 1000, 10000), strict=True):
        counts[f"instructions_per_warp_with_{size}_loads"] = count
        counts[f"instructions_of_first_warp_with_{size}_loads"] = 5 * count
    threads = 128 * 32
    assert count_thread_instructions(counts) == {
        "128x64 of 64": threads * 52,
        "128x512 of 512": threads * 502,
        "128x4096 of 4096": threads * 60001,
        "128x64 of 16384": threads * 57,
        "128x512 of 16384": threads * 507,
        "128x4096 of 16384": threads * 60006,
        "128x16384 of 16384": threads * 120000,
        "128x32768 of 32768": threads * 4 * 80000,
    }


def test_measure_baseline_counts_loop_and_other_instructions() -> None:
    loop = [".L_1:", "LDG.E R2, [R2]", "IADD3 R1, R1, R2", "@P0 BRA `(.L_1)"]
    draft = ["@P1 BRA `(.L_2)", "STG.E [R2], R2", ".L_2:"]
    scan = ["S2R R0, SR_TID.X", "BAR.SYNC 0x0", *loop, *draft, "EXIT"]
    counts = measure_baseline(make_listing(scan))
    assert counts == {
        "round_trips": 1,
        "instructions_per_loop": 3,
        "other_instructions": 4,
        "other_instructions_of_first_warp": 5,
    }
    assert count_baseline_instructions(counts)["128x512"] == 128 * 32 * (8 * 2 * 3 + 7 * 4 + 5)


KERNEL = "_ZN9ngram_npu4cuda12_GLOBAL__N__4planENS_6ParamsE"


def test_count_instructions_is_per_kernel_and_without_padding() -> None:
    listing = f'\t.section\t.text.{KERNEL},"ax",@progbits\n{make_listing(LOOKUP)}\n'
    padding = "        /*0100*/                   NOP;\n"
    assert cuda_sass.count_instructions(listing + padding) == {"plan": MEASURED["instructions"]}
    assert cuda_sass.count_instructions(make_listing(LOOKUP)) == {}


def test_kernel_of_more_instructions_fails() -> None:
    recorded = {"plan, sm_80": 100}
    assert cuda_sass.find_larger_kernels({"plan, sm_80": 110}, recorded) == []
    messages = ["plan, sm_80: 111 instructions, recorded 100"]
    assert cuda_sass.find_larger_kernels({"plan, sm_80": 111}, recorded) == messages
    problems = cuda_sass.find_larger_kernels({"other, sm_80": 1}, recorded)
    assert problems == ["plan, sm_80: recorded but not built", "other, sm_80: not recorded"]
