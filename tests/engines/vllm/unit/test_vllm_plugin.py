"""When the plugin replaces which functions of vLLM and of vLLM-Ascend, and the message if it does
not; with modules of a few lines that have the signatures of these projects."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import CPU, ROWS, K, RequestState, StandaloneARSpeculator, config
from ngram_npu import _library
from ngram_npu.engines.vllm import NgramProposer, options, plugin, v1_device
from ngram_npu.engines.vllm.patching import ASCEND_RUNNER, CLASSES, RUNNER
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE, NgramSpeculator
from vllm_config import vllm_config

pytestmark = pytest.mark.usefixtures("info")

STOCK = """
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
STOCK = NgramProposer
"""
STOCK_ASYNC = """
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
STOCK = NgramProposerGPU
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
STOCK_CORRECTION = """
def update_num_computed_tokens_for_batch_change(
    num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count,
    prev_num_draft_tokens, cpu_num_computed_tokens,
): ...
STOCK = update_num_computed_tokens_for_batch_change
class current_platform: device_type = 'cpu'
"""
STOCK_V2 = """
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
CONFIG = """
class VllmConfig:
    def __init__(self, config): vars(self).update(vars(config)); self.__post_init__()
    def __post_init__(self): self.validated = True
"""


class VLLM:
    """Writes modules of a vLLM, and imports them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.write(plugin.MODULE, "")

    def write(self, name: str, text: str) -> None:
        path = self._folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def install_and_import(self, name: str, text: str) -> Any:
        self.write(name, text)
        plugin.install()
        plugin.install()
        assert name not in sys.modules
        return importlib.import_module(name)


@pytest.fixture
def vllm(fake_vllm: Path) -> VLLM:
    return VLLM(fake_vllm.parent.parent)


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    lines = [line for line in caplog.messages if part in line]
    assert not any("\n" in line for line in lines)
    return lines


def is_replaced(module: Any) -> bool:
    assert module.NgramProposer in (plugin.StockNgramProposer, getattr(module, "STOCK", None))
    return module.NgramProposer is plugin.StockNgramProposer


# The environment.

INERT = """
import importlib.metadata, os, sys
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ngram_npu")
before = set(sys.modules)
entry.load()()
new = sorted(set(sys.modules) - before)
assert new == ["ngram_npu_vllm_plugin"], new
"""


@pytest.mark.parametrize("value", [None, "0"])
def test_disabled_plugin_imports_nothing(value: str | None) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "NGRAM_NPU_VLLM"}
    environment["NGRAM_NPU_VLLM_ENGINE"] = "not an engine"
    if value is not None:
        environment["NGRAM_NPU_VLLM"] = value
    subprocess.run([sys.executable, "-c", INERT], env=environment, check=True)


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({"NGRAM_NPU_VLLM_BESIDE": "1"}, True),
        ({"NGRAM_NPU_VLLM_BESIDE": "true"}, True),
        ({"NGRAM_NPU_VLLM_BESIDE": "0"}, False),
        ({"NGRAM_NPU_VLLM_BESIDE": "1", "NGRAM_NPU_VLLM": "0"}, False),
        ({"NGRAM_NPU_VLLM": "1"}, True),
        ({"NGRAM_NPU_VLLM": ""}, False),
        ({"NGRAM_NPU_VLLM": "yes"}, False),
    ],
)
def test_environment_enables_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    is_on: bool,
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
    is_invalid = "yes" in variables.values()
    line = "ngram_npu: not enabled: NGRAM_NPU_VLLM: expected 0 or 1, got 'yes'"
    assert caplog.messages == [line] * is_invalid


# The import of vLLM's modules.


def test_looking_for_the_module_does_not_replace_it(vllm: VLLM) -> None:
    vllm.write(plugin.MODULE, STOCK)
    plugin.install()
    spec = importlib.util.find_spec(plugin.MODULE)
    assert spec is not None
    assert str(spec.origin).endswith("ngram_proposer.py")
    assert is_replaced(importlib.import_module(plugin.MODULE))
    reloaded: Any = importlib.reload(sys.modules[plugin.MODULE])
    assert not is_replaced(reloaded)


