"""The checks of requests in vLLM's input processor, and the cache salt in its scheduler's data.
Short stand-ins replace vLLM's modules."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_engine import config
from ngram_npu.engines.vllm import NgramProposer, admission, plugin
from ngram_npu.engines.vllm.admission import Rules

PROCESSOR = """
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
SCHEDULED = """
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
REQUEST = """
class Request:
    def __init__(self, request_id: str, cache_salt: "str | None" = None):
        self.request_id, self.cache_salt = request_id, cache_salt
"""
EXCEPTIONS = """
class VLLMValidationError(Exception):
    def __init__(self, message, *, parameter=None): super().__init__(message)
"""
STORE: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.01, "store": "live"}


class Params:
    def __init__(self, extra_args: dict[Any, Any] | None) -> None:
        self.extra_args = extra_args


class VLLM:
    """Stand-ins of vLLM's modules, imported with the plugin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = {
            admission.INPUT: PROCESSOR,
            admission.SCHEDULED: SCHEDULED,
            admission.REQUEST: REQUEST,
            admission.EXCEPTIONS: EXCEPTIONS,
        }
        admission._request_error.cache_clear()

    def import_modules(self, install: bool = True) -> VLLM:
        for name, source in self.sources.items():
            path = self.folder.parent.parent.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        if install:
            plugin.install()
        self.input, self.scheduled, self.request, self.exceptions = map(
            importlib.import_module, self.sources
        )
        return self

    def process(
        self,
        vllm_config: Any,
        extra: dict[Any, Any] | None = None,
        salt: str | None = None,
        adapter: object = None,
    ) -> Any:
        """Returns the input processor's output for a request."""
        prompt = {} if salt is None else {"cache_salt": salt}
        processor = self.input.InputProcessor(vllm_config)
        return processor.process_inputs("a", prompt, Params(extra), (), lora_request=adapter)


@pytest.fixture
def vllm(fake_vllm: Path) -> VLLM:
    return VLLM(fake_vllm)


def engine_config(method: str, *, v2: bool = False, **options: Any) -> Any:
    vllm_config = config(method=method, rows=6, length=400, **options)
    vllm_config.speculative_config.method = method
    vllm_config.use_v2_model_runner = v2
    return vllm_config


