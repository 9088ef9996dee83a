"""Checks requests where vLLM admits them, and passes the keys by which a store separates text to
the runner: ``cache_salt`` and LoRA adapter.

Requests are checked in the API's process, where an error is the answer to one request (HTTP 400).
In the engine, an error would end all requests. vLLM's scheduler does not pass ``cache_salt`` on to
the runner, so it is added to the scheduler's data of new requests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from ngram_npu.engines.vllm.options import (
    EXTRA_ARGUMENTS,
    HOST_METHODS,
    REMOVED_ARGUMENTS,
    SECTION,
    STORE_ARGUMENT,
    find_method,
    publishes_text,
    read_settings,
)
from ngram_npu.engines.vllm.patching import (
    RUNNER,
    V2_RUNNER,
    parameter_names,
    run_after_import,
    wrap_function,
)
from ngram_npu.store import PRIVATE_SCOPE, SHARED_SCOPE, Scope, scope_of_request

INPUT_MODULE = "vllm.v1.engine.input_processor"
ENGINE_MODULE = "vllm.v1.engine.async_llm"
SCHEDULER_OUTPUT_MODULE = "vllm.v1.core.sched.output"
REQUEST_MODULE = "vllm.v1.request"
EXCEPTIONS_MODULE = "vllm.exceptions"

RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
SALT, ADAPTER = "cache_salt", "LoRA adapter"
UNKNOWN_RUNNER = (
    "ngram_npu: store: expected a runner that passes on the keys of requests, this vLLM's has "
    "another GPUModelRunner.{}"
)


class Rules(NamedTuple):
    """What an engine rejects."""

    hidden_keys: tuple[str, ...] = ()
    """Keys that the runner cannot see. A request with such a key is rejected."""
    has_store: bool = False
    publishes_text: bool = False
    rejects_min_tokens: bool = False


def find_scope(request: Any, *, is_private: bool) -> Scope:
    """Returns the scope of a request that :func:`check_request` accepts.

    Args:
        is_private: Whether a request without salt and adapter shares with nobody.
    """
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    if not extra_args.get(STORE_ARGUMENT, True):
        return PRIVATE_SCOPE
    salt = getattr(request, SALT, None)  # exists if it is passed on
    scope = scope_of_request(salt, request.lora_request and request.lora_request.lora_name)
    return PRIVATE_SCOPE if is_private and scope == SHARED_SCOPE else scope


def install() -> None:
    """Wraps vLLM's functions, now or when vLLM imports their modules. May be called again."""
    run_after_import(INPUT_MODULE, _wrap_input_processor)
    run_after_import(ENGINE_MODULE, _wrap_engine)
    run_after_import(SCHEDULER_OUTPUT_MODULE, _pass_salts_on)


def _wrap_input_processor(module: Any) -> None:
    # If a checked field is missing in requests, nothing is wrapped; require_request_checks raises.
    request = getattr(module, "EngineCoreRequest", None)
    if {SALT, "lora_request", "sampling_params"} <= {*getattr(request, "__annotations__", ())}:
        wrap_function(getattr(module, "InputProcessor", None), "process_inputs", _process_inputs)


