"""Tests which functions of vLLM and vLLM-Ascend the plugin replaces, and its messages about others.
The fake modules are short and have the real signatures."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ngram_npu_vllm_plugin
import pytest
import torch
from conftest import FakeVLLM
from fake_engine import (
    CPU,
    STORE,
    K,
    RequestState,
    StandaloneARSpeculator,
    make_config,
)
from ngram_npu import _library
from ngram_npu.engines.vllm import ascend, options, plugin, v1
from ngram_npu.engines.vllm.drafter import ATTRIBUTE
from ngram_npu.engines.vllm.patching import ASCEND_RUNNER, RUNNER
from ngram_npu.engines.vllm.plugin import MODULE, V2_MODULE
from ngram_npu.engines.vllm.v2 import NgramSpeculator, RowDrafter

pytestmark = pytest.mark.usefixtures("plugin_log")

V1_SOURCE = """
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
V1_ASYNC_SOURCE = """
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
def update_scheduler_for_invalid_drafts(
    num_valid_draft_tokens_event, num_valid_draft_tokens_cpu, scheduler_output, req_id_to_index
): ...
def copy_num_valid_draft_tokens(
    num_valid_draft_tokens_cpu, num_valid_draft_tokens_copy_stream, num_valid_draft_tokens_event,
    num_valid_draft_tokens, batch_size,
): ...
class current_platform: device_type = 'cpu'
"""
CORRECTION_SOURCE = """
def update_num_computed_tokens_for_batch_change(
    num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count,
    prev_num_draft_tokens, cpu_num_computed_tokens,
): ...
class current_platform: device_type = 'cpu'
"""
V2_SOURCE = """
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
CONFIG_SOURCE = """
class VllmConfig:
    def __init__(self, config): vars(self).update(vars(config)); self.__post_init__()
    def __post_init__(self): self.validated = True
"""
ASCEND_FACTORY_SOURCE = """
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
ASCEND_IMPORTS_SOURCE = """
from vllm_ascend.spec_decode import (
    AscendNgramProposer, AscendNgramProposerNPU, get_spec_decode_method
)
"""
ASCEND_RUNNER_SOURCE = """
class NPUModelRunner: ...
"""
ASCEND_LAUNCHER_SOURCE = """
def triton_ngram_spec_decode(
    token_ids, num_tokens_no_spec, sampled_token_ids, discard_request_mask, vocab_size, min_n,
    max_n, k,
): ...
"""

SOURCES = {
    MODULE: V1_SOURCE,
    RUNNER: V1_ASYNC_SOURCE,
    V2_MODULE: V2_SOURCE,
    plugin.ASCEND_FACTORY: ASCEND_FACTORY_SOURCE,
    ASCEND_RUNNER: ASCEND_IMPORTS_SOURCE + ASCEND_RUNNER_SOURCE + ASCEND_LAUNCHER_SOURCE,
    plugin.ASCEND_V2_MODULE: V2_SOURCE.replace("NgramGPU", "AscendNgram"),
}
REPLACEABLE_NAMES = (
    *(plugin.CLASS, plugin.ASYNC_CLASS, plugin.TRIM_FUNCTION, plugin.V2_CLASS),
    *(plugin.ASCEND_HOST, plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER, "AscendNgramSpeculator"),
)


def import_changed(vllm: FakeVLLM, name: str, old_text: str = "", new_text: str = "") -> Any:
    """Installs the plugin, and imports the module ``name`` with changes of its source."""
    assert old_text in SOURCES[name] + ASCEND_FACTORY_SOURCE
    names = [plugin.ASCEND_FACTORY, name] if name.startswith("vllm_ascend.") else [name]
    for source in names:
        vllm.write_module(source, SOURCES[source].replace(old_text, new_text))
    return vllm.install_and_import(name)


def list_replaced_names(module: Any) -> set[str]:
    """Returns the names in a module of vLLM that the plugin has replaced."""
    values = {name: getattr(module, name, None) for name in REPLACEABLE_NAMES}
    return {name for name, v in values.items() if str(v and v.__module__).startswith("ngram_npu")}


def find_messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    lines = [line for line in caplog.messages if text in line]
    assert not any("\n" in line for line in lines)
    return lines