SCOPE = {"ngram_npu_scope": "tenant"}
ENGINES: dict[str, tuple[Any, Rules]] = {
    "no speculation": (None, Rules()),
    "ngram": (engine_config("ngram"), Rules()),
    "eagle": (engine_config("eagle", **STORE), Rules()),
    "eagle, V1": (engine_config("eagle", beside=True, **STORE), Rules()),
    "beside": (
        engine_config("eagle", v2=True, beside=True, scope="required", **STORE),
        Rules((), True, True),
    ),
    "ngram_gpu": (engine_config("ngram_gpu", **STORE), Rules((), False, True)),
    "ngram_gpu, required": (
        engine_config("ngram_gpu", scope="required", **STORE),
        Rules((), True, True),
    ),
    "V2 ngram": (engine_config("ngram", v2=True, **STORE), Rules((), False, True)),
    "V2 ngram, required": (
        engine_config("ngram", v2=True, scope="required", **STORE),
        Rules((), True, True),
    ),
    "V1 ngram": (
        engine_config("ngram", **STORE),
        Rules(("cache_salt", "LoRA adapter", *SCOPE), False, True),
    ),
    "custom class": (
        engine_config("custom_class", v2=True, **STORE),
        Rules(("cache_salt", "LoRA adapter", *SCOPE), False, True),
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_rules_of_engine(vllm: VLLM, name: str) -> None:
    vllm_config, expected = ENGINES[name]
    if vllm_config is None:
        vllm_config = engine_config("ngram")
        vllm_config.speculative_config = None
    vllm.import_modules()
    assert admission.rules_for(vllm_config) == expected


def test_streaming_input_with_a_store_raises(vllm: VLLM) -> None:
    """The runner does not receive the cache salt of a later part of the prompt."""
    vllm.import_modules()
    for name in ("ngram", "eagle"):
        processor = vllm.input.InputProcessor(ENGINES[name][0])
        assert processor.process_inputs("a", {}, Params(None), (), resumable=True).resumable
    processor = vllm.input.InputProcessor(ENGINES["V2 ngram"][0])
    with pytest.raises(ValueError, match="ngram_npu: streaming input: expected none with a store"):
        processor.process_inputs("a", {}, Params(SCOPE), (), resumable=True)


def test_store_with_the_rust_front_end_raises(vllm: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.import_modules()
    monkeypatch.setitem(sys.modules, admission.V2_RUNNER, ModuleType("runner"))
    envs: Any = ModuleType("vllm.envs")
    envs.VLLM_USE_RUST_FRONTEND = False
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    admission.require_checks()
    envs.VLLM_USE_RUST_FRONTEND = True
    with pytest.raises(ValueError, match="expected vLLM's Python front end, got VLLM_USE_RUST_FRO"):
        admission.require_checks()


def test_request_of_another_custom_class_ignores_misspelled_options(
    vllm: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGRAM_NPU_VLLM_STOER", "live")
    vllm.import_modules()
    assert vllm.process(engine_config("custom_class"), salt="a").cache_salt == "a"


BAD_KEYS = ["ngram_npu_scop", "ngram_npu_scope ", "NGRAM_NPU_SCOPE", "ngram-npu.scope", "ngram_npu"]
BAD_SCOPES = [True, 1.5, -1, 2**62, ["a"], {"a": 1}, ""]


@pytest.mark.parametrize("key", BAD_KEYS)
@pytest.mark.parametrize("name", ["ngram", "eagle", "ngram_gpu", "V1 ngram"])
def test_request_with_unknown_key_raises(vllm: VLLM, name: str, key: str) -> None:
    vllm.import_modules()
    message = r"ngram_npu: unknown key .* in extra_args .*vllm_xargs"
    with pytest.raises(ValueError, match=message) as raised:
        vllm.process(ENGINES[name][0], {key: "tenant"})
    assert isinstance(raised.value, vllm.exceptions.VLLMValidationError), "HTTP 400"


@pytest.mark.parametrize("scope", BAD_SCOPES, ids=repr)
@pytest.mark.parametrize("name", ["ngram", "ngram_gpu"])
def test_request_with_malformed_scope_raises(vllm: VLLM, name: str, scope: object) -> None:
    vllm.import_modules()
    with pytest.raises(ValueError, match=r"ngram_npu: ngram_npu_scope in extra_args.*: expected a"):
        vllm.process(ENGINES[name][0], {"ngram_npu_scope": scope})


@pytest.mark.parametrize(
    "owner",
    [{"salt": "a"}, {"adapter": object()}, {"extra": SCOPE}, {"extra": {"ngram_npu_scope": 0}}],
    ids=["salt", "adapter", "scope", "scope 0"],
)
def test_request_with_owner_raises_if_runner_ignores_owners(
    vllm: VLLM, owner: dict[str, Any]
) -> None:
    vllm.import_modules()
    for name in ("ngram", "ngram_gpu, required", "V2 ngram, required", "beside"):
        assert vllm.process(ENGINES[name][0], **owner).cache_salt == owner.get("salt")
    for name in ("V1 ngram", "custom class"):
        with pytest.raises(ValueError, match=r"ngram_npu: .*: expected none, got one: this engine"):
            vllm.process(ENGINES[name][0], **owner)


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"ngram_npu_scope": None}, {7: 1}])
@pytest.mark.parametrize("salt", [None, ""])
def test_request_without_required_owner_raises(
    vllm: VLLM, extra: dict[Any, Any] | None, salt: str | None
) -> None:
    vllm.import_modules()
    for name in ("V1 ngram", "custom class", "ngram_gpu", "eagle"):
        vllm.process(ENGINES[name][0], extra, salt)
    for name in ("ngram_gpu, required", "V2 ngram, required", "beside"):
        with pytest.raises(ValueError, match=r"ngram_npu: scope='required': expected a cache_salt"):
            vllm.process(ENGINES[name][0], extra, salt)


def test_salt_of_scheduled_request_survives_pickling(vllm: VLLM) -> None:
    vllm.import_modules()
    plugin.install()
    for salt in ("a", None):
        request = vllm.request.Request("r", salt)
        new = vllm.scheduled.NewRequestData.from_request(request, ([],), prefill_token_ids=[1])
        assert (new.req_id, new.cache_salt) == ("r", salt)
        assert pickle.loads(pickle.dumps(new)).cache_salt == salt
    assert vllm.scheduled.NewRequestData("warm-up", None).cache_salt is None


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        pytest.param("SCHEDULED", "cls, request", "cls, state, request", id="other-order"),
        pytest.param("SCHEDULED", "@classmethod", "@staticmethod", id="no-classmethod"),
        pytest.param("SCHEDULED", "@dataclass\n", "@dataclass(slots=True)\n", id="slots"),
        pytest.param("SCHEDULED", "from_request", "create", id="other-name"),
        pytest.param("REQUEST", "cache_salt", "prefix_salt", id="no-salt"),
    ],
)
def test_request_with_salt_raises_if_scheduler_omits_salts(
    vllm: VLLM, module: str, old: str, new: str
) -> None:
    name = getattr(admission, module)
    assert old in vllm.sources[name]
    vllm.sources[name] = vllm.sources[name].replace(old, new)
    vllm.import_modules()
    for name in ("ngram_gpu", "V2 ngram", "beside"):
        vllm.process(ENGINES[name][0], SCOPE)
        with pytest.raises(ValueError, match="cache_salt: expected none"):
            vllm.process(ENGINES[name][0], SCOPE, "a")
    assert vllm.process(ENGINES["ngram"][0], SCOPE, "a").cache_salt == "a"


@pytest.mark.parametrize("runner", [plugin.RUNNER, plugin.V2_RUNNER])
@pytest.mark.parametrize(
    ("change", "install"),
    [
        (("", ""), False),
        (("cache_salt", "salt"), True),
        (("process_inputs", "process"), True),
        (("InputProcessor", "Processor"), True),
    ],
    ids=["no-plugin", "other-request", "other-method", "other-class"],
)
def test_store_without_checked_requests_raises(
    vllm: VLLM,
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    change: tuple[str, str],
    install: bool,
) -> None:
    vllm.sources[admission.INPUT] = PROCESSOR.replace(*change)
    vllm.import_modules(install)
    vllm_config = engine_config("custom_class", **STORE)
    NgramProposer(vllm_config)  # outside vLLM
    monkeypatch.setitem(sys.modules, runner, ModuleType(runner))
    with pytest.raises(ValueError, match="ngram_npu: store: expected NGRAM_NPU_VLLM=1"):
        NgramProposer(vllm_config)
    NgramProposer(engine_config("custom_class"))  # without a store
