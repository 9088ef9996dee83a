"""When the V2 runner's stock class is replaced, and the message if it is not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from ngram_npu.vllm import v2_plugin
from ngram_npu.vllm.v2 import NgramSpeculator

KNOWN = """
class NgramGPUSpeculator:
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None
    def __init__(self, vllm_config, device, req_states): ...
    def init_cudagraph_manager(self, cudagraph_mode): ...
    def capture(self): ...
    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
        num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
        dp_sync_state=None, dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None,
        is_profile=False, num_speculative_tokens=None,
    ): ...
STOCK = NgramGPUSpeculator
"""


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


def _installed(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stock class's module, imported already, with the given text."""
    module = ModuleType(v2_plugin.MODULE)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, v2_plugin.MODULE, module)
    v2_plugin.install()
    return module


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(KNOWN, id="0.32.0"),
        pytest.param(KNOWN.replace("dp_sync_state", "dp_state"), id="another-name"),
    ],
)
def test_the_class_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    module = _installed(text, monkeypatch)
    assert issubclass(module.NgramGPUSpeculator, NgramSpeculator)
    ours = module.NgramGPUSpeculator
    v2_plugin.install()
    assert module.NgramGPUSpeculator is ours
    assert caplog.messages == [
        "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    ]


def test_a_vllm_without_a_v2_runner_has_nothing_to_be_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    v2_plugin.install()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        pytest.param("", "has no class NgramGPUSpeculator", id="no-class"),
        pytest.param(
            KNOWN.replace("num_sampled, num_rejected", "num_rejected, num_sampled"),
            "NgramGPUSpeculator.propose takes (self, input_batch,",
            id="another-order",
        ),
        pytest.param(
            KNOWN.replace("dummy_run=False, ", ""), "propose takes (self,", id="no-dummy-run"
        ),
        pytest.param(
            KNOWN.replace("device, req_states", "device"),
            "__init__ takes (self, vllm_config, device), expected (self, vllm_config, device, req",
            id="another-constructor",
        ),
        pytest.param(
            KNOWN.replace("def capture(self)", "def capture_graphs(self)"),
            "NgramGPUSpeculator has capture_graphs, which ngram_npu's class lacks",
            id="another-method",
        ),
        pytest.param(
            KNOWN.replace("    def capture(self): ...\n", ""),
            "NgramGPUSpeculator has no capture",
            id="a-method-less",
        ),
        pytest.param(
            KNOWN.replace("draft_logits = None", "draft_logits = None; confidences = None"),
            "NgramGPUSpeculator has confidences, which ngram_npu's class lacks",
            id="another-attribute",
        ),
    ],
)
def test_an_unknown_one_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, doubt: str
) -> None:
    module = _installed(text, monkeypatch)
    assert getattr(module, "NgramGPUSpeculator", None) is getattr(module, "STOCK", None)
    (line,) = caplog.messages
    assert line.startswith("ngram_npu: not enabled for the V2 runner, which is left as it is: ")
    assert doubt in line
    assert "\n" not in line
