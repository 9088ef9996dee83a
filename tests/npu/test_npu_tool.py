"""Tests tools/npu on the CPU: the benchmark, with a replacement of vLLM-Ascend's launcher, and the
choice of compiler errors that headers.py reports. test_launch.py tests other tools."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from ngram_npu.engines.vllm.v1_device import triton_ngram_spec_decode

from tools.bench.ops import OPS
from tools.bench.options import Options, Size
from tools.npu.headers import find_problems

MODULE = "vllm_ascend.ops.triton.spec_decode.ngram"


def test_bench_compares_drafts_with_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    names = MODULE.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    launcher = triton_ngram_spec_decode
    monkeypatch.setattr(sys.modules[MODULE], launcher.__name__, launcher, raising=False)
    options = Options(sizes=(Size(3, 200),), rounds=1, peers=("vllm-ascend",), data_kind="periodic")
    (result,) = OPS["ngram_step_"].run(options, {})
    assert result["same_drafts"] is True
    assert result["ratio"]["vllm-ascend"] > 0


TEMPLATE_ERROR_OUTPUT = """\
/devkit/impl.h: In instantiation of 'void Cast(T) [with T = int]':
/project/csrc/ascendc/gather.h:40:5:   required from here
/devkit/impl.h:7:3: error: {}
"""


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("/devkit/impl.h:7:3: error: 'vadd' was not declared in this scope\n", 0),  # an intrinsic
        ("/devkit/impl.h:7:3: error: static assertion failed\n", 0),
        ("/project/csrc/ascendc/a.cpp:7:3: error: 'Maxz' is not a member of 'AscendC'\n", 1),
        ("/project/csrc/ascendc/a.cpp:7:3: warning: unused\n", 0),
        (TEMPLATE_ERROR_OUTPUT.format("'vconv' was not declared in this scope"), 0),  # as above
        (TEMPLATE_ERROR_OUTPUT.format("static assertion failed: no such conversion"), 1),
    ],
)
def test_header_check_reports_only_errors_of_our_kernels(output: str, count: int) -> None:
    assert len(find_problems(output, "/project/csrc")) == count