@pytest.fixture
def npu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the plugin find kernels for an NPU."""
    stock = _library.has_kernel
    monkeypatch.setattr(
        _library, "has_kernel", lambda op, device: device == "npu" or stock(op, device)
    )


# The environment variables that enable the plugin.


@pytest.mark.parametrize(
    ("switch", "neural", "is_on"),
    [
        *((None, None, False), (None, "1", True), (None, "true", True), (None, "0", False)),
        *(("0", "1", False), ("1", None, True), ("", None, False), ("yes", None, False)),
    ],
)
def test_environment_variables_enable_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str | None,
    neural: str | None,
    is_on: bool,
) -> None:
    for name, value in {"NGRAM_NPU_VLLM": switch, "NGRAM_NPU_VLLM_NEURAL": neural}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    installed: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: installed.append(True))
    ngram_npu_vllm_plugin.register()
    assert installed == [True] * is_on
    line = "ngram_npu: not enabled: NGRAM_NPU_VLLM: expected 0 or 1, got 'yes'"
    assert caplog.messages == [line] * (switch == "yes")


def test_options_without_the_switch_are_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("NGRAM_NPU_VLLM", "NGRAM_NPU_VLLM_NEURAL"):
        monkeypatch.delenv(name, raising=False)
    ngram_npu_vllm_plugin._warn.cache_clear()
    ngram_npu_vllm_plugin.register()  # before vLLM's configuration is imported
    module: Any = ModuleType(ngram_npu_vllm_plugin.CONFIG_MODULE)
    exec(CONFIG_SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        ngram_npu_vllm_plugin.register()
    unused = {"other_backend": {}}, {}, object()
    for additional_config in unused:
        assert module.VllmConfig(SimpleNamespace(additional_config=additional_config)).validated
    custom_class = SimpleNamespace(model="ngram_npu.engines.vllm.NgramProposer")
    section = {"ngram_npu": {"lookup": "auto"}}
    module.VllmConfig(SimpleNamespace(additional_config=section, speculative_config=custom_class))
    assert caplog.messages == []
    for name in ("ngram_npu", "ngram-npu"):
        assert module.VllmConfig(SimpleNamespace(additional_config={name: {}})).validated
    (line,) = caplog.messages
    assert line.startswith("ngram_npu: the options in additional_config have no effect: expected")


# The import of vLLM's modules.


def test_module_is_replaced_on_import_but_not_on_search(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    num_finders = len(sys.meta_path)
    vllm.write_module(MODULE, V1_SOURCE)
    plugin.install()
    num_with_hooks = len(sys.meta_path)
    plugin.install()
    assert len(sys.meta_path) == num_with_hooks > num_finders
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert str(spec.origin).endswith("ngram_proposer.py")
    assert MODULE not in sys.modules
    module: Any = importlib.import_module(MODULE)
    assert module.NgramProposer is v1.StockNgramProposer
    assert len(sys.meta_path) == num_with_hooks - 1
    plugin.install()
    assert module.NgramProposer is v1.StockNgramProposer
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert importlib.reload(module).NgramProposer is not v1.StockNgramProposer


def test_class_is_replaced_if_a_failed_import_is_repeated(vllm: FakeVLLM) -> None:
    vllm.write_module(MODULE, "raise RuntimeError('from vllm')")
    with pytest.raises(RuntimeError, match="from vllm"):
        vllm.install_and_import(MODULE)
    vllm.write_module(MODULE, V1_SOURCE + "# The file's new size makes Python recompile it.\n")
    module: Any = importlib.import_module(MODULE)
    assert module.NgramProposer is v1.StockNgramProposer


def test_class_of_imported_module_is_replaced_unless_the_runner_has_bound_it(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write_module(MODULE, V1_SOURCE)
    module: Any = importlib.import_module(MODULE)
    runner: Any = ModuleType(RUNNER)
    runner.NgramProposer = module.NgramProposer
    monkeypatch.setitem(sys.modules, RUNNER, runner)
    plugin.install()
    assert module.NgramProposer is runner.NgramProposer
    assert "has bound NgramProposer already" in caplog.text
    del runner.NgramProposer
    plugin.install()
    assert module.NgramProposer is v1.StockNgramProposer


def test_missing_or_broken_module_of_vllm_is_logged(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plugin, "MODULE", "vllm.v1.missing")
        plugin.install()
    assert "it has no vllm.v1.missing" in caplog.text
    vllm.write_module("vllm.v1.__init__", "raise RuntimeError('one\\ntwo')")
    sys.modules.pop("vllm.v1", None)
    sys.modules.pop("vllm.v1.spec_decode", None)
    caplog.clear()
    plugin.install()
    (line,) = caplog.messages
    assert "is not found: RuntimeError: one two" in line


# The signatures of vLLM's functions.

ABSTRACT_METHOD = "    @abstractmethod\n    def bind(self): ...\n    def capture"
PRIVATE_METHOD = "    def _method(self): ...\n    def capture"
OTHER_CLASS = ASCEND_LAUNCHER_SOURCE + "class AscendNgramProposer: ...\n"
SUBCLASS = ASCEND_LAUNCHER_SOURCE + "class AscendNgramProposer(AscendNgramProposer): ...\n"
DEVICE_NAMES = {plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER}


@pytest.mark.parametrize("name", [RUNNER, V2_MODULE])
def test_class_with_known_signature_is_replaced_once(
    vllm: FakeVLLM, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """V2's ``propose`` and ``capture`` may have further parameters."""
    further = "capture(self)", "capture(self, sizes=None)"
    module = import_changed(vllm, name, *(further if name == V2_MODULE else ()))
    members = vars(module).copy()
    plugin.install()
    assert vars(module) == members
    (record,) = [record for record in caplog.records if "enabled for" in record.getMessage()]
    assert record.levelname == "DEBUG"  # the engine's method is still unknown
    if name == V2_MODULE:
        assert issubclass(module.NgramGPUSpeculator, NgramSpeculator)
        assert issubclass(module.NgramGPUSpeculator, module.STOCK)
    else:
        assert module.NgramProposerGPU is v1.AsyncNgramProposer


