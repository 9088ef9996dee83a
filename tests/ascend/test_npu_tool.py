"""vLLM-Ascend's launcher as a peer in the benchmark, replaced by ours under its name, on the CPU.
test_launch.py runs the rest of tools/npu."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from ngram_npu.vllm.ascend import triton_ngram_spec_decode

from tools.bench.ops import OPS
from tools.bench.options import BenchError, Options, Size
from tools.npu import build

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
            OPS["ngram_step_"].run(options, lambda _: None)
        return
    (result,), _ = OPS["ngram_step_"].run(options, lambda _: None)
    assert result["same_drafts"] is True
    assert result["ratio"]["vllm-ascend"] > 0


def test_the_chip_that_is_named_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOC_VERSION", "Ascend910B3")
    command = build.command()
    assert "--config-settings=cmake.define.SOC_VERSION=Ascend910B3" in command
    assert "--config-settings=cmake.define.NGRAM_NPU_ASCENDC=ON" in command