def _process_inputs(stock: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = stock(processor, *args, **kwargs)
    _check_request(request, processor)
    return request


def _wrap_engine(module: Any) -> None:
    wrap_function(getattr(module, "AsyncLLM", None), "generate", _generate)


def _generate(
    stock: Any, engine: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Checks a request before vLLM answers a streaming request with the status 200. vLLM's function
    is a generator, so :func:`_process_inputs` checks a request only when the response begins."""
    if isinstance(prompt, Mapping):
        request = SimpleNamespace(
            sampling_params=sampling_params,
            lora_request=kwargs.get("lora_request"),
            cache_salt=prompt.get(SALT),
        )
        _check_request(request, engine.input_processor)
    return stock(engine, prompt, sampling_params, *args, **kwargs)


def _check_request(request: Any, processor: Any) -> None:
    if not hasattr(processor, SECTION):
        setattr(processor, SECTION, make_rules(processor.vllm_config))
    try:
        check_request(request, getattr(processor, SECTION))
    except ValueError as error:
        raise _get_error_class()(str(error)) from None


@functools.cache
def _get_error_class() -> type[Exception]:
    # vLLM answers its own VLLMValidationError with HTTP 400, and any other ValueError with 500.
    base = importlib.import_module(EXCEPTIONS_MODULE).VLLMValidationError
    return type("RequestError", (base, ValueError), {})


def make_rules(vllm_config: Any) -> Rules:
    """Returns the rules of the engine with this configuration."""
    publishes = publishes_text(vllm_config)
    # A custom class of another name may derive from ours. Its options are not checked before.
    is_custom = getattr(vllm_config.speculative_config, "method", None) == "custom_class"
    method = "custom_class" if is_custom else find_method(vllm_config)
    if method is None:
        return Rules(publishes_text=publishes)
    settings: Mapping[str, Any] = {}
    with contextlib.suppress(*([ValueError] if is_custom else [])):
        settings = read_settings(vllm_config)[0]
    is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    rejects_min_tokens = method == "ngram_gpu" and bool(is_async)
    has_store = bool(settings.get("store"))
    hidden_keys: tuple[str, ...] = ()
    if has_store and method in HOST_METHODS:
        hidden_keys = SALT, ADAPTER, STORE_ARGUMENT
    elif has_store and not _salts_are_passed_on():
        hidden_keys = (SALT,)
    return Rules(hidden_keys, has_store, publishes, rejects_min_tokens)


def check_request(request: Any, rules: Rules) -> None:
    """Raises ValueError if the request has an unknown key with our prefix, a value of the wrong
    type, or something that the rules exclude."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    _check_extra_arguments(extra_args)
    keeps_out = not extra_args.get(STORE_ARGUMENT, True)
    if keeps_out and rules.publishes_text:
        raise ValueError(
            f"ngram_npu: {STORE_ARGUMENT}: expected true, got false: this engine publishes KV "
            "events, with which other engines can store the text"
        )
    if rules.rejects_min_tokens and getattr(request.sampling_params, "min_tokens", None):
        raise ValueError(
            f"ngram_npu: min_tokens: expected none, got {request.sampling_params.min_tokens}: with "
            "'ngram_gpu' in the V1 runner, vLLM may end the request before; use method 'ngram' or "
            "the V2 runner"
        )
    if not rules.has_store:
        return
    if getattr(request, "resumable", False):
        raise ValueError(
            "ngram_npu: streaming input: expected none with a store, got a request with later "
            "parts, which may have another owner"
        )
    lora_request = request.lora_request
    try:
        scope_of_request(request.cache_salt, lora_request and lora_request.lora_name)
    except TypeError as error:
        raise ValueError(f"ngram_npu: {error}") from None
    keys = {
        SALT: bool(request.cache_salt),  # vLLM ignores an empty salt
        ADAPTER: lora_request is not None,
        STORE_ARGUMENT: keeps_out,
    }
    for name in rules.hidden_keys:
        if keys[name]:
            raise ValueError(
                f"ngram_npu: {name}: expected none, got one: this engine's runner does not know it "
                "and the store could not separate the request; use method 'ngram_gpu' with a "
                "tested vLLM, or no store"
            )


def _check_extra_arguments(extra_args: Mapping[Any, Any]) -> None:
    for key in extra_args:
        if key in REMOVED_ARGUMENTS:
            raise ValueError(
                f"ngram_npu: {key} in {EXTRA_ARGUMENTS}: this key was removed: "
                f"{REMOVED_ARGUMENTS[key]}"
            )
        letters = "".join(filter(str.isalnum, str(key))).lower()
        if key != STORE_ARGUMENT and letters.startswith("ngramnpu"):
            raise ValueError(
                f"ngram_npu: unknown key {key!r} in {EXTRA_ARGUMENTS}; known: {STORE_ARGUMENT!r}"
            )
    # vLLM's API turns true and false into 1 and 0.
    value = extra_args.get(STORE_ARGUMENT, True)
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(
            f"ngram_npu: {STORE_ARGUMENT} in {EXTRA_ARGUMENTS}: expected true or false, got "
            f"{value!r}"
        )


def _pass_salts_on(module: Any) -> None:
    """Makes ``NewRequestData.from_request``, which the scheduler calls, keep the salt. A function
    with other parameters stays as it is; :func:`make_rules` then excludes salts."""
    data = getattr(module, "NewRequestData", None)
    stock = vars(data).get("from_request") if inspect.isclass(data) else None
    if not isinstance(stock, classmethod) or hasattr(data, SALT) or hasattr(data, "__slots__"):
        return
    make_new_request = stock.__func__
    if parameter_names(make_new_request)[:2] != ["cls", "request"]:
        return

    @functools.wraps(make_new_request)
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        new_request = make_new_request(cls, request, *args, **kwargs)
        new_request.cache_salt = getattr(request, SALT, None)
        return new_request

    data.cache_salt = None  # type: ignore[union-attr]  # for requests that warm up the kernels
    data.from_request = classmethod(from_request)  # type: ignore[union-attr]


def _salts_are_passed_on() -> bool:
    request_data = importlib.import_module(SCHEDULER_OUTPUT_MODULE).NewRequestData
    request = importlib.import_module(REQUEST_MODULE).Request
    return SALT in parameter_names(request.__init__) and hasattr(request_data, SALT)


def require_request_checks() -> None:
    """Raises ValueError if, for a worker with a store, the API's process does not check
    requests."""
    if not sys.modules.keys() & {RUNNER, V2_RUNNER}:  # not in a vLLM worker
        return
    with contextlib.suppress(ImportError):
        if getattr(importlib.import_module("vllm.envs"), RUST_FRONT_END, False):
            raise ValueError(
                f"ngram_npu: store: expected vLLM's Python front end, got {RUST_FRONT_END}, which "
                "does not check requests: a cache_salt that the runner does not know would be "
                "ignored"
            )
    process_inputs: Any = None
    with contextlib.suppress(ImportError, AttributeError):
        process_inputs = importlib.import_module(INPUT_MODULE).InputProcessor.process_inputs
    if not hasattr(process_inputs, "ngram_npu"):
        raise ValueError(
            "ngram_npu: store: expected NGRAM_NPU_VLLM=1 and a vLLM that lets ngram_npu check "
            f"requests in {INPUT_MODULE}: else a cache_salt that the runner does not know would be "
            "ignored"
        )