@pytest.mark.parametrize(
    ("name", "old_text", "new_text", "reason"),
    [
        (
            *(MODULE, "num_tokens_no_spec,", "req_ids, num_tokens_no_spec,"),
            "NgramProposer.propose takes (self, num_speculative_tokens, sampled_token_ids, req_ids",
        ),
        (MODULE, "load_model", "load", "there is no NgramProposer.load_model"),
        (MODULE, "class Ngram", "class Other", "there is no class NgramProposer"),
        (RUNNER, "valid_sampled_tokens_count", "n", "NgramProposerGPU.propose takes"),
        (RUNNER, "drafts(\n", "drafts(n,\n", "update_scheduler_for_invalid_drafts takes (n, num"),
        (RUNNER, "def copy_num", "def num", "there is no copy_num_valid_draft_tokens"),
        (V2_MODULE, "dummy_run=False, ", "", "NgramGPUSpeculator.propose takes (self, input_batch"),
        (V2_MODULE, "    def capture", ABSTRACT_METHOD, "NgramGPUSpeculator.bind is abstract"),
        (V2_MODULE, "    def capture", PRIVATE_METHOD, "has _method, which ngram_npu's class has"),
        (V2_MODULE, "NgramGPU", "Other", "there is no class NgramGPUSpeculator"),
    ],
)
def test_class_with_unknown_signature_is_left_unchanged(
    vllm: FakeVLLM, caplog: Any, name: str, old_text: str, new_text: str, reason: str
) -> None:
    module = import_changed(vllm, name, old_text, new_text)
    (line,) = set(find_messages(caplog, "not enabled"))
    prefixes = {
        MODULE: ", vLLM's own methods draft: this vLLM (",
        RUNNER: " for method 'ngram_gpu' of the V1 runner, whose own class drafts: ",
        V2_MODULE: " for the V2 runner, whose own speculator drafts: ",
    }
    assert line.startswith(f"ngram_npu: not enabled{prefixes[name]}")
    assert reason in line
    assert list_replaced_names(module) == set()


