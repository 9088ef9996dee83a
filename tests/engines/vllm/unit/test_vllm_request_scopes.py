"""Tests the checks of requests in vLLM's input processor, and the cache salt in the data that
vLLM's scheduler sends to workers. Short fakes replace vLLM's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_engine
import pytest
from conftest import FakeVLLM
from ngram_npu.engines.vllm import NgramProposer, plugin, request_scopes

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
    min_tokens: int = 0,
    **arguments: Any,
) -> Any:
    """Returns the output of an engine's input processor for a request."""
    prompt = {} if salt is None else {"cache_salt": salt}
    processor = sys.modules[request_scopes.INPUT_MODULE].InputProcessor(vllm_config)
    params = SimpleNamespace(extra_args=extra_args, min_tokens=min_tokens)
    return processor.process_inputs("a", prompt, params, (), lora_request=adapter, **arguments)


def make_config(
    method: str,
    *,
    v2: bool = False,
    is_async: bool = False,
    publishes: bool = False,
    **options: Any,
) -> Any:
    vllm_config = fake_engine.make_config(method=method, rows=6, length=400, **options)
    vllm_config.use_v2_model_runner = v2
    vllm_config.scheduler_config.async_scheduling = is_async
    vllm_config.kv_events_config = SimpleNamespace(enable_kv_cache_events=publishes)
    if method == "custom_class":
        vllm_config.speculative_config.model = "ngram_npu.engines.vllm.NgramProposer"
    return vllm_config


ONE_TENANT: dict[str, Any] = {**STORE, "scope": "shared"}
ENGINES: dict[str, Any] = {
    "ngram": make_config("ngram"),
    "eagle": make_config("eagle", **STORE),
    "eagle, V1": make_config("eagle", neural=True, **STORE),
    "publisher": make_config("eagle", publishes=True),
    "V2": make_config("ngram_gpu", v2=True, is_async=True),
    "async": make_config("ngram_gpu", is_async=True),
    "V1 store": make_config("ngram_gpu", **STORE),
    "V2 store": make_config("ngram", v2=True, **STORE),
    "neural": make_config("eagle", v2=True, neural=True, **STORE),
    "store of a publisher": make_config("ngram_gpu", publishes=True, **STORE),
    "V1 ngram": make_config("ngram", **ONE_TENANT),
    "custom class": make_config("custom_class", v2=True, **ONE_TENANT),
}
HIDES_KEYS = "V1 ngram", "custom class"
PUBLISHES = "publisher", "store of a publisher"
HAS_STORE = "V1 store", "V2 store", "neural", "store of a publisher", *HIDES_KEYS


def reject(engines: Iterable[str], message: str) -> dict[str, str]:
    return dict.fromkeys(engines, f"^ngram_npu: {message}")


def make_invalid_argument(key: str, value: Any, message: str) -> tuple[Any, dict[str, str]]:
    return {"extra_args": {key: value}}, reject(ENGINES, message)


ADAPTER = {"adapter": SimpleNamespace(lora_name="x")}
HIDDEN = ".*: expected none, got one: this engine's runner does not know it"
PUBLISHED = reject(PUBLISHES, "ngram_npu_store: expected true, got false: this engine publishes")
NO_STRING = "scope_of_request: .* expected str or None"
REQUESTS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"salt": ""}, {}),  # vLLM ignores an empty salt
    ({"salt": "a"}, reject(HIDES_KEYS, HIDDEN)),
    (ADAPTER, reject(HIDES_KEYS, HIDDEN)),
    # The OpenAI server turns false into 0.
    *(
        ({"extra_args": {"ngram_npu_store": value}}, reject(HIDES_KEYS, HIDDEN) | PUBLISHED)
        for value in (False, 0)
    ),
    *(({"extra_args": {"ngram_npu_store": value}}, {}) for value in (True, 1)),
    ({"extra_args": {"other": 1, 7: 1}}, {}),
    # vLLM counts placeholders as tokens (vllm#32642).
    ({"min_tokens": 3}, reject(["async"], "min_tokens: expected none, got 3: with 'ngram_gpu' in")),
    # The runner does not receive the cache salts of later parts of a streamed prompt.
    ({"resumable": True}, reject(HAS_STORE, "streaming input: expected none with a store")),
    *(({"salt": salt}, reject(HAS_STORE, NO_STRING)) for salt in (7, b"a", ["a"])),
    ({"adapter": SimpleNamespace(lora_name=7)}, reject(HAS_STORE, NO_STRING)),
    make_invalid_argument("ngram_npu_stor", False, r"unknown key 'ngram_npu_stor' in .*vllm_xargs"),
    make_invalid_argument("NGRAM_NPU_STORE", False, "unknown key 'NGRAM_NPU_STORE' in extra_args"),
    make_invalid_argument("ngram-npu.store", False, r"unknown key 'ngram-npu\.store' in extra"),
    make_invalid_argument("ngram_npu_scope", "a", "ngram_npu_scope in .*: this key was removed: "),
    make_invalid_argument("ngram_npu_k", 1, "ngram_npu_k in .*: this key was removed: "),
    *(
        make_invalid_argument("ngram_npu_store", value, f".* true or false, got {value!r}")
        for value in (None, 2, -1, 0.5, "false", "")
    ),
]


@pytest.mark.usefixtures("vllm_modules")
@pytest.mark.parametrize("engine", ENGINES)
def test_request_that_an_engine_cannot_serve_is_a_client_error(engine: str) -> None:
    error = sys.modules[request_scopes.EXCEPTIONS_MODULE].VLLMValidationError  # HTTP 400
    for request, messages in REQUESTS:
        if engine in messages:
            with pytest.raises(error, match=messages[engine]) as raised:
                process_request(ENGINES[engine], **request)
            assert isinstance(raised.value, ValueError)
        else:
            process_request(ENGINES[engine], **request)


@pytest.mark.usefixtures("vllm_modules")
def test_engine_without_speculation_accepts_all_keys() -> None:
    vllm_config = make_config("ngram")
    vllm_config.speculative_config = None
    process_request(vllm_config, {"ngram_npu_store": False}, "a", **ADAPTER, min_tokens=3)


@pytest.mark.usefixtures("vllm_modules")
def test_misspelled_option_is_ignored_with_another_custom_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NGRAM_NPU_VLLM_STORE", "live")
    assert process_request(make_config("custom_class"), salt="a").cache_salt == "a"


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
    for name in ("V1 store", "V2 store", "neural"):
        process_request(ENGINES[name])
        with pytest.raises(ValueError, match="cache_salt: expected none"):
            process_request(ENGINES[name], salt="a")
    assert process_request(ENGINES["ngram"], salt="a").cache_salt == "a"


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
    vllm_config = make_config("custom_class", **ONE_TENANT)
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
    request_scopes.require_request_checks()
    envs.VLLM_USE_RUST_FRONTEND = True
    with pytest.raises(ValueError, match="expected vLLM's Python front end, got VLLM_USE_RUST_FRO"):
        request_scopes.require_request_checks()