def test_failed_import_may_be_repeated(vllm: VLLM) -> None:
    vllm.write(plugin.MODULE, "raise RuntimeError('theirs')")
    plugin.install()
    with pytest.raises(RuntimeError, match="theirs"):
        importlib.import_module(plugin.MODULE)
    vllm.write(plugin.MODULE, STOCK + "# longer, so that the cached bytecode is stale\n")
    assert is_replaced(importlib.import_module(plugin.MODULE))


def test_module_is_waited_for_and_replaced_once(
    vllm: VLLM, caplog: pytest.LogCaptureFixture
) -> None:
    finders = len(sys.meta_path)
    vllm.write(plugin.MODULE, STOCK)
    plain: Any = importlib.import_module(plugin.MODULE)
    del sys.modules[plugin.MODULE]
    plugin.install()
    waiting = len(sys.meta_path)
    plugin.install()
    assert len(sys.meta_path) == waiting > finders
    assert plugin.MODULE not in sys.modules
    module: Any = importlib.import_module(plugin.MODULE)
    assert is_replaced(module)
    assert len(sys.meta_path) == waiting - 1
    plugin.install()
    assert is_replaced(module)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert type(module.__loader__) is type(plain.__loader__)
    assert (module.__file__, module.__spec__.origin) == (plain.__file__, plain.__spec__.origin)


def test_imported_module_is_replaced_unless_the_runner_has_bound_its_class(
    vllm: VLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.write(plugin.MODULE, STOCK)
    module: Any = importlib.import_module(plugin.MODULE)
    runner: Any = ModuleType(RUNNER)
    runner.NgramProposer = module.STOCK
    monkeypatch.setitem(sys.modules, RUNNER, runner)
    plugin.install()
    assert not is_replaced(module)
    assert "has bound NgramProposer already" in caplog.text
    del runner.NgramProposer
    plugin.install()
    assert is_replaced(module)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            STOCK.replace("num_tokens_no_spec,", "req_ids, num_tokens_no_spec,"),
            "NgramProposer.propose takes (self, num_speculative_tokens, sampled_token_ids, req_ids",
            id="arguments",
        ),
        pytest.param(
            STOCK.replace('vllm_config: "VllmConfig"', "vllm_config, device"),
            "NgramProposer.__init__ takes (self, vllm_config, device), expected (self, vllm_confi",
            id="constructor",
        ),
        pytest.param(
            STOCK.replace("load_model", "load"), "there is no NgramProposer.load_model", id="method"
        ),
        pytest.param("STOCK = NgramProposer = None", "there is no class NgramProposer", id="class"),
    ],
)
def test_other_signature_leaves_vllm_unchanged(
    vllm: VLLM, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    assert not is_replaced(vllm.install_and_import(plugin.MODULE, text))
    (line,) = messages(caplog, "not enabled")
    assert line.startswith("ngram_npu: not enabled, vLLM is left as it is: this vLLM (")
    assert reason in line


def test_vllm_without_the_module_is_reported(
    fake_vllm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.install()
    assert f"it has no {plugin.MODULE}" in caplog.text
    (fake_vllm / "__init__.py").write_text("raise RuntimeError('one\\ntwo')")
    sys.modules.pop("vllm.v1", None)
    sys.modules.pop("vllm.v1.spec_decode", None)
    caplog.clear()
    plugin.install()
    (line,) = caplog.messages
    assert "is not found: RuntimeError: one two" in line


# The V1 runner.


def test_async_class_is_replaced_and_padded_drafts_are_not_trimmed(
    vllm: VLLM, caplog: pytest.LogCaptureFixture
) -> None:
    module = vllm.install_and_import(RUNNER, STOCK_ASYNC)
    trim = module.update_scheduler_for_invalid_drafts
    plugin.install()
    assert module.NgramProposerGPU is v1_device.AsyncNgramProposer
    assert module.update_scheduler_for_invalid_drafts is trim
    line = "ngram_npu: enabled for method 'ngram_gpu' of the V1 runner (NGRAM_NPU_VLLM=1)"
    assert messages(caplog, "'ngram_gpu'") == [line]
    trim(None, None, "padded", {})
    trim("event", None, "trimmed", {})
    assert module.calls == [("event", "trimmed")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("valid_sampled_tokens_count", "more"), "NgramProposerGPU.propose takes"),
        (("event, num_valid_draft_tokens_cpu, s", "event_, cpu, s"), "update_scheduler_for_inv"),
        (("def copy_num", "def copied_num"), "there is no copy_num_valid_draft_tokens"),
    ],
)
def test_other_async_signature_leaves_the_runner_unchanged(
    vllm: VLLM, caplog: pytest.LogCaptureFixture, change: tuple[str, str], reason: str
) -> None:
    assert change[0] in STOCK_ASYNC
    module = vllm.install_and_import(RUNNER, STOCK_ASYNC.replace(*change))
    (line,) = messages(caplog, "not enabled for method 'ngram_gpu'")
    assert reason in line
    assert module.NgramProposerGPU is module.STOCK
    assert module.update_scheduler_for_invalid_drafts.__module__ == RUNNER


