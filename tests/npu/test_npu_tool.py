"""tools/npu on the CPU: vLLM-Ascend's launcher as a peer in the benchmark, replaced by ours under
its name; what counts of a compiler's output when the kernels are checked against the real headers.
test_launch.py runs the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ngram_npu.engines.vllm.v1_device import triton_ngram_spec_decode

from tools.bench.ops import OPS
from tools.bench.options import BenchError, Options, Size
from tools.npu import build
from tools.npu.headers import problems, stand_ins

MODULE = "vllm_ascend.ops.triton.spec_decode.ngram"


def wrong(*arguments: Any, **lookup: Any) -> tuple[torch.Tensor, ...]:
    following, drafts, counts, sampled = triton_ngram_spec_decode(*arguments, **lookup)
    return following, drafts + 1, counts, sampled


@pytest.mark.parametrize("launcher", [triton_ngram_spec_decode, wrong])
def test_beside_vllm_ascend(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setattr(sys.modules[MODULE], "triton_ngram_spec_decode", launcher, raising=False)
    options = Options(sizes=(Size(3, 200),), rounds=1, peers=("vllm-ascend",), data_kind="periodic")
    if launcher is wrong:
        with pytest.raises(BenchError, match="vllm-ascend and ours draft differently"):
            list(OPS["ngram_step_"].run(options, {}))
        return
    (result,) = OPS["ngram_step_"].run(options, {})
    assert result["same_drafts"] is True
    assert result["ratio"]["vllm-ascend"] > 0


def test_the_chip_that_is_named_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOC_VERSION", "Ascend910B3")
    command = build.command()
    assert "--config-settings=cmake.define.SOC_VERSION=Ascend910B3" in command
    assert "--config-settings=cmake.define.NGRAM_NPU_ASCENDC=ON" in command


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
