"""Which speculators get n-gram drafts beside their own, and the messages for the others."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from beside_runner import VOCAB, K, R, StandaloneARSpeculator, State, config
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm.plugin import V2_RUNNER as RUNNER
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("info")


def _installed(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> Any:
    """The runner's module with these functions, after the plugin."""
    module = ModuleType(RUNNER)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, RUNNER, module)
    plugin.install_beside()
    plugin.install_beside()
    return module


def _made_by_the_runner(
    speculator: Any, given: Any, monkeypatch: pytest.MonkeyPatch, state: Any = None
) -> Any:
    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        return speculator

    module = _installed(monkeypatch, init_speculator=init_speculator)
    return module.init_speculator(given, CPU, req_states=state or State())


def test_it_is_there_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _made_by_the_runner(StandaloneARSpeculator(), config(), monkeypatch)
    assert isinstance(made, StandaloneARSpeculator)
    assert made.propose.__self__ is getattr(made, LOOKUP_ATTRIBUTE)


@pytest.mark.parametrize("asked", [{"beside": False}, {}])
def test_it_is_off_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: Any
) -> None:
    given = config()
    given.additional_config = {"ngram_npu": asked}
    made = _made_by_the_runner(StandaloneARSpeculator(), given, monkeypatch)
    assert not hasattr(made, LOOKUP_ATTRIBUTE)
    assert caplog.messages == []


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGRAM_NPU_VLLM_BESIDE", "1")
    given = config()
    given.additional_config = {}
    assert hasattr(
        _made_by_the_runner(StandaloneARSpeculator(), given, monkeypatch), LOOKUP_ATTRIBUTE
    )


def test_an_option_that_cannot_be_meant_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean 'beside_threshold'"):
        _made_by_the_runner(StandaloneARSpeculator(), config(beside_treshold=1.0), monkeypatch)
    with pytest.raises(ValueError, match="beside_threshold: expected 0 to 64, got -1"):
        _made_by_the_runner(StandaloneARSpeculator(), config(beside_threshold=-1.0), monkeypatch)


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({"NGRAM_NPU_VLLM_BESIDE": "1"}, True),
        ({"NGRAM_NPU_VLLM_BESIDE": "true"}, True),
        ({"NGRAM_NPU_VLLM_BESIDE": "0"}, False),
        ({"NGRAM_NPU_VLLM_BESIDE": "1", "NGRAM_NPU_VLLM": "0"}, False),
        ({"NGRAM_NPU_VLLM": "1"}, True),
    ],
)
def test_its_variable_implies_the_plugin(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_on: bool
) -> None:
    import ngram_npu_vllm_plugin

    for name in ("NGRAM_NPU_VLLM", "NGRAM_NPU_VLLM_BESIDE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    installed: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: installed.append(True))
    ngram_npu_vllm_plugin.register()
    assert installed == [True] * is_on


def test_the_v1_runner_says_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []

    class GPUModelRunner:
        def __init__(self, vllm_config: Any, device: Any) -> None:
            made.append((vllm_config, device))

    for _ in range(2):
        plugin.wrap_function(GPUModelRunner, "__init__", plugin._warn_without_beside)
    asked, other = config(), config()
    other.additional_config = {}
    GPUModelRunner(other, CPU)
    assert caplog.messages == []
    GPUModelRunner(asked, device=CPU)
    assert caplog.messages == ["ngram_npu: beside=True has no effect: this is the V1 runner"]
    assert made == [(other, CPU), (asked, CPU)]


class Gemma4Speculator(StandaloneARSpeculator):
    pass


def _changed(**attributes: Any) -> Any:
    """The known speculator's class with these attributes replaced; None removes one."""
    own = {*attributes, "__dict__", "__weakref__"}
    kept = {n: v for n, v in vars(StandaloneARSpeculator).items() if n not in own}
    given = {n: v for n, v in attributes.items() if v is not None}
    return type("StandaloneARSpeculator", (), {**kept, **given})()


def _with(**attributes: Any) -> Any:
    made = StandaloneARSpeculator()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _without_logits() -> Any:
    made = StandaloneARSpeculator()
    del made.draft_logits
    return made


def _propose_of_old(self: Any, input_batch: Any, num_sampled: Any) -> None: ...


def _observe_more(self: Any, idx: Any, sampled: Any, rejected: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("made", "given", "doubt"),
    [
        (StandaloneARSpeculator(), config(method="dflash"), "method is 'dflash', expected one of"),
        (StandaloneARSpeculator(), config(method="ngram_gpu"), "method is 'ngram_gpu', expected"),
        (Gemma4Speculator(), config(), "'draft_model' is served by Gemma4Speculator, expected St"),
        (StandaloneARSpeculator(), config(method="mtp"), "expected MTPSpeculator"),
        (_changed(propose=_propose_of_old), config(), "propose takes (self, input_batch, num_sam"),
        (_changed(observe_verification=_observe_more), config(), "takes (self, idx, sampled, rej"),
        (_changed(observe_verification=None), config(), "there is no StandaloneARSpeculator.obs"),
        (_with(draft_watermarker=object()), config(), "drafts are watermarked"),
        (_without_logits(), config(), "has no draft_logits"),
        (_with(draft_logits=torch.zeros(R, VOCAB)), config(), "draft_logits have shape (6, 64)"),
        (_with(draft_logits=torch.zeros(R, K, VOCAB - 1)), config(), "expected (rows, 4, 64 or"),
    ],
)
def test_others_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made: Any,
    given: Any,
    doubt: str,
) -> None:
    assert _made_by_the_runner(made, given, monkeypatch) is made
    assert not hasattr(made, LOOKUP_ATTRIBUTE)
    assert "propose" not in vars(made)
    (line,) = caplog.messages
    start = "ngram_npu: beside=True has no effect, the speculator is left as it is: "
    assert line.startswith(start)
    assert doubt in line
    assert "\n" not in line


def test_a_state_that_cannot_be_looked_up_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = SimpleNamespace(all_token_ids=State().all_token_ids)
    made = _made_by_the_runner(StandaloneARSpeculator(), config(), monkeypatch, state)
    assert not hasattr(made, LOOKUP_ATTRIBUTE)
    assert "the runner's state has no total_len.gpu" in caplog.messages[0]


def test_a_runner_that_makes_its_speculator_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init_speculator(vllm_config: Any, device: Any) -> Any:
        return StandaloneARSpeculator()

    module = _installed(monkeypatch, init_speculator=init_speculator)
    assert not hasattr(module.init_speculator(config(), CPU), LOOKUP_ATTRIBUTE)
    assert "init_speculator takes (vllm_config, device), expected" in caplog.messages[0]
    assert not hasattr(_installed(monkeypatch), "init_speculator")