@pytest.mark.parametrize(
    ("value", "change", "expected"),
    [
        ("1", ("", ""), None),
        ("0", ("", ""), ""),
        ("", ("", ""), "NGRAM_NPU_VLLM_CORRECTION: expected 0 or 1, got ''"),
        ("1", ("prev_positions", "order"), "takes (num_computed_tokens, num_acc"),
        ("1", ("'cpu'", "'xpu'"), "there is no kernel for 'xpu'"),
    ],
)
def test_correction_of_counts_is_replaced_on_request(
    vllm: VLLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
    change: tuple[str, str],
    expected: str | None,
) -> None:
    monkeypatch.setenv(options.CORRECTION, value)
    runner = vllm.install_and_import(RUNNER, STOCK_CORRECTION.replace(*change))
    plugin.install()
    lines = messages(caplog, plugin.CORRECTION_LABEL)
    function = runner.update_num_computed_tokens_for_batch_change
    if expected is None:
        assert function is v1_device.update_num_computed_tokens_for_batch_change
        assert lines == ["ngram_npu: enabled for the correction of counts (NGRAM_NPU_VLLM=1)"]
        options.read_options(config(), "custom_class")  # knows the variable
    else:
        assert function is runner.STOCK
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


CUSTOM_CLASS_CALL = """
class Runner:
    def propose_draft_token_ids(self, sampled_token_ids, slot_mappings=None):
        method = self.speculative_config.method
        if method == "ngram":
            return self.drafter.propose(4, sampled_token_ids, slot_mappings=slot_mappings)
        elif method == "custom_class":
            return self.drafter.propose({})
        else:
            return self.drafter.propose()
"""
V1_CALL = (
    "sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, "
    "slot_mappings=slot_mappings"
)
ASCEND_CALL = V1_CALL.replace("sampled_token_ids,", "valid_sampled_token_ids,").replace(
    "slot_mappings=slot_mappings", "slot_mappings=getattr(metadata, 'slot_mapping', None)"
)
"""As in vLLM-Ascend's pull request 15710, September 2026."""

Create = Callable[..., NgramProposer]


@pytest.fixture
def create_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Create:
    """Returns a function that creates a drafter next to a runner with this call in its source."""

    def create(call: str, name: str = RUNNER, source: str = CUSTOM_CLASS_CALL) -> NgramProposer:
        path = tmp_path / f"{name}.py"
        path.write_text(source.format(call))
        module = ModuleType(name)
        setattr(module, CLASSES[name], runpy.run_path(str(path))["Runner"])
        monkeypatch.setitem(sys.modules, name, module)
        return NgramProposer(vllm_config())

    return create


