"""The gate on the CUDA kernels' resources, tested with wrong compiler output and wrong records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.cuda_resources import Resources, architectures, parse, problems, short_name

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
