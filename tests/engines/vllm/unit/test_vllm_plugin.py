"""Which functions of vLLM and of vLLM-Ascend the plugin replaces, and its message otherwise. The
modules are short and have the signatures of these projects."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ngram_npu_vllm_plugin
import pytest
import torch
from conftest import FakeVLLM
from fake_engine import CPU, LADDER, K, RequestState, StandaloneARSpeculator, config
from ngram_npu import _library
from ngram_npu.engines.vllm import options, plugin, v1_device
from ngram_npu.engines.vllm.patching import ASCEND_RUNNER, RUNNER, run_after_import
from ngram_npu.engines.vllm.plugin import MODULE, V2_MODULE
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE, NgramSpeculator

pytestmark = pytest.mark.usefixtures("info")

V1 = """
class NgramProposer:
    def __init__(self, vllm_config: "VllmConfig"): ...
    def load_model(self, *args, **kwargs): ...
    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec,
        token_ids_cpu,
        slot_mappings: "dict | None" = None,
    ) -> list[list[int]]: ...
"""
V1_ASYNC = """
class NgramProposerGPU:
    def __init__(self, vllm_config: "VllmConfig", device: "torch.device", runner=None): ...
    def load_model(self, *args, **kwargs): ...
    def update_token_ids_ngram(
        self, sampled_token_ids, gpu_input_batch, token_ids_gpu, num_tokens_no_spec,
        discard_request_mask,
    ): ...
    def propose(
        self, num_speculative_tokens: int, num_tokens_no_spec, token_ids_gpu,
        valid_sampled_token_ids_gpu, valid_sampled_tokens_count,
    ): ...
calls = []
def update_scheduler_for_invalid_drafts(
    num_valid_draft_tokens_event, num_valid_draft_tokens_cpu, scheduler_output, req_id_to_index
):
    calls.append((num_valid_draft_tokens_event, scheduler_output))
def copy_num_valid_draft_tokens(
    num_valid_draft_tokens_cpu, num_valid_draft_tokens_copy_stream, num_valid_draft_tokens_event,
    num_valid_draft_tokens, batch_size,
): ...
"""
CORRECTION = """
def update_num_computed_tokens_for_batch_change(
    num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count,
    prev_num_draft_tokens, cpu_num_computed_tokens,
): ...
class current_platform: device_type = 'cpu'
"""
V2 = """
from abc import ABC, abstractmethod
class NgramGPUSpeculator(ABC):
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
CONFIG = """
class VllmConfig:
    def __init__(self, config): vars(self).update(vars(config)); self.__post_init__()
    def __post_init__(self): self.validated = True
"""
ASCEND_FACTORY = """
class AscendNgramProposer:
    def __init__(self, vllm_config, runner): ...
    def load_model(self, *args, **kwargs): ...
    def dummy_run(
        self, num_tokens, with_prefill=None, in_graph_capturing=None, num_reqs=None,
        num_tokens_across_dp=None, aclgraph_runtime_mode=None, batch_descriptor=None,
        dummy_compute_logits=lambda hidden_states: None, is_profile=False,
    ): ...
    def propose(
        self, num_speculative_tokens: int, sampled_token_ids: "list[list[int]]",
        num_tokens_no_spec=None, token_ids_cpu=None, slot_mappings=None,
    ): ...
class AscendNgramProposerNPU(AscendNgramProposer):
    def __init__(self, vllm_config, device, runner): ...
def get_spec_decode_method(method, vllm_config, device, runner):
    if method == "ngram":
        return AscendNgramProposer(vllm_config, runner)
    return AscendNgramProposerNPU(vllm_config, device, runner)
"""
ASCEND_IMPORTS = """
from vllm_ascend.spec_decode import (
    AscendNgramProposer, AscendNgramProposerNPU, get_spec_decode_method
)
"""
ASCEND_LAUNCHER = """
def triton_ngram_spec_decode(
    token_ids, num_tokens_no_spec, sampled_token_ids, discard_request_mask, vocab_size, min_n,
    max_n, k,
): ...
"""