@pytest.mark.parametrize(
    ("old_text", "new_text", "method", "reason"),
    [
        ("token_ids_cpu=None", "tokens=None", "ngram", "AscendNgramProposer.propose takes"),
        ("max_n, k,\n", "max_n, k, stride\n", "ngram_gpu", "triton_ngram_spec_decode takes"),
        (ASCEND_LAUNCHER_SOURCE, "", "ngram_gpu", "there is no triton_ngram_spec_decode"),
        (ASCEND_LAUNCHER_SOURCE, OTHER_CLASS, "ngram", "there is no AscendNgramProposer.__init__"),
        (ASCEND_LAUNCHER_SOURCE, SUBCLASS, "ngram", "makes another AscendNgramProposer than"),
        ("", "", "ngram_gpu", f"no NPU kernels: {_library.backends()['npu'].reason}"),
    ],
)
def test_ascend_method_with_unknown_functions_or_no_kernels_is_left_unchanged(
    vllm: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    old_text: str,
    new_text: str,
    method: str,
    reason: str,
) -> None:
    if old_text:
        request.getfixturevalue("npu_kernels")
    module = import_changed(vllm, ASCEND_RUNNER, old_text, new_text)
    (line,) = find_messages(caplog, f"not enabled for method {method!r}")
    assert reason in line
    # The other method is replaced.
    expected_names = {"ngram": DEVICE_NAMES, "ngram_gpu": {plugin.ASCEND_HOST}}
    assert list_replaced_names(module) == expected_names[method]


# The V1 runner.


@pytest.mark.parametrize(
    ("value", "old_text", "new_text", "expected"),
    [
        ("1", "", "", None),
        ("0", "", "", ""),
        ("", "", "", "NGRAM_NPU_VLLM_CORRECTION: expected 0 or 1, got ''"),
        ("1", "prev_positions", "order", "takes (num_computed_tokens, num_acc"),
        ("1", "'cpu'", "'xpu'", "there is no kernel for 'xpu'"),
    ],
)
def test_correction_of_counts_is_replaced_if_enabled(
    vllm: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
    old_text: str,
    new_text: str,
    expected: str | None,
) -> None:
    monkeypatch.setenv(options.CORRECTION, value)
    vllm.write_module(RUNNER, CORRECTION_SOURCE.replace(old_text, new_text))
    runner = vllm.install_and_import(RUNNER)
    plugin.install()
    lines = find_messages(caplog, plugin.CORRECTION_LABEL)
    function = runner.update_num_computed_tokens_for_batch_change
    if expected is None:
        assert function is v1.update_num_computed_tokens_for_batch_change
        assert lines == ["ngram_npu: enabled for the correction of counts (NGRAM_NPU_VLLM=1)"]
        options.read_options(make_config(), "custom_class")  # accepts the variable
    else:
        assert function.__module__ == RUNNER
        assert len(set(lines)) == bool(expected)
        assert all(expected in line and "which is left as it is" in line for line in lines)


# Options.


@pytest.fixture
def config_class(vllm: FakeVLLM) -> Any:
    """vLLM's configuration, on a GPU, with the plugin."""
    plugin._warn_about_unused_options.cache_clear()
    vllm.write_module("vllm.config.__init__", "")
    vllm.write_module("vllm.platforms", "class current_platform: device_type = 'cuda'\n")
    vllm.write_module(plugin.CONFIG, CONFIG_SOURCE)
    return vllm.install_and_import(plugin.CONFIG).VllmConfig


def make_engine_config(method: str | None, in_v2: bool, **settings: Any) -> Any:
    vllm_config = make_config(**settings)
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = in_v2
    vllm_config.speculative_config.target_model_config = vllm_config.model_config
    is_ngram = str(method).startswith("ngram")
    draft = vllm_config.model_config if is_ngram else SimpleNamespace()
    vllm_config.speculative_config.draft_model_config = draft
    return vllm_config


@pytest.mark.parametrize(
    ("method", "in_v2", "settings", "message"),
    [
        ("ngram_gpu", True, {"lokup": "auto"}, "unknown option 'lokup' .* did you mean 'lookup'"),
        ("ngram_gpu", True, {"store": True, "store_seed": "/none"}, "store_seed: .*No such file"),
        ("eagle", True, {"neural": True, "store_file": "f"}, "store_file: expected none without"),
    ],
)
def test_invalid_options_raise_when_the_configuration_is_created(
    config_class: Any, method: str, in_v2: bool, settings: dict[str, Any], message: str
) -> None:
    vllm_config = make_engine_config(method, in_v2, **settings)
    with pytest.raises(ValueError, match=f"^ngram_npu: {message}"):
        config_class(vllm_config)
    if method == "eagle":  # vLLM also creates the drafter's configuration, which is not checked
        vllm_config.model_config = vllm_config.speculative_config.draft_model_config
        assert config_class(vllm_config).validated


