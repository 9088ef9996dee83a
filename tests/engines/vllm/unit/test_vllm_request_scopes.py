"""Tests the checks of requests in vLLM's input processor, and the cache salt in the data that
vLLM's scheduler sends to workers. Short fakes replace vLLM's modules."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_engine
import pytest
from conftest import FakeVLLM
from ngram_npu.engines.vllm import NgramProposer, plugin, request_scopes
from ngram_npu.engines.vllm.request_scopes import Rules
from ngram_npu.engines.vllm.scopes import fold_scope

PROCESSOR_SOURCE = """
from dataclasses import dataclass
from typing import Any

@dataclass
class EngineCoreRequest:
    sampling_params: Any
    lora_request: Any = None
    cache_salt: "str | None" = None
    resumable: bool = False

class InputProcessor:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
    def process_inputs(
        self, request_id, prompt, params, supported_tasks, lora_request=None, resumable=False
    ):
        return EngineCoreRequest(params, lora_request, prompt.get("cache_salt"), resumable)
"""
SCHEDULER_SOURCE = """
from dataclasses import dataclass
from typing import Any

@dataclass
class NewRequestData:
    req_id: str
    lora_request: Any
    @classmethod
    def from_request(cls, request: "Request", block_ids, prefill_token_ids=None):
        return cls(req_id=request.request_id, lora_request=None)
"""
REQUEST_SOURCE = """
class Request:
    def __init__(self, request_id: str, cache_salt: "str | None" = None):
        self.request_id = request_id
        self.cache_salt = cache_salt
"""
EXCEPTIONS_SOURCE = """
class VLLMValidationError(Exception):
    def __init__(self, message, *, parameter=None): super().__init__(message)
"""
STORE: dict[str, Any] = {"store": True}
SOURCES = {
    request_scopes.INPUT_MODULE: PROCESSOR_SOURCE,
    request_scopes.SCHEDULER_OUTPUT_MODULE: SCHEDULER_SOURCE,
    request_scopes.REQUEST_MODULE: REQUEST_SOURCE,
    request_scopes.EXCEPTIONS_MODULE: EXCEPTIONS_SOURCE,
}


def import_vllm(vllm: FakeVLLM, *, install: bool = True, **changes: str) -> None:
    """Imports the modules with the plugin. `changes` maps texts in the sources to new texts."""
    request_scopes._get_error_class.cache_clear()
    for name, source in SOURCES.items():
        for old_text, new_text in changes.items():
            source = source.replace(old_text, new_text)
        vllm.write_module(name, source)
    if install:
        plugin.install()
    for name in SOURCES:
        importlib.import_module(name)


@pytest.fixture
def vllm_modules(vllm: FakeVLLM) -> None:
    import_vllm(vllm)


def process_request(
    vllm_config: Any,
    extra_args: dict[Any, Any] | None = None,
    salt: str | None = None,
    adapter: object = None,
    **arguments: Any,
) -> Any:
    """Returns the input processor's output for a request."""
    prompt = {} if salt is None else {"cache_salt": salt}
    processor = sys.modules[request_scopes.INPUT_MODULE].InputProcessor(vllm_config)
    params = SimpleNamespace(extra_args=extra_args)
    return processor.process_inputs("a", prompt, params, (), lora_request=adapter, **arguments)


def make_config(method: str, *, v2: bool = False, **options: Any) -> Any:
    vllm_config = fake_engine.make_config(method=method, rows=6, length=400, **options)
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = v2
    return vllm_config


SCOPE = {"ngram_npu_scope": "tenant"}
OWNERS = ("cache_salt", "LoRA adapter", *SCOPE)
STRICT_STORE: dict[str, Any] = {**STORE, "scope": "required"}
ENGINES: dict[str, tuple[Any, Rules]] = {
    "ngram": (make_config("ngram"), Rules()),
    "eagle": (make_config("eagle", **STORE), Rules()),
    "eagle, V1": (make_config("eagle", beside=True, **STORE), Rules()),
    "beside": (make_config("eagle", v2=True, beside=True, **STRICT_STORE), Rules((), True, True)),
    "ngram_gpu": (make_config("ngram_gpu", **STORE), Rules((), False, True)),
    "ngram_gpu, required": (make_config("ngram_gpu", **STRICT_STORE), Rules((), True, True)),
    "V2 ngram": (make_config("ngram", v2=True, **STORE), Rules((), False, True)),
    "V2 ngram, required": (make_config("ngram", v2=True, **STRICT_STORE), Rules((), True, True)),
    "V1 ngram": (make_config("ngram", **STORE), Rules(OWNERS, False, True)),
    "custom class": (make_config("custom_class", v2=True, **STORE), Rules(OWNERS, False, True)),
}