SOURCES = {
    MODULE: V1,
    RUNNER: V1_ASYNC,
    V2_MODULE: V2,
    plugin.ASCEND_FACTORY: ASCEND_FACTORY,
    ASCEND_RUNNER: ASCEND_IMPORTS + ASCEND_LAUNCHER,
    plugin.ASCEND_V2_MODULE: V2.replace("NgramGPU", "AscendNgram"),
}
REPLACED_NAMES = (
    *(plugin.CLASS, plugin.ASYNC_CLASS, plugin.TRIM, plugin.V2_CLASS),
    *(plugin.ASCEND_HOST, plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER, "AscendNgramSpeculator"),
)


def import_changed(vllm: FakeVLLM, name: str, old: str = "", new: str = "") -> Any:
    """Imports the module ``name`` after the plugin, with changed sources."""
    assert old in SOURCES[name] + ASCEND_FACTORY
    names = [plugin.ASCEND_FACTORY, name] if name.startswith("vllm_ascend.") else [name]
    for source in names:
        vllm.write(source, SOURCES[source].replace(old, new))
    return vllm.install_and_import(name)


def replaced_names(module: Any) -> set[str]:
    """Returns the names in a module of vLLM that the plugin has replaced."""
    values = {name: getattr(module, name, None) for name in REPLACED_NAMES}
    return {name for name, v in values.items() if str(v and v.__module__).startswith("ngram_npu")}


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    lines = [line for line in caplog.messages if part in line]
    assert not any("\n" in line for line in lines)
    return lines


