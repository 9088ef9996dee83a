"""What of a compiler's output counts when the kernels are checked against the real headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.npu.headers import problems, stand_ins

INSTANTIATED = """\
/dk/impl.h: In instantiation of 'void Cast(T) [with T = int]':
/p/csrc/ascendc/gather.h:40:5:   required from here
/dk/impl.h:7:3: error: {}
"""


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("/dk/impl.h:7:3: error: 'vadd' was not declared in this scope\n", 0),
        ("/dk/impl.h:7:3: error: static assertion failed\n", 0),
        ("/p/csrc/ascendc/a.cpp:7:3: error: 'Maxz' is not a member of 'AscendC'\n", 1),
        ("/p/csrc/ascendc/a.cpp:7:3: warning: unused\n", 0),
        (INSTANTIATED.format("'vconv' was not declared in this scope"), 0),
        (INSTANTIATED.format("static assertion failed: no such conversion"), 1),
    ],
)
def test_what_counts(output: str, count: int) -> None:
    assert len(problems(output, "/p/csrc")) == count


def test_unused_parts_are_empty(tmp_path: Path) -> None:
    header = tmp_path / "devkit/include/adv_api/math/log.h"
    header.parent.mkdir(parents=True)
    header.write_text("#error not for here")
    names = stand_ins(tmp_path / "devkit", tmp_path / "made")
    assert (tmp_path / "made/include/adv_api/math/log.h").read_text() == ""
    assert "struct Part;" in names.read_text()
