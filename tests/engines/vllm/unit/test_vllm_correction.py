"""How the correction of counts is installed in the runner of vLLM and in vLLM-Ascend's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ngram_npu import _library
from ngram_npu.engines.vllm import options, plugin, v1_device
from vllm_config import vllm_config

FUNCTION = """
def update_num_computed_tokens_for_batch_change(
    num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count,
    prev_num_draft_tokens, cpu_num_computed_tokens,
): ...
STOCK = update_num_computed_tokens_for_batch_change
"""
RUNNER = FUNCTION + "class current_platform: device_type = 'cpu'\n"


def _imported(fake_vllm: Path, text: str) -> ModuleType:
    (fake_vllm / "spec_decode/ngram_proposer.py").touch()
    (fake_vllm / "worker/gpu_model_runner.py").write_text(text)
    plugin.install()
    plugin.install()
    return importlib.import_module(plugin.RUNNER)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if plugin.CORRECTION_LABEL in line]


@pytest.mark.usefixtures("info")
def test_it_is_installed_if_asked_for(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(options.CORRECTION, "1")
    runner = _imported(fake_vllm, RUNNER)
    ours = v1_device.update_num_computed_tokens_for_batch_change
    assert runner.update_num_computed_tokens_for_batch_change is ours
    plugin.install()
    assert _said(caplog) == [
        "ngram_npu: enabled for the correction of counts (NGRAM_NPU_VLLM=1)",
    ]
    options.read_options(vllm_config(), "custom_class")  # knows the variable


@pytest.mark.usefixtures("info")
@pytest.mark.parametrize(
    ("wish", "text", "doubt"),
    [
        (None, RUNNER, ""),
        ("0", RUNNER, ""),
        ("yes", RUNNER, "NGRAM_NPU_VLLM_CORRECTION: expected 0 or 1, got 'yes'"),
        ("1", RUNNER.replace("prev_positions", "order"), "takes (num_computed_tokens, num_acc"),
        ("1", RUNNER.replace("'cpu'", "'xpu'"), "there is no kernel for 'xpu'"),
    ],
)
def test_it_is_left_as_it_is(
    fake_vllm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wish: str | None,
    text: str,
    doubt: str,
) -> None:
    monkeypatch.delenv(options.CORRECTION, raising=False)
    if wish is not None:
        monkeypatch.setenv(options.CORRECTION, wish)
    runner = _imported(fake_vllm, text)
    assert runner.update_num_computed_tokens_for_batch_change is runner.STOCK
    said = _said(caplog)
    assert len(said) == bool(doubt)
    assert all(doubt in line and "which is left as it is" in line for line in said)


@pytest.mark.usefixtures("info")
def test_vllm_ascend_s_runner_needs_the_npu_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.CORRECTION, "1")
    for there in (False, True):
        monkeypatch.setattr(_library, "has_kernel", lambda op, device, there=there: there)
        runner = ModuleType(plugin.ASCEND_RUNNER)
        exec(FUNCTION, runner.__dict__)
        monkeypatch.setitem(sys.modules, plugin.ASCEND_RUNNER, runner)
        plugin.install_ascend()
        replaced = runner.update_num_computed_tokens_for_batch_change is not runner.STOCK
        assert replaced is there