@pytest.fixture
def npu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the plugin find kernels for an NPU."""
    stock = _library.has_kernel
    monkeypatch.setattr(
        _library, "has_kernel", lambda op, device: device == "npu" or stock(op, device)
    )


# The environment.

INERT = """
import importlib.metadata, sys
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ngram_npu")
before = set(sys.modules)
entry.load()()
new = sorted(set(sys.modules) - before)
assert new == ["ngram_npu_vllm_plugin"], new
"""


def test_disabled_plugin_imports_nothing() -> None:
    environment = {**os.environ, "NGRAM_NPU_VLLM": "0", "NGRAM_NPU_VLLM_ENGINE": "not an engine"}
    subprocess.run([sys.executable, "-c", INERT], env=environment, check=True)


@pytest.mark.parametrize(
    ("switch", "beside", "is_on"),
    [
        *((None, None, False), (None, "1", True), (None, "true", True), (None, "0", False)),
        *(("0", "1", False), ("1", None, True), ("", None, False), ("yes", None, False)),
    ],
)
def test_environment_enables_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str | None,
    beside: str | None,
    is_on: bool,
) -> None:
    for name, value in {"NGRAM_NPU_VLLM": switch, "NGRAM_NPU_VLLM_BESIDE": beside}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    installed: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: installed.append(True))
    ngram_npu_vllm_plugin.register()
    assert installed == [True] * is_on
    line = "ngram_npu: not enabled: NGRAM_NPU_VLLM: expected 0 or 1, got 'yes'"
    assert caplog.messages == [line] * (switch == "yes")


# The import of vLLM's modules.


def test_module_is_replaced_on_import_but_not_on_search(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    finders = len(sys.meta_path)
    vllm.write(MODULE, V1)
    plugin.install()
    waiting = len(sys.meta_path)
    plugin.install()
    assert len(sys.meta_path) == waiting > finders
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert str(spec.origin).endswith("ngram_proposer.py")
    assert MODULE not in sys.modules
    module: Any = importlib.import_module(MODULE)
    assert module.NgramProposer is plugin.StockNgramProposer
    assert len(sys.meta_path) == waiting - 1
    plugin.install()
    assert module.NgramProposer is plugin.StockNgramProposer
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert importlib.reload(module).NgramProposer is not plugin.StockNgramProposer


def test_all_actions_that_wait_for_a_module_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    calls: list[str] = []

    def first(module: ModuleType) -> None:
        calls.append("first")

    def second(module: ModuleType) -> None:
        calls.append("second")

    for action in (first, second, first, second):
        run_after_import("wave", action)
    importlib.util.find_spec("wave")
    assert calls == []
    importlib.import_module("wave")
    assert calls == ["first", "second"]
    run_after_import("wave", second)
    assert calls == ["first", "second", "second"]


def test_failed_import_may_be_repeated(vllm: FakeVLLM) -> None:
    vllm.write(MODULE, "raise RuntimeError('theirs')")
    with pytest.raises(RuntimeError, match="theirs"):
        vllm.install_and_import(MODULE)
    vllm.write(MODULE, V1 + "# longer, so that the cached bytecode is stale\n")
    module: Any = importlib.import_module(MODULE)
    assert module.NgramProposer is plugin.StockNgramProposer


def test_imported_module_is_replaced_unless_the_runner_has_bound_its_class(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write(MODULE, V1)
    module: Any = importlib.import_module(MODULE)
    runner: Any = ModuleType(RUNNER)
    runner.NgramProposer = module.NgramProposer
    monkeypatch.setitem(sys.modules, RUNNER, runner)
    plugin.install()
    assert module.NgramProposer is runner.NgramProposer
    assert "has bound NgramProposer already" in caplog.text
    del runner.NgramProposer
    plugin.install()
    assert module.NgramProposer is plugin.StockNgramProposer


def test_vllm_without_the_module_is_reported(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "MODULE", "vllm.v1.missing")
        plugin.install()
    assert "it has no vllm.v1.missing" in caplog.text
    vllm.write("vllm.v1.__init__", "raise RuntimeError('one\\ntwo')")
    sys.modules.pop("vllm.v1", None)
    sys.modules.pop("vllm.v1.spec_decode", None)
    caplog.clear()
    plugin.install()
    (line,) = caplog.messages
    assert "is not found: RuntimeError: one two" in line


# The signatures of vLLM's functions.

ABSTRACT = "    @abstractmethod\n    def bind(self): ...\n    def capture"
PRIVATE = "    def _begin(self): ...\n    def capture"
OTHER_CLASS = ASCEND_LAUNCHER + "class AscendNgramProposer: ...\n"
SUBCLASS = ASCEND_LAUNCHER + "class AscendNgramProposer(AscendNgramProposer): ...\n"
DEVICE_NAMES = {plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (RUNNER, "", ""),
        (V2_MODULE, "", ""),
        (V2_MODULE, "dp_sync_state", "dp_state"),
        (V2_MODULE, "capture(self)", "capture(self, sizes=None)"),
        (V2_MODULE, "req_states)", "req_states, adapters=None)"),
    ],
)
def test_known_class_is_replaced(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, name: str, old: str, new: str
) -> None:
    module = import_changed(vllm, name, old, new)
    replaced = vars(module).copy()
    plugin.install()
    assert vars(module) == replaced
    is_v2 = name == V2_MODULE
    label = "n-gram methods of the V2 runner" if is_v2 else "method 'ngram_gpu' of the V1 runner"
    line = f"ngram_npu: enabled for {label} (NGRAM_NPU_VLLM=1)"
    assert messages(caplog, "enabled for") == [line]
    assert caplog.records[-1].levelname == "DEBUG"  # the engine's method is still unknown
    if is_v2:
        assert issubclass(module.NgramGPUSpeculator, NgramSpeculator)
        assert issubclass(module.NgramGPUSpeculator, module.STOCK)
    else:
        assert module.NgramProposerGPU is v1_device.AsyncNgramProposer
        module.update_scheduler_for_invalid_drafts(None, None, "padded", {})
        module.update_scheduler_for_invalid_drafts("event", None, "trimmed", {})
        assert module.calls == [("event", "trimmed")]


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        (
            *(MODULE, "num_tokens_no_spec,", "req_ids, num_tokens_no_spec,"),
            "NgramProposer.propose takes (self, num_speculative_tokens, sampled_token_ids, req_ids",
        ),
        (MODULE, "__init__(self", "__init__(self, n", "__init__ takes (self, n, vllm_config), exp"),
        (MODULE, "load_model", "load", "there is no NgramProposer.load_model"),
        (MODULE, "class Ngram", "class Other", "there is no class NgramProposer"),
        (RUNNER, "valid_sampled_tokens_count", "n", "NgramProposerGPU.propose takes"),
        (RUNNER, "drafts(\n", "drafts(n,\n", "update_scheduler_for_invalid_drafts takes (n, num"),
        (RUNNER, "def copy_num", "def num", "there is no copy_num_valid_draft_tokens"),
        (V2_MODULE, "num_sampled, num_", "num_", "NgramGPUSpeculator.propose takes (self, input"),
        (V2_MODULE, "dummy_run=False, ", "", "NgramGPUSpeculator.propose takes (self, input_batch"),
        (V2_MODULE, "    def capture", ABSTRACT, "NgramGPUSpeculator.bind is abstract"),
        (V2_MODULE, "    def capture", PRIVATE, "has _begin, which ngram_npu's class has"),
        (V2_MODULE, "NgramGPU", "Other", "there is no class NgramGPUSpeculator"),
    ],
)
def test_unknown_signature_is_left_unchanged(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, name: str, old: str, new: str, reason: str
) -> None:
    module = import_changed(vllm, name, old, new)
    (line,) = set(messages(caplog, "not enabled"))
    refused = {
        MODULE: ", vLLM is left as it is: this vLLM (",
        RUNNER: " for method 'ngram_gpu' of the V1 runner, which is left as it is: ",
        V2_MODULE: " for the V2 runner, which is left as it is: ",
    }
    assert line.startswith(f"ngram_npu: not enabled{refused[name]}")
    assert reason in line
    assert replaced_names(module) == set()


@pytest.mark.parametrize(
    ("old", "new", "method", "reason"),
    [
        ("token_ids_cpu=None", "tokens=None", "ngram", "AscendNgramProposer.propose takes"),
        ("max_n, k,\n", "max_n, k, stride\n", "ngram_gpu", "triton_ngram_spec_decode takes"),
        (ASCEND_LAUNCHER, "", "ngram_gpu", "there is no triton_ngram_spec_decode"),
        (ASCEND_LAUNCHER, OTHER_CLASS, "ngram", "there is no AscendNgramProposer.__init__"),
        (ASCEND_LAUNCHER, SUBCLASS, "ngram", "makes another AscendNgramProposer than"),
        ("", "", "ngram_gpu", f"no NPU kernels: {_library.backends()['npu'].reason}"),
    ],
)
def test_unknown_ascend_method_is_left_unchanged(
    vllm: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    old: str,
    new: str,
    method: str,
    reason: str,
) -> None:
    if old:
        request.getfixturevalue("npu_kernels")
    module = import_changed(vllm, ASCEND_RUNNER, old, new)
    (line,) = messages(caplog, f"not enabled for method {method!r}")
    assert reason in line
    others = {"ngram": DEVICE_NAMES, "ngram_gpu": {plugin.ASCEND_HOST}}
    assert replaced_names(module) == others[method]


# The V1 runner.


@pytest.mark.parametrize(
    ("value", "old", "new", "expected"),
    [
        ("1", "", "", None),
        ("0", "", "", ""),
        ("", "", "", "NGRAM_NPU_VLLM_CORRECTION: expected 0 or 1, got ''"),
        ("1", "prev_positions", "order", "takes (num_computed_tokens, num_acc"),
        ("1", "'cpu'", "'xpu'", "there is no kernel for 'xpu'"),
    ],
)
def test_correction_of_counts_is_replaced_on_request(
    vllm: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
    old: str,
    new: str,
    expected: str | None,
) -> None:
    monkeypatch.setenv(options.CORRECTION, value)
    vllm.write(RUNNER, CORRECTION.replace(old, new))
    runner = vllm.install_and_import(RUNNER)
    plugin.install()
    lines = messages(caplog, plugin.CORRECTION_LABEL)
    function = runner.update_num_computed_tokens_for_batch_change
    if expected is None:
        assert function is v1_device.update_num_computed_tokens_for_batch_change
        assert lines == ["ngram_npu: enabled for the correction of counts (NGRAM_NPU_VLLM=1)"]
        options.read_options(config(), "custom_class")  # accepts the variable
    else:
        assert function.__module__ == RUNNER
        assert len(set(lines)) == bool(expected)
        assert all(expected in line and "which is left as it is" in line for line in lines)


def test_v1_runner_warns_that_beside_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    created: list[Any] = []

    class GPUModelRunner:
        def __init__(self, vllm_config: Any, device: Any) -> None:
            created.append((vllm_config, device))

    for _ in range(2):
        plugin._install_async(SimpleNamespace(GPUModelRunner=GPUModelRunner, __name__="other"))  # type: ignore[arg-type]
    with_option, without = config(beside=True), config()
    GPUModelRunner(without, CPU)
    assert messages(caplog, "beside") == []
    GPUModelRunner(with_option, device=CPU)
    line = "ngram_npu: beside=True has no effect: this is the V1 runner"
    assert messages(caplog, "beside") == [line]
    assert created == [(without, CPU), (with_option, CPU)]


# Options.


@pytest.mark.parametrize(
    ("method", "in_v2", "settings", "message"),
    [
        ("ngram_gpu", True, {"lokup": "1-16"}, "unknown option 'lokup' .* did you mean 'lookup'"),
        ("ngram_gpu", True, {"draft_on": "device", **LADDER}, "draft_on='host' drafts there"),
        ("ngram_gpu", False, {"draft_on": "host"}, "draft_on: expected only in the V2 runner"),
        ("eagle", True, {"beside": True, "store_file": "f"}, "store_file: expected none without"),
        ("eagle", False, {"beside": True, "store_file": "f"}, None),
        ("ngram_gpu", True, {"lookup": "1-16"}, None),
        (None, True, {"lokup": "1-16"}, None),
        ("custom_class", True, {"lokup": "1-16"}, None),
    ],
)
def test_options_are_checked_when_the_configuration_is_created(
    vllm: FakeVLLM, method: str | None, in_v2: bool, settings: dict[str, Any], message: str | None
) -> None:
    vllm.write("vllm.config.__init__", "")
    vllm.write("vllm.platforms", "class current_platform: device_type = 'cuda'\n")
    vllm.write(plugin.CONFIG, CONFIG)
    create = vllm.install_and_import(plugin.CONFIG).VllmConfig
    vllm_config = config(**settings)
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = in_v2
    vllm_config.speculative_config.target_model_config = vllm_config.model_config
    is_ngram = str(method).startswith("ngram")
    draft = vllm_config.model_config if is_ngram else SimpleNamespace()
    vllm_config.speculative_config.draft_model_config = draft
    if message is None:
        assert create(vllm_config).validated
        return
    with pytest.raises(ValueError, match=message):
        create(vllm_config)
    if not is_ngram:  # the drafter's configuration, which vLLM derives
        vllm_config.model_config = draft
        assert create(vllm_config).validated


# A neural drafter.


def create_by_runner(
    neural: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, **state: Any
) -> Any:
    """Lets the V2 runner's module, with the plugin, create a speculator."""

    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        return neural

    module: Any = ModuleType(plugin.V2_RUNNER)
    module.init_speculator = init_speculator if state else lambda vllm_config, device: neural
    monkeypatch.setitem(sys.modules, plugin.V2_RUNNER, module)
    plugin.install_beside()
    plugin.install_beside()
    return module.init_speculator(vllm_config, CPU, **state)