def test_known_call_of_a_custom_class_is_accepted(
    create_called: Create, caplog: pytest.LogCaptureFixture
) -> None:
    create_called(V1_CALL)
    create_called(ASCEND_CALL, ASCEND_RUNNER)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "arguments",
    [
        "k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu",
        "sampled_token_ids, token_ids_cpu, num_tokens_no_spec",
        "sampled_token_ids, num_tokens_no_spec, token_ids_cpu, metadata=None",
        "sampled_token_ids, num_tokens_no_spec",
    ],
)
def test_other_call_of_a_custom_class_raises(create_called: Create, arguments: str) -> None:
    """vLLM-Ascend's runner derives from vLLM's, which is loaded too: its call decides."""
    create_called(V1_CALL)
    for name in (ASCEND_RUNNER, RUNNER):
        with pytest.raises(ValueError) as caught:
            create_called(arguments, name)
        actual = arguments.replace("=None", "=")
        assert str(caught.value).endswith(
            f"is not supported: its runner calls a custom class with ({actual}), expected "
            "(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)"
        )
        assert "\n" not in str(caught.value)
        sys.modules.pop(ASCEND_RUNNER, None)


@pytest.mark.parametrize("source", ["Runner = object", CUSTOM_CLASS_CALL.replace("custom", "my")])
def test_unknown_call_of_a_custom_class_is_reported(
    create_called: Create, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    create_called("", source=source)
    assert "the runner's call is not checked" in caplog.text


# The V2 runner.


def install_v2(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs the plugin with the stock class's module imported already."""
    module = ModuleType(plugin.V2_MODULE)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, plugin.V2_MODULE, module)
    plugin.install_v2()
    plugin.install_v2()
    return module


MEMBERS = "    confidences = None\n    def on_finished(self, ids): return ids\n    def capture"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("", "", id="0.32.0"),
        pytest.param("dp_sync_state", "dp_state", id="other-name"),
        pytest.param("capture(self)", "capture(self, sizes=None)", id="optional-argument"),
        pytest.param("req_states)", "req_states, adapters=None)", id="constructors-argument"),
        pytest.param("    def capture", MEMBERS, id="more-members"),
    ],
)
def test_v2_class_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    module = install_v2(STOCK_V2.replace(old, new), monkeypatch)
    replacement = module.NgramGPUSpeculator
    assert issubclass(replacement, NgramSpeculator)
    plugin.install_v2()
    assert module.NgramGPUSpeculator is replacement
    line = "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    assert caplog.messages == [line]
    assert caplog.records[0].levelname == "DEBUG"  # the engine's method is not known yet
    for name in set(dir(module.STOCK)) - set(dir(NgramSpeculator)):
        assert getattr(replacement, name) is getattr(module.STOCK, name)


