"""Where and when the stock class of either runner is replaced, and the message if it is not; with a
stand-in of a few lines for vLLM."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm.v2 import NgramSpeculator
from vllm_config import vllm_config

KNOWN = """
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

Stock = Callable[[str], None]


@pytest.fixture
def stock(fake_vllm: Path) -> Stock:
    """Makes a vLLM with the given text in the stock class's module."""

    def make(text: str) -> None:
        (fake_vllm / "spec_decode" / "ngram_proposer.py").write_text(text)

    return make


def _module() -> ModuleType:
    return importlib.import_module(plugin.MODULE)


def _replaced() -> bool:
    module = _module()
    assert module.NgramProposer in (plugin.StockNgramProposer, getattr(module, "STOCK", None))
    return module.NgramProposer is plugin.StockNgramProposer


def test_who_only_looks_for_the_module_changes_nothing(stock: Stock) -> None:
    stock(KNOWN)
    plugin.install()
    spec = importlib.util.find_spec(plugin.MODULE)
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith("ngram_proposer.py")
    assert _replaced()
    assert importlib.reload(_module()).NgramProposer is not plugin.StockNgramProposer


class _FinderOfOld:
    """As they were before Python 3.4; importing passes it over."""

    @staticmethod
    def find_module(name: str, path: object = None) -> None: ...


@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_finders_without_find_spec_are_passed_over(stock: Stock) -> None:
    stock(KNOWN)
    plugin.install()
    finder: Any = _FinderOfOld()
    sys.meta_path.insert(0, finder)
    try:
        assert _replaced()
    finally:
        sys.meta_path.remove(finder)


def test_an_import_that_failed_may_be_tried_again(stock: Stock) -> None:
    stock("raise RuntimeError('theirs')")
    plugin.install()
    with pytest.raises(RuntimeError, match="theirs"):
        _module()
    stock(KNOWN + "# longer, so that the cached bytecode is stale\n")
    assert _replaced()


def test_a_module_already_imported(stock: Stock) -> None:
    stock(KNOWN)
    assert not _replaced()
    plugin.install()
    assert _replaced()


def test_the_module_is_waited_for_not_imported_and_once(
    stock: Stock, caplog: pytest.LogCaptureFixture
) -> None:
    stock(KNOWN)
    finders = len(sys.meta_path)
    plugin.install()
    waiting = len(sys.meta_path)
    plugin.install()
    assert len(sys.meta_path) == waiting > finders
    assert plugin.MODULE not in sys.modules
    assert _replaced()
    assert len(sys.meta_path) == waiting - 1
    plugin.install()
    assert _replaced()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_the_module_is_otherwise_what_it_would_be(stock: Stock) -> None:
    stock(KNOWN)
    plain = _module()
    del sys.modules[plugin.MODULE]
    plugin.install()
    ours = _module()
    assert type(ours.__loader__) is type(plain.__loader__)
    assert type(ours.__spec__.loader) is type(plain.__spec__.loader)
    assert (ours.__file__, ours.__spec__.origin) == (plain.__file__, plain.__spec__.origin)


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        pytest.param(
            KNOWN.replace("num_tokens_no_spec,", "req_ids, num_tokens_no_spec,"),
            "NgramProposer.propose takes (self, num_speculative_tokens, sampled_token_ids, req_ids",
            id="other-arguments",
        ),
        pytest.param(
            KNOWN.replace('vllm_config: "VllmConfig"', "vllm_config, device"),
            "NgramProposer.__init__ takes (self, vllm_config, device), expected (self, vllm_confi",
            id="other-constructor",
        ),
        pytest.param(
            KNOWN.replace("load_model", "load"),
            "there is no NgramProposer.load_model",
            id="a-method",
        ),
        pytest.param(
            "STOCK = NgramProposer = None", "there is no class NgramProposer", id="no-class"
        ),
    ],
)
def test_an_unknown_vllm_is_left_as_it_is(
    stock: Stock, caplog: pytest.LogCaptureFixture, text: str, doubt: str
) -> None:
    stock(text)
    plugin.install()
    assert not _replaced()
    (line,) = caplog.messages
    assert line.startswith("ngram_npu: not enabled, vLLM is left as it is: this vLLM (")
    assert doubt in line
    assert "\n" not in line


def test_a_runner_that_has_bound_the_class(
    stock: Stock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock(KNOWN)
    runner = ModuleType(plugin.RUNNER)
    runner.NgramProposer = _module().STOCK  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.RUNNER, runner)
    plugin.install()
    assert not _replaced()
    assert "has bound NgramProposer already" in caplog.text


def test_a_vllm_without_the_module(
    stock: Stock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.install()
    assert len(caplog.messages) == 1
    assert f"it has no {plugin.MODULE}" in caplog.text
    (tmp_path / "vllm" / "v1" / "__init__.py").write_text("raise RuntimeError('one\\ntwo')")
    sys.modules.pop("vllm.v1", None)
    sys.modules.pop("vllm.v1.spec_decode", None)
    caplog.clear()
    plugin.install()
    assert len(caplog.messages) == 1
    assert "is not found: RuntimeError: one two" in caplog.text


KNOWN_V2 = """
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


def _installed(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stock class's module, imported already, with the given text."""
    module = ModuleType(plugin.V2_MODULE)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, plugin.V2_MODULE, module)
    plugin.install_v2()
    return module