@pytest.mark.usefixtures("vllm_modules")
def test_method_runner_and_options_determine_rules() -> None:
    rules = {
        name: request_scopes.make_rules(vllm_config) for name, (vllm_config, _) in ENGINES.items()
    }
    assert rules == {name: expected for name, (_, expected) in ENGINES.items()}
    vllm_config = make_config("ngram")
    vllm_config.speculative_config = None
    assert request_scopes.make_rules(vllm_config) == Rules()


@pytest.mark.usefixtures("vllm_modules")
def test_streaming_input_with_a_store_raises() -> None:
    """The runner does not receive the cache salts of later parts of a streamed prompt."""
    for name in ("ngram", "eagle"):
        assert process_request(ENGINES[name][0], resumable=True).resumable
    with pytest.raises(ValueError, match="ngram_npu: streaming input: expected none with a store"):
        process_request(ENGINES["V2 ngram"][0], SCOPE, resumable=True)


@pytest.mark.usefixtures("vllm_modules")
def test_misspelled_option_is_ignored_with_another_custom_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NGRAM_NPU_VLLM_STORE", "live")
    assert process_request(make_config("custom_class"), salt="a").cache_salt == "a"


UNKNOWN_KEYS = [
    "ngram_npu_scop",
    "ngram_npu_scope ",
    "NGRAM_NPU_SCOPE",
    "ngram-npu.scope",
    "ngram_npu",
]
MALFORMED_SCOPES = [True, 1.5, 7, ["a"], {"a": 1}, ""]
REMOVED_KEYS = ["ngram_npu_prompt_scope", "ngram_npu_k"]


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize("name", ["ngram", "eagle", "ngram_gpu", "V1 ngram"])
def test_request_with_unknown_key_or_malformed_scope_raises(name: str) -> None:
    exceptions = sys.modules[request_scopes.EXCEPTIONS_MODULE]
    error = exceptions.VLLMValidationError  # vLLM returns HTTP 400
    for key in UNKNOWN_KEYS:
        with pytest.raises(error, match=r"ngram_npu: unknown key .* in extra_args .*vllm_xargs"):
            process_request(ENGINES[name][0], {key: "tenant"})
    for key in REMOVED_KEYS:
        with pytest.raises(error, match=rf"ngram_npu: {key} in .*: this key was removed: "):
            process_request(ENGINES[name][0], {key: 1})
    for scope in MALFORMED_SCOPES:
        with pytest.raises(
            ValueError, match=r"ngram_npu: ngram_npu_scope in extra_args.*: expected a"
        ):
            process_request(ENGINES[name][0], {"ngram_npu_scope": scope})


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize(
    "owner",
    [{"salt": "a"}, {"adapter": 1}, {"extra_args": SCOPE}],
)
def test_request_with_owner_raises_if_runner_ignores_owners(owner: dict[str, Any]) -> None:
    for name in ("ngram", "ngram_gpu, required", "V2 ngram, required", "beside"):
        assert process_request(ENGINES[name][0], **owner).cache_salt == owner.get("salt")
    for name in ("V1 ngram", "custom class"):
        with pytest.raises(ValueError, match=r"ngram_npu: .*: expected none, got one: this engine"):
            process_request(ENGINES[name][0], **owner)


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"ngram_npu_scope": None}, {7: 1}])
def test_request_without_required_owner_raises(extra_args: dict[Any, Any] | None) -> None:
    for salt in (None, ""):
        for name in ("V1 ngram", "custom class", "ngram_gpu", "eagle"):
            process_request(ENGINES[name][0], extra_args, salt)
        for name in ("ngram_gpu, required", "V2 ngram, required", "beside"):
            with pytest.raises(ValueError, match=r"ngram_npu: scope='required': expected a cache_"):
                process_request(ENGINES[name][0], extra_args, salt)


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize("name", ["ngram", "eagle", "ngram_gpu", "V2 ngram", "beside"])
@pytest.mark.parametrize("exchange", ["events", "feed"])
def test_exchanged_scope_becomes_part_of_the_salt(name: str, exchange: str) -> None:
    vllm_config = copy.copy(ENGINES[name][0])
    has_store = name not in ("ngram", "eagle")
    if exchange == "events":
        vllm_config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    elif has_store:
        section = vllm_config.additional_config["ngram_npu"]
        vllm_config.additional_config = {"ngram_npu": {**section, "store_feed": "tcp://a:1"}}
    folds = exchange == "events" or has_store
    for salt in (None, "a"):
        expected = fold_scope("tenant", salt) if folds else salt
        assert process_request(vllm_config, SCOPE, salt).cache_salt == expected
    assert process_request(vllm_config, salt="a").cache_salt == "a"
    with pytest.raises(ValueError, match="ngram_npu_scope in extra_args"):
        process_request(vllm_config, {"ngram_npu_scope": ""})