ABSTRACT = "    @abstractmethod\n    def bind(self): ...\n    def capture"
PROPERTY = "    max_num_reqs = property(lambda self: 1)\n    def capture"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param(
            "num_sampled, num_rejected",
            "num_rejected, num_sampled",
            "NgramGPUSpeculator.propose takes (self, input_batch,",
            id="order",
        ),
        pytest.param("dummy_run=False, ", "", "propose takes (self,", id="no-dummy-run"),
        pytest.param("    def capture", ABSTRACT, "Speculator.bind is abstract", id="abstract"),
        pytest.param(
            "    def capture",
            "    def _begin(self): ...\n    def capture",
            "NgramGPUSpeculator has _begin, which ngram_npu's class has for itself",
            id="private-member",
        ),
        pytest.param(
            "    def capture",
            PROPERTY,
            "NgramGPUSpeculator.max_num_reqs is a property, which ngram_npu's class sets",
            id="property",
        ),
        pytest.param("class NgramGPU", "class Other", "there is no class NgramGPU", id="name"),
    ],
)
def test_unknown_v2_class_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    old: str,
    new: str,
    reason: str,
) -> None:
    text = STOCK_V2.replace(old, new).replace("STOCK = NgramGPUSpeculator", "")
    if new == ABSTRACT:
        text = "from abc import ABC, abstractmethod\n" + text.replace("tor:", "tor(ABC):", 1)
    module = install_v2(text, monkeypatch)
    stock = getattr(module, "NgramGPUSpeculator", None)
    assert stock is None or not issubclass(stock, NgramSpeculator)
    line, *repeated = caplog.messages
    assert set(repeated) <= {line}
    assert line.startswith("ngram_npu: not enabled for the V2 runner, which is left as it is: ")
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("stock", "in_v2", "settings", "message"),
    [
        ("ngram_gpu", True, {"lokup": "1-16"}, "unknown option 'lokup' .* did you mean 'lookup'"),
        (
            "ngram",
            True,
            {"draft_on": "device", "lookup": "auto", "store": "live"},
            "draft_on='host' drafts there",
        ),
        ("ngram_gpu", False, {"draft_on": "host"}, "draft_on: expected only in the V2 runner"),
        ("ngram", False, {"engine": "fast"}, "engine: expected 'index', 'scan' or 'auto'"),
        ("eagle", True, {"beside": True, "store_file": "f"}, "store_file: expected none without"),
        ("eagle", True, {"store_file": "f"}, None),
        ("eagle", False, {"beside": True, "store_file": "f"}, None),
        ("ngram_gpu", True, {"lookup": "1-16"}, None),
        (None, True, {"lokup": "1-16"}, None),
        ("custom_class", True, {"lokup": "1-16"}, None),
    ],
)
def test_options_are_checked_when_the_configuration_is_created(
    vllm: VLLM, stock: str | None, in_v2: bool, settings: dict[str, Any], message: str | None
) -> None:
    vllm.write("vllm.config.__init__", "")
    vllm.write(
        "vllm.platforms",
        "from types import SimpleNamespace\n"
        "current_platform = SimpleNamespace(device_type='cuda')\n",
    )
    create = vllm.install_and_import(plugin.CONFIG, CONFIG).VllmConfig
    vllm_config = config(**settings)
    vllm_config.speculative_config.method = stock
    vllm_config.use_v2_model_runner = in_v2
    vllm_config.speculative_config.target_model_config = vllm_config.model_config
    is_ngram = str(stock).startswith("ngram")
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
    neural: Any,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    state: Any = None,
    **functions: Any,
) -> Any:
    """Lets the V2 runner's module, with the plugin, create a speculator."""

    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        return neural

    module: Any = ModuleType(plugin.V2_RUNNER)
    vars(module).update({"init_speculator": init_speculator, **functions})
    monkeypatch.setitem(sys.modules, plugin.V2_RUNNER, module)
    plugin.install_beside()
    plugin.install_beside()
    if functions:
        return module.init_speculator(vllm_config, CPU)
    return module.init_speculator(vllm_config, CPU, req_states=state or RequestState())


def neural_config(**settings: Any) -> Any:
    return config(**{"method": "draft_model", "beside": True, **settings})


def test_ngram_drafts_are_added_on_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = create_by_runner(StandaloneARSpeculator(), neural_config(beside=False), monkeypatch)
    assert not hasattr(plain, LOOKUP_ATTRIBUTE)
    assert caplog.messages == []
    neural = create_by_runner(StandaloneARSpeculator(), neural_config(), monkeypatch)
    assert isinstance(neural, StandaloneARSpeculator)
    assert neural.propose.__self__ is getattr(neural, LOOKUP_ATTRIBUTE)
    monkeypatch.setenv("NGRAM_NPU_VLLM_BESIDE", "1")
    vllm_config = neural_config()
    vllm_config.additional_config = {}
    neural = create_by_runner(StandaloneARSpeculator(), vllm_config, monkeypatch)
    assert hasattr(neural, LOOKUP_ATTRIBUTE)
    with pytest.raises(ValueError, match="did you mean 'beside_threshold'"):
        create_by_runner(StandaloneARSpeculator(), neural_config(beside_treshold=1.0), monkeypatch)