@pytest.mark.usefixtures("info")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(KNOWN_V2, id="0.32.0"),
        pytest.param(KNOWN_V2.replace("dp_sync_state", "dp_state"), id="another-name"),
        pytest.param(
            KNOWN_V2.replace("capture(self)", "capture(self, sizes=None)"), id="optional-argument"
        ),
        pytest.param(
            KNOWN_V2.replace("req_states)", "req_states, adapters=None)"),
            id="optional-argument-of-the-constructor",
        ),
        pytest.param(
            KNOWN_V2.replace(
                "    def capture",
                "    confidences = None\n    def on_requests_finished(self, ids): return ids\n"
                "    def capture",
            ),
            id="members-that-ours-does-not-know",
        ),
    ],
)
def test_the_class_of_the_v2_runner_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    module = _installed(text, monkeypatch)
    assert issubclass(module.NgramGPUSpeculator, NgramSpeculator)
    ours = module.NgramGPUSpeculator
    plugin.install_v2()
    assert module.NgramGPUSpeculator is ours
    assert caplog.messages == [
        "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    ]
    assert caplog.records[0].levelname == "DEBUG"  # the engine's method is not known yet
    for name in set(dir(module.STOCK)) - set(dir(NgramSpeculator)):
        assert getattr(ours, name) is getattr(module.STOCK, name)


@pytest.mark.usefixtures("info")
@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        pytest.param(
            KNOWN_V2.replace("num_sampled, num_rejected", "num_rejected, num_sampled"),
            "NgramGPUSpeculator.propose takes (self, input_batch,",
            id="another-order",
        ),
        pytest.param(
            KNOWN_V2.replace("dummy_run=False, ", ""), "propose takes (self,", id="no-dummy-run"
        ),
        pytest.param(
            "from abc import ABC, abstractmethod\n"
            + KNOWN_V2.replace("NgramGPUSpeculator:", "NgramGPUSpeculator(ABC):").replace(
                "    def capture", "    @abstractmethod\n    def bind(self): ...\n    def capture"
            ),
            "NgramGPUSpeculator.bind is abstract",
            id="abstract-method",
        ),
        pytest.param(
            KNOWN_V2.replace("    def capture", "    def _begin(self): ...\n    def capture"),
            "NgramGPUSpeculator has _begin, which ngram_npu's class has for itself",
            id="private-member-of-both",
        ),
        pytest.param(
            KNOWN_V2.replace(
                "    def capture", "    max_num_reqs = property(lambda self: 1)\n    def capture"
            ),
            "NgramGPUSpeculator.max_num_reqs is a property, which ngram_npu's class sets",
            id="property-that-ours-sets",
        ),
    ],
)
def test_an_unknown_v2_runner_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, doubt: str
) -> None:
    module = _installed(text, monkeypatch)
    assert getattr(module, "NgramGPUSpeculator", None) is getattr(module, "STOCK", None)
    (line,) = caplog.messages
    assert line.startswith("ngram_npu: not enabled for the V2 runner, which is left as it is: ")
    assert doubt in line
    assert "\n" not in line


CONFIG = """
class VllmConfig:
    def __init__(self, config): vars(self).update(vars(config)); self.__post_init__()
    def __post_init__(self): self.validated = True
"""


@pytest.mark.parametrize(
    ("stock", "v2", "options", "message"),
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
    ],
)
def test_option_of_a_served_method_is_checked_when_the_configuration_is_created(
    fake_vllm: Path,
    stock: str | None,
    v2: bool,
    options: dict[str, Any],
    message: str | None,
) -> None:
    (fake_vllm.parent / "config").mkdir()
    (fake_vllm.parent / "config" / "__init__.py").touch()
    (fake_vllm.parent / "config" / "vllm.py").write_text(CONFIG)
    (fake_vllm.parent / "platforms.py").write_text(
        "from types import SimpleNamespace\n"
        "current_platform = SimpleNamespace(device_type='cuda')\n"
    )
    plugin.install()
    create = importlib.import_module(plugin.CONFIG).VllmConfig
    bounds = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    given = vllm_config(method=stock, additional_config={"ngram_npu": options}, **bounds)
    given.use_v2_model_runner = v2
    given.speculative_config.target_model_config = given.model_config
    given.speculative_config.draft_model_config = (
        given.model_config if str(stock).startswith("ngram") else SimpleNamespace()
    )
    if message is None:
        assert create(given).validated
    else:
        with pytest.raises(ValueError, match=message):
            create(given)
        if stock == "eagle":  # the drafter's own configuration, which vLLM derives
            given.model_config = given.speculative_config.draft_model_config
            assert create(given).validated