@pytest.mark.usefixtures("vllm_modules")
def test_salt_of_scheduled_request_survives_pickling() -> None:
    plugin.install()
    data_class = sys.modules[request_scopes.SCHEDULER_OUTPUT_MODULE].NewRequestData
    for salt in ("a", None):
        request = sys.modules[request_scopes.REQUEST_MODULE].Request("r", salt)
        data = data_class.from_request(request, ([],), prefill_token_ids=[1])
        assert (data.req_id, data.cache_salt) == ("r", salt)
        assert pickle.loads(pickle.dumps(data)).cache_salt == salt
    assert data_class("warm-up", None).cache_salt is None


@pytest.mark.parametrize(
    ("old_text", "new_text"),
    [
        pytest.param("cls, request", "cls, state, request", id="other-order"),
        pytest.param("@classmethod", "@staticmethod", id="no-classmethod"),
        pytest.param("@dataclass\nclass New", "@dataclass(slots=True)\nclass New", id="slots"),
        pytest.param("from_request", "create", id="other-name"),
        pytest.param("(self, request_id: str, cache_salt", "(self, request_id, salt", id="no-salt"),
    ],
)
def test_request_with_salt_raises_if_scheduler_omits_salts(
    vllm: FakeVLLM, old_text: str, new_text: str
) -> None:
    assert old_text in SCHEDULER_SOURCE + REQUEST_SOURCE
    import_vllm(vllm, **{old_text: new_text})
    for name in ("ngram_gpu", "V2 ngram", "beside"):
        process_request(ENGINES[name][0], SCOPE)
        with pytest.raises(ValueError, match="cache_salt: expected none"):
            process_request(ENGINES[name][0], SCOPE, "a")
    assert process_request(ENGINES["ngram"][0], SCOPE, "a").cache_salt == "a"


@pytest.mark.parametrize(
    ("runner", "changes", "install"),
    [
        (plugin.RUNNER, {}, False),
        (plugin.V2_RUNNER, {}, False),
        (plugin.RUNNER, {"cache_salt": "salt"}, True),
        (plugin.RUNNER, {"process_inputs": "process"}, True),
        (plugin.RUNNER, {"InputProcessor": "Processor"}, True),
    ],
)
def test_store_without_checks_of_requests_raises(
    vllm: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    changes: dict[str, str],
    install: bool,
) -> None:
    import_vllm(vllm, install=install, **changes)
    vllm_config = make_config("custom_class", **STORE)
    NgramProposer(vllm_config)  # Outside vLLM, no requests need checks.
    monkeypatch.setitem(sys.modules, runner, ModuleType(runner))
    with pytest.raises(ValueError, match="ngram_npu: store: expected NGRAM_NPU_VLLM=1"):
        NgramProposer(vllm_config)
    NgramProposer(make_config("custom_class"))  # without a store


@pytest.mark.usefixtures("vllm_modules")
def test_store_with_the_rust_front_end_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, request_scopes.V2_RUNNER, ModuleType("runner"))
    envs = SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    request_scopes.require_scope_checks()
    envs.VLLM_USE_RUST_FRONTEND = True
    with pytest.raises(ValueError, match="expected vLLM's Python front end, got VLLM_USE_RUST_FRO"):
        request_scopes.require_scope_checks()
