"""Tests that the check of the CUDA kernels' resources rejects worse compiler output."""

from __future__ import annotations

import pytest

from tools import cuda_resources
from tools.cuda_resources import SOURCES, read_architectures, shorten_name

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
