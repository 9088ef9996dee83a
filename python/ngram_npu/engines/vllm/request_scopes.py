"""Checks the properties of requests by which a store separates text: ``cache_salt``, LoRA adapter
and scope.

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
from typing import Any, NamedTuple

from ngram_npu.engines.vllm.options import (
    EXTRA_ARGUMENT,
    EXTRA_ARGUMENTS,
    REMOVED_ARGUMENTS,
    SECTION,
    exchanges_scopes,
    publishes_text,
    read_beside_option,
    read_settings,
)
from ngram_npu.engines.vllm.patching import (
    RUNNER,
    V2_RUNNER,
    parameter_names,
    run_after_import,
    wrap_function,
)
from ngram_npu.engines.vllm.scopes import fold_scope

INPUT_MODULE = "vllm.v1.engine.input_processor"
SCHEDULER_OUTPUT_MODULE = "vllm.v1.core.sched.output"
REQUEST_MODULE = "vllm.v1.request"
EXCEPTIONS_MODULE = "vllm.exceptions"

RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
SALT, ADAPTER = "cache_salt", "LoRA adapter"
UNKNOWN_RUNNER = (
    "ngram_npu: store: expected a runner that passes on the scopes of requests, this vLLM's has "
    "another GPUModelRunner.{}"
)


class Rules(NamedTuple):
    """The properties that an engine accepts or requires of requests."""

    hidden_properties: tuple[str, ...] = ()
    """Properties that the runner cannot see. A request with such a property is rejected."""
    requires_scope: bool = False
    """Whether a request must have a salt, an adapter or a scope."""
    has_store: bool = False
    folds_scope: bool = False
    """Whether a request's scope becomes part of its salt, which KV events contain."""


def install() -> None:
    """Wraps both functions, now or when vLLM imports their modules. May be called again."""
    run_after_import(INPUT_MODULE, _wrap_input_processor)
    run_after_import(SCHEDULER_OUTPUT_MODULE, _pass_salts_on)


def _wrap_input_processor(module: Any) -> None:
    # If a checked field is missing in requests, nothing is wrapped; require_scope_checks raises.
    request = getattr(module, "EngineCoreRequest", None)
    if {SALT, "lora_request", "sampling_params"} <= {*getattr(request, "__annotations__", ())}:
        wrap_function(getattr(module, "InputProcessor", None), "process_inputs", _process_inputs)