def neural_config(**settings: Any) -> Any:
    return config(**{"method": "draft_model", "beside": True, **settings})


def test_ngram_drafts_are_added_on_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create(vllm_config: Any) -> Any:
        state = RequestState()
        return create_by_runner(
            StandaloneARSpeculator(), vllm_config, monkeypatch, req_states=state
        )

    assert not hasattr(create(neural_config(beside=False)), LOOKUP_ATTRIBUTE)
    assert caplog.messages == []
    neural = create(neural_config())
    assert isinstance(neural, StandaloneARSpeculator)
    assert neural.propose.__self__ is getattr(neural, LOOKUP_ATTRIBUTE)
    monkeypatch.setenv("NGRAM_NPU_VLLM_BESIDE", "1")
    vllm_config = neural_config()
    vllm_config.additional_config = {}
    assert hasattr(create(vllm_config), LOOKUP_ATTRIBUTE)
    with pytest.raises(ValueError, match="did you mean 'beside_threshold'"):
        create(neural_config(beside_treshold=1.0))


def change_class(**members: Any) -> Any:
    """Returns a supported speculator whose class has these members."""
    return type("StandaloneARSpeculator", (StandaloneARSpeculator,), members)()


def change(**attributes: Any) -> Any:
    speculator = StandaloneARSpeculator()
    vars(speculator).update(attributes)
    return speculator


