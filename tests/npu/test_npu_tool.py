"""Tests the choice of compiler errors that tools/npu/headers.py reports."""

from __future__ import annotations

import pytest

from tools.npu.headers import find_problems

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