@pytest.mark.parametrize(
    ("method", "in_v2", "settings"),
    [
        ("eagle", False, {"neural": True, "store_file": "f"}),
        ("eagle", True, {"neural": False}),
        (None, True, {"lokup": "auto"}),
    ],
)
def test_options_of_an_engine_that_ngram_npu_does_not_serve_are_warned_about_once(
    config_class: Any,
    caplog: pytest.LogCaptureFixture,
    method: str | None,
    in_v2: bool,
    settings: dict[str, Any],
) -> None:
    assert config_class(make_engine_config(method, in_v2)).validated
    assert config_class(make_engine_config("custom_class", in_v2, **settings)).validated
    assert caplog.messages == []
    for _ in range(2):
        assert config_class(make_engine_config(method, in_v2, **settings)).validated
    (line,) = caplog.messages
    assert line.startswith("ngram_npu: its options have no effect: expected method 'ngram' or ")
    assert line.endswith(f"got method {method!r} in the {'V2' if in_v2 else 'V1'} runner")


def test_wheel_without_kernels_for_the_device_is_warned_about_once(
    config_class: Any,
    vllm: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: device == "cpu")
    changed = V1_ASYNC_SOURCE.replace("'cpu'", "'cuda'")
    vllm.write_module(RUNNER, changed)
    runner: Any = importlib.import_module(RUNNER)
    assert list_replaced_names(runner) == set()
    assert caplog.messages == []  # the engine may use another method
    for method, in_v2 in (("ngram", False), ("ngram_gpu", True)):  # which logs it in its runner
        assert config_class(make_engine_config(method, in_v2)).validated
    assert caplog.messages == []
    assert config_class(make_engine_config("ngram_gpu", in_v2=False)).validated
    prefix = f"ngram_npu: not enabled{plugin.V1_REFUSAL}: no kernels for cuda: "
    assert [line.startswith(prefix) for line in caplog.messages] == [True]


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
    plugin.install_neural()
    plugin.install_neural()
    return module.init_speculator(vllm_config, CPU, **state)


def make_neural_config(**settings: Any) -> Any:
    return make_config(**{"method": "draft_model", "neural": True, **settings})


def test_ngram_drafts_are_added_if_enabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create_speculator(vllm_config: Any) -> Any:
        state = RequestState()
        return create_by_runner(
            StandaloneARSpeculator(), vllm_config, monkeypatch, req_states=state
        )

    assert not hasattr(create_speculator(make_neural_config(neural=False)), ATTRIBUTE)
    assert caplog.messages == []
    neural = create_speculator(make_neural_config())
    assert isinstance(neural, StandaloneARSpeculator)
    assert neural.propose.__self__ is getattr(neural, ATTRIBUTE)
    monkeypatch.setenv("NGRAM_NPU_VLLM_NEURAL", "1")
    vllm_config = make_neural_config()
    vllm_config.additional_config = {}
    assert hasattr(create_speculator(vllm_config), ATTRIBUTE)
    with pytest.raises(ValueError, match="did you mean 'metrics'"):
        create_speculator(make_neural_config(metric=True))


def change_class(**members: Any) -> Any:
    """Returns a supported speculator whose class has these members."""
    return type("StandaloneARSpeculator", (StandaloneARSpeculator,), members)()


def change_object(**attributes: Any) -> Any:
    """Returns a supported speculator with these attributes."""
    speculator = StandaloneARSpeculator()
    vars(speculator).update(attributes)
    return speculator


@pytest.mark.parametrize(
    ("neural", "reason"),
    [
        (change_class(propose=lambda self, batch: None), "propose takes (self, batch), expec"),
        (change_class(observe_verification=lambda self, idx: None), "takes (self, idx), expected"),
        (change_object(draft_watermarker=object()), "drafts are watermarked"),
        (change_class(__init__=lambda self: None), "has no draft_logits"),
        (change_object(draft_logits=torch.zeros(6, K, 99)), "(6, 4, 100), or more rows or tok"),
        (change_object(draft_logits=torch.zeros(5, K, 100)), "shape (5, 4, 100), expected (6,"),
    ],
)
def test_unsupported_neural_speculator_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, neural: Any, reason: str
) -> None:
    vllm_config, state = make_neural_config(), RequestState()
    assert create_by_runner(neural, vllm_config, monkeypatch, req_states=state) is neural
    assert not hasattr(neural, ATTRIBUTE)
    assert "propose" not in vars(neural)
    (line,) = caplog.messages
    prefix = "ngram_npu: neural=True has no effect, the speculator is left as it is: "
    assert line.startswith(prefix)
    assert reason in line


