"""Tests that the checks of the CUDA kernels' resources and of the lookups' machine code reject
worse compiler output and worse code."""

from __future__ import annotations

import json

import pytest

from tools import cuda_resources, cuda_sass
from tools.cuda_resources import SOURCES, read_architectures, shorten_name
from tools.cuda_sass import LIMIT, measure_code

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
    assert guard + "constexpr int32_t kLookupBlocks = 3;\n#else" in text
    assert virtual_architecture not in real_architectures


CODE = """
        /*0000*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0030*/              @!P0 LDG.E.128 R16, desc[UR4][R6.64] ;
        /*0040*/              @!P0 LDG.E.128 R20, desc[UR4][R8.64] ;
        /*0050*/                   VOTE.ANY P1, P1 ;
        /*0060*/              @!P1 BRA `(.L_x_2) ;
        /*0070*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
"""
MEASURED = {
    "instructions_per_tile": 7,
    "loads_per_tile": 4,
    "waits_for_the_next_tile": 0,
    "global_loads": 5,
    "generic_loads": 0,
    "local_accesses": 0,
    "instructions": 11,
}


def make_listing(vote_waits_for: int) -> str:
    """Returns CODE as nvdisasm lists it with ``-hex``. The loads of the tile set scoreboard 5."""
    lines = []
    for line in CODE.splitlines():
        lines.append(line)
        if line.startswith("        /*"):
            board = 5 if "LDG.E.128" in line else 7
            mask = 1 << vote_waits_for if "VOTE" in line else 0
            lines.append(f"{'':50}/* 0x{board << 46 | mask << 52:016x} */")
    return "\n".join(lines)


def test_measure_code_counts_loop_without_match() -> None:
    """IADD3 is executed only after a match, so it is not counted."""
    assert measure_code(CODE) == MEASURED
    assert measure_code(make_listing(vote_waits_for=0)) == MEASURED
    assert measure_code(make_listing(vote_waits_for=5)) == MEASURED | {"waits_for_the_next_tile": 1}
    assert measure_code(CODE.replace("LDG.E.128 R20", "LDG.E R20"))["instructions_per_tile"] == 0
    assert measure_code("")["instructions"] == 0
    accesses = measure_code(
        CODE.replace("VOTE.ANY P1,", "LD.E R2,").replace("IADD3 R1,", "STL [R1],")
    )
    assert (accesses["generic_loads"], accesses["local_accesses"]) == (1, 1)


@pytest.mark.parametrize(
    ("count", "expected", "value"),
    [
        ("instructions_per_tile", "1 to 7", 8),
        ("loads_per_tile", "4", 5),
        ("waits_for_the_next_tile", "0", 1),
        ("generic_loads", "0", 1),
        ("local_accesses", "0", 2),
    ],
)
def test_worse_machine_code_fails(count: str, expected: str, value: int) -> None:
    problems = cuda_sass.find_problems({"one": MEASURED | {count: value}}, {"one": MEASURED})
    assert problems == [f"one: {count}: expected {expected}, got {value}"]


def test_limit_applies_with_and_without_a_larger_record() -> None:
    measured = {"one": MEASURED | {"instructions_per_tile": LIMIT + 1}}
    for recorded in (measured, {"one": {}}):
        (problem,) = cuda_sass.find_problems(measured, recorded)
        assert f"expected 1 to {LIMIT}" in problem
    assert cuda_sass.find_problems({"one": MEASURED}, {}) == ["one: not recorded"]
    record = json.loads(cuda_sass.RECORD.read_text())
    assert len(record["kernels"]) == len(cuda_sass.KERNELS) * len(cuda_sass.ARCHITECTURES)
    assert cuda_sass.find_problems(record["kernels"], record["kernels"]) == []


KERNEL = "_ZN9ngram_npu4cuda12_GLOBAL__N__4planENS_6ParamsE"


def test_count_instructions_is_per_kernel_and_without_padding() -> None:
    listing = f'\t.section\t.text.{KERNEL},"ax",@progbits\n{CODE}'
    padding = "        /*0100*/                   NOP;\n"
    assert cuda_sass.count_instructions(listing + padding) == {"plan": MEASURED["instructions"]}
    assert cuda_sass.count_instructions(CODE) == {}


def test_kernel_of_more_instructions_fails() -> None:
    recorded = {"plan, sm_80": 100}
    assert cuda_sass.find_larger_kernels({"plan, sm_80": 110}, recorded) == []
    messages = ["plan, sm_80: 111 instructions, recorded 100"]
    assert cuda_sass.find_larger_kernels({"plan, sm_80": 111}, recorded) == messages
    problems = cuda_sass.find_larger_kernels({"other, sm_80": 1}, recorded)
    assert problems == ["plan, sm_80: recorded but not built", "other, sm_80: not recorded"]