class Gemma4Speculator(StandaloneARSpeculator):
    pass


def change_class(**methods: Any) -> Any:
    """Returns a known speculator with a class that has these methods; None removes a method."""
    members = {**vars(StandaloneARSpeculator), **methods}
    for name in ("__dict__", "__weakref__", *(n for n, v in methods.items() if v is None)):
        del members[name]
    return type("StandaloneARSpeculator", (), members)()


def change(**attributes: Any) -> Any:
    speculator = StandaloneARSpeculator()
    vars(speculator).update(attributes)
    return speculator


def change_logits(*shape: int) -> Any:
    speculator = StandaloneARSpeculator()
    if shape:
        speculator.draft_logits = torch.zeros(shape)
    else:
        del speculator.draft_logits
    return speculator


def old_propose(self: Any, input_batch: Any, num_sampled: Any) -> None: ...


def other_observe(self: Any, idx: Any, sampled: Any, rejected: Any, more: Any) -> None: ...


@pytest.mark.parametrize(
    ("neural", "method", "reason"),
    [
        (change(), "dflash", "method is 'dflash', expected one of"),
        (change(), "ngram_gpu", "method is 'ngram_gpu', expected"),
        (Gemma4Speculator(), "draft_model", "'draft_model' is served by Gemma4Speculator, expecte"),
        (change(), "mtp", "expected MTPSpeculator"),
        (change_class(propose=old_propose), "draft_model", "propose takes (self, input_batch, num"),
        (change_class(observe_verification=other_observe), "draft_model", "takes (self, idx, samp"),
        (change_class(observe_verification=None), "draft_model", "there is no StandaloneARSpecula"),
        (change(draft_watermarker=object()), "draft_model", "drafts are watermarked"),
        (change_logits(), "draft_model", "has no draft_logits"),
        (change_logits(ROWS, 100), "draft_model", "draft_logits have shape (6, 100)"),
        (change_logits(ROWS, K, 99), "draft_model", "expected (rows, 4, 100 or more)"),
        (change_logits(ROWS, K + 1, 100), "draft_model", "draft_logits have shape (6, 5, 100)"),
    ],
)
def test_unsupported_neural_speculator_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    neural: Any,
    method: str,
    reason: str,
) -> None:
    assert create_by_runner(neural, neural_config(method=method), monkeypatch) is neural
    assert not hasattr(neural, LOOKUP_ATTRIBUTE)
    assert "propose" not in vars(neural)
    (line,) = caplog.messages
    prefix = "ngram_npu: beside=True has no effect, the speculator is left as it is: "
    assert line.startswith(prefix)
    assert reason in line
    assert "\n" not in line


def test_neural_speculator_with_an_unknown_state_or_factory_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = SimpleNamespace(all_token_ids=RequestState().all_token_ids)
    neural = create_by_runner(StandaloneARSpeculator(), neural_config(), monkeypatch, state)
    assert not hasattr(neural, LOOKUP_ATTRIBUTE)
    assert "the runner's state has no total_len.gpu" in caplog.messages[0]

    def init_speculator(vllm_config: Any, device: Any) -> Any:
        return StandaloneARSpeculator()

    functions = {"init_speculator": init_speculator}
    neural = create_by_runner(None, neural_config(), monkeypatch, **functions)
    assert not hasattr(neural, LOOKUP_ATTRIBUTE)
    assert "init_speculator takes (vllm_config, device), expected" in caplog.messages[1]


# vLLM-Ascend.