def old_propose(self: Any, input_batch: Any, num_sampled: Any) -> None: ...


def other_observe(self: Any, idx: Any, sampled: Any, rejected: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "neural", "reason"),
    [
        ("dflash", change(), "method is 'dflash', expected one of"),
        ("mtp", change(), "'mtp' is served by StandaloneARSpeculator, expected MTPSpeculator"),
        *[
            ("draft_model", neural, reason)
            for neural, reason in (
                (change_class(propose=old_propose), "propose takes (self, input_batch, num_sam"),
                (change_class(observe_verification=other_observe), "takes (self, idx, sampled,"),
                (change_class(observe_verification=None), "there is no StandaloneARSpeculator.ob"),
                (change(draft_watermarker=object()), "drafts are watermarked"),
                (change_class(__init__=lambda self: None), "has no draft_logits"),
                (change(draft_logits=torch.zeros(6, 100)), "draft_logits have shape (6, 100)"),
                (change(draft_logits=torch.zeros(6, K, 99)), "expected (rows, 4, 100 or more)"),
                (change(draft_logits=torch.zeros(6, K + 1, 100)), "have shape (6, 5, 100)"),
            )
        ],
    ],
)
def test_unsupported_neural_speculator_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    neural: Any,
    reason: str,
) -> None:
    vllm_config, state = neural_config(method=method), RequestState()
    assert create_by_runner(neural, vllm_config, monkeypatch, req_states=state) is neural
    assert not hasattr(neural, LOOKUP_ATTRIBUTE)
    assert "propose" not in vars(neural)
    (line,) = messages(caplog, "")
    prefix = "ngram_npu: beside=True has no effect, the speculator is left as it is: "
    assert line.startswith(prefix)
    assert reason in line