def test_neural_speculator_of_an_unknown_runner_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for state, reason in (
        ({}, "init_speculator takes (vllm_config, device), expected"),
        ({"req_states": SimpleNamespace()}, "the runner's state has no all_token_ids.gpu"),
    ):
        vllm_config = make_neural_config()
        neural = create_by_runner(StandaloneARSpeculator(), vllm_config, monkeypatch, **state)
        assert not hasattr(neural, ATTRIBUTE)
        assert reason in caplog.messages[-1]
    monkeypatch.setattr(RowDrafter, "has_request_data", False)
    neural = create_by_runner(
        StandaloneARSpeculator(), make_neural_config(), monkeypatch, req_states=RequestState()
    )
    assert not hasattr(neural, ATTRIBUTE)
    assert "this vLLM has another GPUModelRunner.add_requests" in caplog.messages[-1]


# vLLM-Ascend.


@pytest.mark.usefixtures("npu_kernels")
def test_ascend_factory_creates_ngram_drafters(vllm: FakeVLLM) -> None:
    runner = import_changed(vllm, ASCEND_RUNNER)
    for method, drafter in (
        ("ngram", ascend.AscendNgramProposer),
        ("ngram_gpu", ascend.AscendNgramProposerNPU),
    ):
        created = runner.get_spec_decode_method(method, make_config(), CPU, object())
        assert isinstance(created, drafter)
        assert getattr(runner, drafter.__name__) is drafter
    assert runner.triton_ngram_spec_decode is ascend.triton_ngram_spec_decode


@pytest.mark.usefixtures("npu_kernels")
def test_ascend_runner_supports_a_store(vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Ascend's runner derives from vLLM's, whose constructor is wrapped."""
    stock = "class GPUModelRunner:\n    def __init__(self): ...\n"
    stock += "    def execute_model(self, scheduler_output): ...\n"
    vllm.write_module(RUNNER, stock)
    derived = f"import {RUNNER}\nclass NPUModelRunner({RUNNER}.GPUModelRunner)"
    runner = import_changed(vllm, ASCEND_RUNNER, "class NPUModelRunner", derived)
    monkeypatch.setattr(v1, "require_request_checks", lambda: None)
    ascend.AscendNgramProposerNPU(make_config(**STORE), CPU, runner.NPUModelRunner())


@pytest.mark.usefixtures("npu_kernels")
def test_ascend_correction_is_replaced_for_an_npu(
    vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM-Ascend's runner may lack vLLM's ``current_platform``."""
    monkeypatch.setenv(options.CORRECTION, "1")
    source = CORRECTION_SOURCE.replace("current_platform", "other_platform")
    launcher = ASCEND_LAUNCHER_SOURCE
    runner = import_changed(vllm, ASCEND_RUNNER, launcher, launcher + source)
    replacement = v1.update_num_computed_tokens_for_batch_change
    assert runner.update_num_computed_tokens_for_batch_change is replacement


@pytest.mark.parametrize(
    ("has_kernel", "reason"),
    [(False, "no kernels for npu: "), (True, "all_token_ids.gpu (rank, dtype, device, stride)")],
)
def test_ascend_v2_speculator_is_replaced_where_kernels_and_state_are_supported(
    vllm: FakeVLLM,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_kernel: bool,
    reason: str,
) -> None:
    module = import_changed(vllm, plugin.ASCEND_V2_MODULE)
    vllm_config = make_config(lookup="ngram")
    speculator = module.AscendNgramSpeculator(vllm_config, CPU, RequestState())
    assert isinstance(speculator, NgramSpeculator)
    assert speculator.ngram_npu.options.ngram.match_policy == "earliest"
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: has_kernel)
    npu = SimpleNamespace(type="npu")
    assert type(module.AscendNgramSpeculator(make_config(), npu, RequestState())) is module.STOCK
    line = "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    assert find_messages(caplog, "enabled for n-gram") == [line]
    assert plugin.V2_REFUSAL + ": " + reason in caplog.messages[-1]