ASCEND_CLASS = """
class {name}:
    def __init__(self, {arguments}): ...
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
"""
ASCEND_FACTORY = (
    ASCEND_CLASS.format(name="AscendNgramProposer", arguments="vllm_config, runner")
    + ASCEND_CLASS.format(name="AscendNgramProposerNPU", arguments="vllm_config, device, runner")
    + """
def get_spec_decode_method(method, vllm_config, device, runner):
    if method == "ngram":
        return AscendNgramProposer(vllm_config, runner)
    return AscendNgramProposerNPU(vllm_config, device, runner)
"""
)
ASCEND_LAUNCHER = """
def triton_ngram_spec_decode(
    token_ids, num_tokens_no_spec, sampled_token_ids, discard_request_mask, vocab_size, min_n,
    max_n, k,
): ...
"""
ASCEND_IMPORTS = """
from vllm_ascend.spec_decode import (
    AscendNgramProposer, AscendNgramProposerNPU, get_spec_decode_method
)
"""
ASCEND_MODULE = ASCEND_IMPORTS + ASCEND_LAUNCHER

# The part that the plugin reads, per release in the guide's table.
BEFORE = """
class NgramProposer:
    def __init__(self, vllm_config, device, runner): ...
    def load_model(self, *args, **kwargs): ...
def get_spec_decode_method(method, vllm_config, device, runner):
    return NgramProposer(vllm_config, device, runner)
"""
RELEASES = {
    "before v0.24.0rc": (BEFORE, "from vllm_ascend.spec_decode import get_spec_decode_method"),
    "v0.24.0rc to v0.25.1": (ASCEND_FACTORY, ASCEND_IMPORTS),
    "v0.26.0rc, main of August 2026": (ASCEND_FACTORY, ASCEND_MODULE),
}
OTHER_ROWS = ["these, with the V2 runner", "commit 0426276041be of autumn 2026, V2 runner"]

Package = Callable[..., Any]