def test_neural_speculator_of_an_unknown_runner_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for state, reason in (
        ({}, "init_speculator takes (vllm_config, device), expected"),
        ({"req_states": SimpleNamespace()}, "the runner's state has no all_token_ids.gpu"),
    ):
        neural = create_by_runner(StandaloneARSpeculator(), neural_config(), monkeypatch, **state)
        assert not hasattr(neural, LOOKUP_ATTRIBUTE)
        assert reason in caplog.messages[-1]


# vLLM-Ascend.


@pytest.mark.usefixtures("npu_kernels")
def test_ascend_factory_creates_ngram_drafters(vllm: FakeVLLM) -> None:
    runner = import_changed(vllm, ASCEND_RUNNER)
    for method, drafter in (
        ("ngram", v1_device.AscendNgramProposer),
        ("ngram_gpu", v1_device.AscendNgramProposerNPU),
    ):
        created = runner.get_spec_decode_method(method, config(), CPU, object())
        assert isinstance(created, drafter)
        assert getattr(runner, drafter.__name__) is drafter
    assert runner.triton_ngram_spec_decode is v1_device.triton_ngram_spec_decode


@pytest.mark.usefixtures("npu_kernels")
def test_ascend_correction_is_replaced_for_an_npu(
    vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM-Ascend's runner need not have vLLM's ``current_platform``."""
    monkeypatch.setenv(options.CORRECTION, "1")
    changed = ASCEND_LAUNCHER + CORRECTION.replace("current_platform", "other_platform")
    runner = import_changed(vllm, ASCEND_RUNNER, ASCEND_LAUNCHER, changed)
    replacement = v1_device.update_num_computed_tokens_for_batch_change
    assert runner.update_num_computed_tokens_for_batch_change is replacement


@pytest.mark.parametrize(
    ("has_kernel", "reason"),
    [(False, "no kernels for npu: "), (True, "all_token_ids.gpu (rank, dtype, device, stride)")],
)
def test_ascend_v2_speculator_is_replaced_where_it_can_draft(
    vllm: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_kernel: bool,
    reason: str,
) -> None:
    module = import_changed(vllm, plugin.ASCEND_V2_MODULE)
    speculator = module.AscendNgramSpeculator(config(), CPU, RequestState())
    assert isinstance(speculator, NgramSpeculator)
    assert speculator._drafting.config.match_policy == "earliest"
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: has_kernel)
    npu = SimpleNamespace(type="npu")
    assert type(module.AscendNgramSpeculator(config(), npu, RequestState())) is module.STOCK
    line = "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    assert messages(caplog, "enabled for n-gram") == [line]
    assert plugin.V2_REFUSAL + ": " + reason in caplog.messages[-1]
