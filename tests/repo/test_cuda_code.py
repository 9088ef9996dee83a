"""The gates on the CUDA kernels' resources and on the lookups' machine code, tested with compiler
output, records and code that they must refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tools import cuda_sass
from tools.cuda_resources import SOURCES, Resources, architectures, parse, problems, short_name
from tools.cuda_sass import LIMIT, measure

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
GOOD = Resources(registers=40, shared_bytes=288, stack_bytes=0, spill_bytes=0)
KERNELS = {"one": dict.fromkeys(ARCHITECTURES, GOOD), "two": dict.fromkeys(ARCHITECTURES, GOOD)}


def test_the_compilers_words_are_understood() -> None:
    assert parse(OUTPUT) == {
        ("_Zone", "sm_90"): Resources(40, shared_bytes=296, stack_bytes=16, spill_bytes=20),
        ("_Zone", "sm_120"): Resources(61, shared_bytes=0, stack_bytes=0, spill_bytes=0),
    }
    assert parse("nvcc: command not understood") == {}


def test_short_names() -> None:
    inner = "ngram_npu::cuda::(anonymous namespace)"
    assert short_name(f"{inner}::step_kernel(ngram_npu::StepParams)") == "step_kernel"
    assert short_name("ngram_npu::cuda::_GLOBAL__N__ebd2::b(ngram_npu::P, int)") == "b"
    assert short_name(f"void {inner}::c<7, true>(ngram_npu::P)") == "c<7, true>"


def test_a_kernel_as_recorded_passes() -> None:
    assert problems(KERNELS, KERNELS, ARCHITECTURES, same_compiler=True) == []
    other = {name: dict.fromkeys(ARCHITECTURES, replace(GOOD, registers=60)) for name in KERNELS}
    assert problems(other, KERNELS, ARCHITECTURES, same_compiler=False) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill_bytes": 4}, "spills 4 bytes"),
        ({"registers": 45}, "45 registers, recorded 40"),
        ({"registers": 35}, "35 registers, recorded 40"),
        ({"shared_bytes": 289}, "shared_bytes 289, recorded 288"),
        ({"stack_bytes": 8}, "stack_bytes 8, recorded 0"),
    ],
)
def test_a_kernel_that_got_worse_is_refused(change: dict[str, int], message: str) -> None:
    worse = {**KERNELS, "two": {**KERNELS["two"], "sm_90": replace(GOOD, **change)}}
    assert problems(worse, KERNELS, ARCHITECTURES, same_compiler=True) == [f"two, sm_90: {message}"]


def test_spills_are_refused_whatever_is_recorded() -> None:
    spilling = {"one": dict.fromkeys(ARCHITECTURES, replace(GOOD, spill_bytes=4))}
    for same in (True, False):
        assert len(problems(spilling, spilling, ARCHITECTURES, same_compiler=same)) == 2


def test_what_is_missing_is_found() -> None:
    one = {"one": KERNELS["one"]}
    assert problems(one, KERNELS, ARCHITECTURES, True) == ["two: recorded but not built"]
    assert problems(KERNELS, one, ARCHITECTURES, True) == ["two: not recorded"]
    assert problems({}, KERNELS, ARCHITECTURES, True) == [
        "no kernel was found in the compiler's output"
    ]
    partly = {**KERNELS, "one": {"sm_80": GOOD}}
    assert problems(partly, KERNELS, ARCHITECTURES, True) == ["one: not built for sm_90"]


def test_the_architectures_are_those_of_the_build() -> None:
    assert architectures() == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


def test_what_has_ptx_asks_for_three_blocks_and_has_no_binary() -> None:
    """Only the number of an architecture tells the code for PTX from the code for a binary."""
    (with_ptx,) = architectures("virtual")
    text = (SOURCES / "lookup.cuh").read_text()
    asks = f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == {with_ptx.removeprefix('sm_')}0\n"
    assert asks + "constexpr int32_t kLookupBlocks = 3;\n#else" in text
    assert with_ptx not in architectures()


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


def test_the_way_without_a_candidate_is_counted() -> None:
    """An instruction that runs only after a candidate does not count."""
    assert measure(CODE) == MEASURED
    assert len(cuda_sass.parse(CODE).labels) == 3


def _encoded(vote_waits_for: int) -> str:
    """The code as nvdisasm lists it with ``-hex``: the tile's loads set scoreboard 5."""
    lines = []
    for line in CODE.splitlines():
        lines.append(line)
        if line.startswith("        /*"):
            board = 5 if "LDG.E.128" in line else 7
            mask = 1 << vote_waits_for if "VOTE" in line else 0
            lines.append(f"{'':50}/* 0x{board << 46 | mask << 52:016x} */")
    return "\n".join(lines)


def test_a_vote_that_waits_for_the_next_tile_is_found() -> None:
    assert measure(_encoded(vote_waits_for=0)) == MEASURED
    assert measure(_encoded(vote_waits_for=5)) == {**MEASURED, "waits_for_the_next_tile": 1}


def test_a_loop_with_fewer_loads_is_not_the_one_over_tiles() -> None:
    cut = CODE.replace("LDG.E.128 R20", "LDG.E R20")
    assert measure(cut)["instructions_per_tile"] == 0
    assert measure("")["instructions"] == 0


def test_code_as_recorded_passes() -> None:
    assert cuda_sass.problems({"one": MEASURED}, {"one": MEASURED}) == []
    assert cuda_sass.problems({"one": MEASURED}, {"one": {}}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instructions_per_tile": 8}, "8 instructions a tile, expected at most 7"),
        ({"instructions_per_tile": 0}, "0 instructions a tile, expected at most 7"),
        ({"loads_per_tile": 5}, "5 loads a tile, expected 4"),
        ({"waits_for_the_next_tile": 1}, "1 waits for the next tile, expected none"),
        ({"generic_loads": 1}, "1 generic loads, expected none"),
        ({"local_accesses": 2}, "2 local accesses, expected none"),
    ],
)
def test_code_that_got_worse_is_refused(change: dict[str, int], message: str) -> None:
    assert cuda_sass.problems({"one": MEASURED | change}, {"one": MEASURED}) == [f"one: {message}"]


def test_the_limit_holds_whatever_is_recorded() -> None:
    slow = {"one": MEASURED | {"instructions_per_tile": LIMIT + 1}}
    assert cuda_sass.problems(slow, slow) == [
        f"one: {LIMIT + 1} instructions a tile, expected at most {LIMIT}"
    ]
    assert cuda_sass.problems({"one": MEASURED}, {}) == ["one: not recorded"]


def test_the_record_is_within_the_limit() -> None:
    record = json.loads(cuda_sass.RECORD.read_text())
    assert len(record["kernels"]) == len(cuda_sass.KERNELS) * len(cuda_sass.ARCHITECTURES)
    assert cuda_sass.problems(record["kernels"], record["kernels"]) == []


def test_generic_and_local_accesses_are_seen() -> None:
    text = CODE.replace("VOTE.ANY P1,", "LD.E R2,").replace("IADD3 R1,", "STL [R1],")
    assert measure(text)["generic_loads"] == 1
    assert measure(text)["local_accesses"] == 1