@pytest.fixture
def import_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Imports the runner of a vLLM-Ascend with these sources after the plugin, as if the device's
    kernels existed."""
    for folder in ("spec_decode", "worker"):
        (tmp_path / "vllm_ascend" / folder).mkdir(parents=True)
    for init in ("__init__.py", "worker/__init__.py"):
        (tmp_path / "vllm_ascend" / init).touch()
    monkeypatch.syspath_prepend(tmp_path)
    has_kernel = _library.has_kernel
    monkeypatch.setattr(
        _library, "has_kernel", lambda op, device: device == "npu" or has_kernel(op, device)
    )

    def run(factory: str = ASCEND_FACTORY, runner: str = ASCEND_MODULE) -> Any:
        (tmp_path / "vllm_ascend/spec_decode/__init__.py").write_text(factory)
        (tmp_path / "vllm_ascend/worker/model_runner_v1.py").write_text(runner)
        plugin.install()
        plugin.install()
        assert "vllm_ascend" not in sys.modules
        return importlib.import_module(ASCEND_RUNNER)

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


def test_ascend_factory_creates_ngram_drafters(import_ascend: Package) -> None:
    runner = import_ascend()
    for method, drafter in (
        ("ngram", v1_device.AscendNgramProposer),
        ("ngram_gpu", v1_device.AscendNgramProposerNPU),
    ):
        created = runner.get_spec_decode_method(method, config(), CPU, object())
        assert isinstance(created, drafter)
        assert getattr(runner, drafter.__name__) is drafter


def test_ascend_releases_are_supported_as_the_guide_states(import_ascend: Package) -> None:
    guide = Path(__file__).parents[4] / "docs/guides/ascend.md"
    _, _, text = guide.read_text(encoding="utf-8").partition("| vLLM-Ascend | `ngram` |")
    rows = [line.strip("|").split("|") for line in text.split("\n\n")[0].splitlines()[2:]]
    table = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert list(table) == [*RELEASES, *OTHER_ROWS]
    methods = ((plugin.ASCEND_HOST,), (plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER))
    for release, sources in RELEASES.items():
        runner = import_ascend(*sources)
        for names, cell in zip(methods, table[release], strict=True):
            served = [getattr(runner, name, None) is getattr(v1_device, name) for name in names]
            assert served == [cell == "supported"] * len(names), cell
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
            del sys.modules[name]
        importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("change", "method", "reason"),
    [
        (("token_ids_cpu=None", "tokens=None"), "ngram", "AscendNgramProposer.propose takes"),
        (("max_n, k,\n", "max_n, k, stride\n"), "ngram_gpu", "triton_ngram_spec_decode takes"),
        (
            (ASCEND_LAUNCHER, ASCEND_LAUNCHER + "class AscendNgramProposer: ...\n"),
            "ngram",
            "there is no AscendNgramProposer.__init__",
        ),
        (
            (ASCEND_LAUNCHER, ASCEND_LAUNCHER + "AscendNgramProposer = type('A', (A,), {})\n"),
            "ngram",
            "makes another AscendNgramProposer than",
        ),
        (None, "ngram_gpu", f"no NPU kernels: {_library.backends()['npu'].reason}"),
    ],
)
def test_unknown_ascend_method_is_left_unchanged(
    import_ascend: Package,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, str] | None,
    method: str,
    reason: str,
) -> None:
    old, new = change or ("", "")
    if change is None:
        monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    runner_text = ASCEND_MODULE.replace(old, new).replace("(A,)", "(AscendNgramProposer,)")
    runner = import_ascend(ASCEND_FACTORY.replace(old, new), runner_text)
    (line,) = messages(caplog, f"not enabled for method {method!r}")
    assert reason in line
    host = getattr(runner, plugin.ASCEND_HOST) is v1_device.AscendNgramProposer
    device = getattr(runner, plugin.ASCEND_DEVICE) is v1_device.AscendNgramProposerNPU
    assert (host, device) == (method != "ngram", method != "ngram_gpu")
    if method == "ngram_gpu":
        assert runner.triton_ngram_spec_decode is not v1_device.triton_ngram_spec_decode


def test_ascend_runner_without_a_kernel_keeps_its_correction(
    import_ascend: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(options.CORRECTION, "1")
    runner = import_ascend(runner=ASCEND_MODULE + STOCK_CORRECTION.replace("'cpu'", "'xpu'"))
    assert runner.update_num_computed_tokens_for_batch_change is not runner.STOCK
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    runner.update_num_computed_tokens_for_batch_change = runner.STOCK
    plugin.install_ascend()
    assert runner.update_num_computed_tokens_for_batch_change is runner.STOCK


@pytest.mark.parametrize(
    ("has_kernel", "reason"),
    [(False, "no kernels for npu: "), (True, "all_token_ids.gpu (rank, dtype, device, stride)")],
)
def test_ascend_v2_speculator_is_replaced_where_it_can_draft(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_kernel: bool,
    reason: str,
) -> None:
    module: Any = ModuleType(plugin.ASCEND_V2_MODULE)
    exec(STOCK_V2.replace("NgramGPU", "AscendNgram"), module.__dict__)
    monkeypatch.setitem(sys.modules, plugin.ASCEND_V2_MODULE, module)
    plugin.install_ascend()
    plugin.install_ascend()
    speculator = module.AscendNgramSpeculator(config(), CPU, RequestState())
    assert isinstance(speculator, NgramSpeculator)
    assert speculator._drafting.config.match_policy == "earliest"
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: has_kernel)
    npu = SimpleNamespace(type="npu")
    assert type(module.AscendNgramSpeculator(config(), npu, RequestState())) is module.STOCK
    enabled, *_, refused = caplog.messages
    assert enabled == "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    assert "not enabled for the V2 runner, which is left as it is: " + reason in refused
