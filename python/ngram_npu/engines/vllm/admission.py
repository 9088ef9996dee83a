"""Who a request belongs to, by which a store separates text: its ``cache_salt``, its LoRA adapter,
and the scope that it names.

Checked where vLLM takes requests in, in the process of the API: there an error is the answer to one
request (HTTP 400), while in the engine it would end all of them. vLLM's scheduler does not pass
``cache_salt`` on to the runner; it is added to what the scheduler says of new requests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from typing import Any, NamedTuple

from ngram_npu.engines.vllm.options import SECTION, scope_option, wants_beside
from ngram_npu.engines.vllm.patching import RUNNER, V2_RUNNER, after_import, parameters, wrap
from ngram_npu.engines.vllm.sharing import EXTRA_ARGUMENT
from ngram_npu.scopes import scope_of

INPUT = "vllm.v1.engine.input_processor"
SCHEDULED = "vllm.v1.core.sched.output"
REQUEST = "vllm.v1.request"
EXCEPTIONS = "vllm.exceptions"

RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
SALT, ADAPTER = "cache_salt", "LoRA adapter"
_WHERE = "extra_args (over HTTP: vllm_xargs)"


class Rules(NamedTuple):
    """What an engine expects of requests."""

    hidden: tuple[str, ...] = ()
    """What the runner does not know of a request: one that has it is refused."""
    required: bool = False
    """Whether a request must say to whom it belongs."""
    has_store: bool = False


def install() -> None:
    """Wraps both functions, now or when vLLM imports them. May be called again."""
    after_import(INPUT, _check_requests)
    after_import(SCHEDULED, _pass_salts_on)


def _check_requests(module: Any) -> None:
    """Nothing is changed where requests do not say what is checked; then :func:`expect_checks`
    raises."""
    request = getattr(module, "EngineCoreRequest", None)
    if {SALT, "lora_request", "sampling_params"} <= {*getattr(request, "__annotations__", ())}:
        wrap(getattr(module, "InputProcessor", None), "process_inputs", _process_inputs)


def _process_inputs(stock: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = stock(processor, *args, **kwargs)
    if not hasattr(processor, SECTION):
        setattr(processor, SECTION, rules_of(processor.vllm_config))
    try:
        check(request, getattr(processor, SECTION))
    except ValueError as error:
        raise _clients_error()(str(error)) from None
    return request


@functools.cache
def _clients_error() -> type[Exception]:
    """A ValueError that vLLM answers with HTTP 400, where a ValueError of another kind is 500."""
    theirs = importlib.import_module(EXCEPTIONS).VLLMValidationError
    return type("RequestError", (theirs, ValueError), {})


def rules_of(vllm_config: Any) -> Rules:
    """
    Raises:
        ValueError: an option that is unknown or malformed; one line.
    """
    method = getattr(vllm_config.speculative_config, "method", None)
    in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    ours = method in ("ngram", "ngram_gpu", "custom_class") or (
        method is not None and in_v2 and wants_beside(vllm_config)
    )
    scope = None
    # The options of another custom class are not checked with the configuration.
    with contextlib.suppress(*([ValueError] if method == "custom_class" else [])):
        scope = scope_option(vllm_config) if ours else None
    if scope is None:
        return Rules()
    hidden: tuple[str, ...] = ()
    if method == "custom_class" or (method == "ngram" and not in_v2):
        hidden = SALT, ADAPTER, EXTRA_ARGUMENT
    elif not _salts_are_passed_on():
        hidden = (SALT,)
    return Rules(hidden, scope == "required", has_store=True)


def check(request: Any, rules: Rules) -> None:
    """
    Raises:
        ValueError: an unknown key of ours, a malformed scope, or what the rules exclude; one line.
    """
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    for key in extra:
        letters = "".join(filter(str.isalnum, str(key))).lower()
        if key != EXTRA_ARGUMENT and letters.startswith("ngramnpu"):
            raise ValueError(
                f"ngram_npu: unknown key {key!r} in {_WHERE}; known: {EXTRA_ARGUMENT!r}"
            )
    named = extra.get(EXTRA_ARGUMENT)
    if not _is_scope(named):
        raise ValueError(
            f"ngram_npu: {EXTRA_ARGUMENT} in {_WHERE}: expected a string that is not empty or an "
            f"integer from 0 to 2**62 - 1, got {named!r}"
        )
    if rules.has_store and getattr(request, "resumable", False):
        raise ValueError(
            "ngram_npu: streaming input: expected none with a store, got a request whose later "
            "parts may belong to others"
        )
    of_request = {
        SALT: bool(request.cache_salt),  # vLLM ignores an empty one
        ADAPTER: request.lora_request is not None,
        EXTRA_ARGUMENT: named is not None,
    }
    for name in rules.hidden:
        if of_request[name]:
            raise ValueError(
                f"ngram_npu: {name}: expected none, got one: this engine's runner does not know it "
                "and its store could not separate the request; use method 'ngram_gpu' with a "
                "tested vLLM, or no store"
            )
    if rules.required and not any(of_request.values()):
        raise ValueError(
            f"ngram_npu: scope='required': expected a cache_salt, a LoRA adapter or "
            f"{EXTRA_ARGUMENT} in {_WHERE}, got none of them"
        )


def _is_scope(named: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        scope_of(named)
        return bool(named != "")
    return False


def _pass_salts_on(module: Any) -> None:
    """Has ``NewRequestData.from_request``, which the scheduler calls, note the salt. Nothing is
    changed where it is another function; then :func:`rules_of` excludes salts."""
    data = getattr(module, "NewRequestData", None)
    stock = vars(data).get("from_request") if inspect.isclass(data) else None
    if not isinstance(stock, classmethod) or hasattr(data, SALT) or hasattr(data, "__slots__"):
        return
    make = stock.__func__
    if parameters(make)[:2] != ["cls", "request"]:
        return

    @functools.wraps(make)
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        new = make(cls, request, *args, **kwargs)
        new.cache_salt = getattr(request, SALT, None)
        return new

    data.cache_salt = None  # type: ignore[union-attr]  # of requests made up to warm up
    data.from_request = classmethod(from_request)  # type: ignore[union-attr]


def _salts_are_passed_on() -> bool:
    scheduled, request = map(importlib.import_module, (SCHEDULED, REQUEST))
    of_request = parameters(request.Request.__init__)
    return SALT in of_request and hasattr(scheduled.NewRequestData, SALT)


def expect_checks() -> None:
    """For a worker with a store.

    Raises:
        ValueError: requests are not checked; one line.
    """
    if not sys.modules.keys() & {RUNNER, V2_RUNNER}:  # not in a vLLM worker
        return
    with contextlib.suppress(ImportError):
        if getattr(importlib.import_module("vllm.envs"), RUST_FRONT_END, False):
            raise ValueError(
                f"ngram_npu: store: expected vLLM's Python front end, got {RUST_FRONT_END}, which "
                "does not check requests: a cache_salt or a misspelt scope would be ignored"
            )
    found: Any = None
    with contextlib.suppress(ImportError, AttributeError):
        found = importlib.import_module(INPUT).InputProcessor.process_inputs
    if not hasattr(found, "ngram_npu"):
        raise ValueError(
            "ngram_npu: store: expected NGRAM_NPU_VLLM=1 and a vLLM whose requests can be checked "
            f"in {INPUT}: else a cache_salt or a misspelt scope would be ignored"
        )


def install_v1(module: Any) -> None:
    """Has the V1 runner, in ``module``, keep the salts of its requests."""
    runner = getattr(module, "GPUModelRunner", None)
    stock = getattr(runner, "_update_states", None)
    if inspect.isfunction(stock) and parameters(stock) == ["self", "scheduler_output"]:
        wrap(runner, "_update_states", _update_states)


def keeps_salts(runner: Any) -> bool:
    return hasattr(getattr(runner, "_update_states", None), "ngram_npu")


def _update_states(stock: Any, runner: Any, scheduler_output: Any) -> Any:
    """Of V1's ``GPUModelRunner``: makes the states of new requests."""
    found = stock(runner, scheduler_output)
    for new in scheduler_output.scheduled_new_reqs:
        runner.requests[new.req_id].cache_salt = getattr(new, SALT, None)
    return found