def _process_inputs(stock: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = stock(processor, *args, **kwargs)
    if not hasattr(processor, SECTION):
        setattr(processor, SECTION, make_rules(processor.vllm_config))
    try:
        check_request(request, getattr(processor, SECTION))
        if getattr(processor, SECTION).folds_scope:
            extra_args = getattr(request.sampling_params, "extra_args", None) or {}
            request.cache_salt = fold_scope(extra_args.get(EXTRA_ARGUMENT), request.cache_salt)
    except ValueError as error:
        raise _get_error_class()(str(error)) from None
    return request


@functools.cache
def _get_error_class() -> type[Exception]:
    # vLLM answers its own VLLMValidationError with HTTP 400, and any other ValueError with 500.
    base = importlib.import_module(EXCEPTIONS_MODULE).VLLMValidationError
    return type("RequestError", (base, ValueError), {})


def make_rules(vllm_config: Any) -> Rules:
    """Returns the rules of the engine with this configuration."""
    method = getattr(vllm_config.speculative_config, "method", None)
    in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    is_replaced = method in ("ngram", "ngram_gpu", "custom_class") or (
        method is not None and in_v2 and read_beside_option(vllm_config)
    )
    settings: Mapping[str, Any] = {}
    # The options of another custom class are not checked with the configuration.
    with contextlib.suppress(*([ValueError] if method == "custom_class" else [])):
        settings = read_settings(vllm_config)[0] if is_replaced else {}
    if not settings.get("store"):
        return Rules(folds_scope=publishes_text(vllm_config))
    hidden_properties: tuple[str, ...] = ()
    if method == "custom_class" or (method == "ngram" and not in_v2):
        hidden_properties = SALT, ADAPTER, EXTRA_ARGUMENT
    elif not _salts_are_passed_on():
        hidden_properties = (SALT,)
    return Rules(
        hidden_properties,
        requires_scope=settings.get("scope") == "required",
        has_store=True,
        folds_scope=exchanges_scopes(vllm_config),
    )


def check_request(request: Any, rules: Rules) -> None:
    """Raises ValueError if the request has an unknown key with our prefix, a malformed scope, or a
    property that the rules exclude."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    for key in extra_args:
        if key in REMOVED_ARGUMENTS:
            raise ValueError(
                f"ngram_npu: {key} in {EXTRA_ARGUMENTS}: this key was removed: "
                f"{REMOVED_ARGUMENTS[key]}"
            )
        letters = "".join(filter(str.isalnum, str(key))).lower()
        if key != EXTRA_ARGUMENT and letters.startswith("ngramnpu"):
            raise ValueError(
                f"ngram_npu: unknown key {key!r} in {EXTRA_ARGUMENTS}; known: {EXTRA_ARGUMENT!r}"
            )
    scope = extra_args.get(EXTRA_ARGUMENT)
    if scope is not None and not (isinstance(scope, str) and scope):
        raise ValueError(
            f"ngram_npu: {EXTRA_ARGUMENT} in {EXTRA_ARGUMENTS}: expected a string that is not "
            f"empty, got {scope!r}"
        )
    if rules.has_store and getattr(request, "resumable", False):
        raise ValueError(
            "ngram_npu: streaming input: expected none with a store, got a request with later "
            "parts, which may have another owner"
        )
    properties = {
        SALT: bool(request.cache_salt),  # vLLM ignores an empty salt
        ADAPTER: request.lora_request is not None,
        EXTRA_ARGUMENT: scope is not None,
    }
    for name in rules.hidden_properties:
        if properties[name]:
            raise ValueError(
                f"ngram_npu: {name}: expected none, got one: this engine's runner does not know it "
                "and the store could not separate the request; use method 'ngram_gpu' with a "
                "tested vLLM, or no store"
            )
    if rules.requires_scope and not any(properties.values()):
        raise ValueError(
            f"ngram_npu: scope='required': expected a cache_salt, a LoRA adapter or "
            f"{EXTRA_ARGUMENT} in {EXTRA_ARGUMENTS}, got none of them"
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


def require_scope_checks() -> None:
    """Raises ValueError if, for a worker with a store, the API's process does not check
    requests."""
    if not sys.modules.keys() & {RUNNER, V2_RUNNER}:  # not in a vLLM worker
        return
    with contextlib.suppress(ImportError):
        if getattr(importlib.import_module("vllm.envs"), RUST_FRONT_END, False):
            raise ValueError(
                f"ngram_npu: store: expected vLLM's Python front end, got {RUST_FRONT_END}, which "
                "does not check requests: a cache_salt or a misspelled scope would be ignored"
            )
    process_inputs: Any = None
    with contextlib.suppress(ImportError, AttributeError):
        process_inputs = importlib.import_module(INPUT_MODULE).InputProcessor.process_inputs
    if not hasattr(process_inputs, "ngram_npu"):
        raise ValueError(
            "ngram_npu: store: expected NGRAM_NPU_VLLM=1 and a vLLM that lets ngram_npu check "
            f"requests in {INPUT_MODULE}: else a cache_salt or a misspelled scope would be ignored"
        )


def install_v1(module: Any) -> None:
    """Makes the V1 runner in ``module`` keep the salts of its requests, and tell its drafter when
    no request runs."""
    runner = getattr(module, "GPUModelRunner", None)
    stock = getattr(runner, "_update_states", None)
    if inspect.isfunction(stock) and parameter_names(stock) == ["self", "scheduler_output"]:
        wrap_function(runner, "_update_states", _update_states)


def keeps_cache_salts(runner: Any) -> bool:
    return hasattr(getattr(runner, "_update_states", None), "ngram_npu")


def _update_states(stock: Any, runner: Any, scheduler_output: Any) -> Any:
    """Wraps the function of V1's ``GPUModelRunner`` that creates the states of new requests."""
    result = stock(runner, scheduler_output)
    for new_request in scheduler_output.scheduled_new_reqs:
        state = runner.requests[new_request.req_id]
        state.cache_salt = getattr(new_request, SALT, None)
    drafter = getattr(getattr(runner, "drafter", None), "ngram_npu", None)
    if drafter is not None:
        drafter.end_requests(scheduler_output)
    return result
