"""Contains vLLM's plugin, which replaces the n-gram methods of vLLM and of vLLM-Ascend.

The runners look up the stock classes in their modules when they create a drafter, so an assignment
in that module is sufficient. The assignment is made after vLLM has imported the module: the module
of ``"ngram"`` imports numba, and vLLM's CPU worker (0.32.0) does not start if numba was imported
before. Each replacement is made only if the stock signatures are those for which it was written.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from types import ModuleType
from typing import Any

from ngram_npu import _library
from ngram_npu.engines.vllm import (
    ascend,
    auto_k,
    neural,
    request_scopes,
    scheduler,
    v1,
    v2,
)
from ngram_npu.engines.vllm.metrics import serve_engine_metrics
from ngram_npu.engines.vllm.options import (
    CORRECTION,
    Method,
    find_method,
    has_options,
    read_neural_option,
    read_options,
)
from ngram_npu.engines.vllm.patching import (
    ASCEND_RUNNER,
    RUNNER,
    V2_RUNNER,
    find_installed_version,
    find_signature_mismatch,
    format_error,
    log_refusal,
    logger,
    parameter_names,
    replace_after_import,
    replace_attributes,
    run_after_import,
    wrap_function,
)
from ngram_npu.engines.vllm.shared_store import check_files

MODULE = "vllm.v1.spec_decode.ngram_proposer"
CLASS = "NgramProposer"
ASYNC_CLASS = "NgramProposerGPU"
TRIM_FUNCTION = "update_scheduler_for_invalid_drafts"
COPY_FUNCTION = "copy_num_valid_draft_tokens"
CORRECT_FUNCTION = "update_num_computed_tokens_for_batch_change"
CORRECTION_LABEL = "the correction of counts"

V2_MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
V2_CLASS = "NgramGPUSpeculator"
V2_FACTORY = "init_speculator"
CONFIG = "vllm.config.vllm"
V1_REFUSAL = " for method 'ngram_gpu' of the V1 runner, whose own class drafts"
V2_REFUSAL = " for the V2 runner, whose own speculator drafts"

ASCEND_FACTORY = "vllm_ascend.spec_decode"
ASCEND_HOST = "AscendNgramProposer"
ASCEND_DEVICE = "AscendNgramProposerNPU"
ASCEND_LAUNCHER = "triton_ngram_spec_decode"
ASCEND_V2_MODULE = "vllm_ascend.worker.v2.spec_decode.ngram"


def install() -> None:
    """Replaces the stock classes, now or when vLLM imports their modules, and logs one line for
    each
    class: enabled, or why not. Never raises, because vLLM would not start. May be called again."""
    refused = f", vLLM's own methods draft: this vLLM ({find_installed_version()}) is not supported"
    try:
        request_scopes.install()
        if importlib.util.find_spec("vllm_ascend") is not None:
            # One of vLLM-Ascend's own drafter classes derives from the stock class, so that stays.
            install_ascend()
        elif MODULE not in sys.modules and importlib.util.find_spec(MODULE) is None:
            log_refusal(refused, f"it has no {MODULE}")
        else:
            replace_after_import(MODULE, _replace_sync, "method 'ngram'", refused)
            run_after_import(RUNNER, _install_async)
            install_v2()
            install_neural()
        run_after_import(CONFIG, _install_option_check)
        scheduler.install()
        auto_k.install()
    except Exception as error:
        log_refusal(refused, f"{MODULE} is not found: {format_error(error)}")


def _install_option_check(module: ModuleType) -> None:
    # The wrapped function validates vLLM's configuration in the API's process, before an engine
    # starts. So an invalid option raises an error at once and not after the model is loaded.
    wrap_function(getattr(module, "VllmConfig", None), "__post_init__", _check_options)


def _check_options(validate: Any, vllm_config: Any) -> None:
    # With k="auto": draft lengths by batch size, from which vLLM derives the sizes of its graphs.
    auto_k.set_table(vllm_config)
    validate(vllm_config)
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    target = getattr(speculative, "target_model_config", None)
    is_draft_model = model is draft is not target  # n-gram methods use one object as both
    if getattr(model, "is_submodel_config", False) or is_draft_model:
        return  # this configuration is derived from one that has been checked
    method, stock = find_method(vllm_config), getattr(speculative, "method", None)
    if method is None:
        # A custom class of another name may derive from ours, and then reads the options.
        if stock != "custom_class" and has_options(vllm_config):
            in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
            _warn_about_unused_options(stock, "V2" if in_v2 else "V1")
        return
    serve_engine_metrics()
    device_type = importlib.import_module("vllm.platforms").current_platform.device_type
    options = read_options(vllm_config, method)
    check_files(options)
    # The replacements of the V2 runner's and of vLLM-Ascend's classes log this themselves.
    is_v1 = method == "ngram_gpu" and device_type != "npu"
    if is_v1 and (reason := explain_missing_kernels(device_type)):
        log_refusal(V1_REFUSAL, reason)


@functools.cache  # vLLM creates several configurations
def _warn_about_unused_options(method: str | None, runner: str) -> None:
    logger.warning(
        "ngram_npu: its options have no effect: expected method 'ngram' or 'ngram_gpu', or in the "
        "V2 runner neural=true with a neural drafter, got method %r in the %s runner",
        *(method, runner),
    )


def _replace_sync(module: Any) -> str | None:
    """Returns why nothing was replaced. Empty: replaced now. None: replaced before."""
    is_bound = getattr(sys.modules.get(RUNNER), CLASS, None) is getattr(module, CLASS, None)
    reason = f"{RUNNER} has bound {CLASS} already" if is_bound else ""
    return replace_attributes(module, {CLASS: v1.StockNgramProposer}, reason)


def _install_async(runner: ModuleType) -> None:
    v1.install(runner)
    replace_after_import(RUNNER, _replace_async, "method 'ngram_gpu' of the V1 runner", V1_REFUSAL)
    _install_correction(runner, lambda: runner.current_platform.device_type)


def _replace_async(runner: Any) -> str | None:
    if getattr(runner, ASYNC_CLASS, None) is v1.AsyncNgramProposer:
        return None
    trim: Any = getattr(runner, TRIM_FUNCTION, None)

    def trim_unless_padded(num_valid_draft_tokens_event: Any, *args: Any, **kwargs: Any) -> None:
        if num_valid_draft_tokens_event is not None:
            trim(num_valid_draft_tokens_event, *args, **kwargs)

    replacements = {ASYNC_CLASS: v1.AsyncNgramProposer, TRIM_FUNCTION: trim_unless_padded}
    copy = getattr(runner, COPY_FUNCTION, None)
    mismatch = find_signature_mismatch(COPY_FUNCTION, copy, _copy_counts)
    if explain_missing_kernels(runner.current_platform.device_type):
        return None  # _check_options logs it if the engine uses this method
    return replace_attributes(runner, replacements, mismatch)


def explain_missing_kernels(device_type: str) -> str:
    """Returns why nothing can be looked up on a device; empty if it can."""
    if _library.has_kernel("ngram_step_", device_type):
        return ""
    backend = _library.backends().get(device_type)
    return f"no kernels for {device_type}{f': {backend.reason}' if backend else ''}"


def _copy_counts(*args: Any, num_valid_draft_tokens: Any, **kwargs: Any) -> None:
    """Only its signature is used. vLLM's function accepts None as counts, as with padded drafts."""


def _install_correction(runner: ModuleType, find_device_type: Any) -> None:
    """Replaces the function in the runner's module if the environment asks for it, and logs one
    line. Never raises; may be called again."""

    def replace(runner: Any) -> str | None:
        device_type = find_device_type()
        has_kernel = _library.has_kernel("correct_num_computed_tokens_", device_type)
        reason = "" if has_kernel else f"there is no kernel for {device_type!r}"
        replacement = v1.update_num_computed_tokens_for_batch_change
        return replace_attributes(runner, {CORRECT_FUNCTION: replacement}, reason)

    refused = f" for {CORRECTION_LABEL}, which is left as it is"
    value = os.environ.get(CORRECTION, "0")
    if value not in ("0", "1"):
        log_refusal(refused, f"{CORRECTION}: expected 0 or 1, got {value!r}")
    elif value == "1":
        replace_after_import(runner.__name__, replace, CORRECTION_LABEL, refused, logging.INFO)


def install_v2(module: str = V2_MODULE, name: str = V2_CLASS, method: Method = "v2") -> None:
    """Replaces the class ``name`` of the V2 runner's speculator in ``module``, as :func:`install`
    does. Does nothing in a vLLM without the module."""

    def replace(module: Any) -> str | None:
        stock: Any = getattr(module, name, None)
        if not inspect.isclass(stock):
            return f"there is no class {name}"
        if issubclass(stock, v2.NgramSpeculator):
            return None
        refuse = functools.partial(log_refusal, V2_REFUSAL)
        replacement = v2.make_replacement(stock, refuse, method)
        reason = replace_attributes(
            module, {name: replacement}, _find_inheritance_conflict(name, stock, replacement)
        )
        if not reason:
            install_request_data(sys.modules.get(V2_RUNNER))
        return reason

    replace_after_import(module, replace, "n-gram methods of the V2 runner", V2_REFUSAL)


def _find_inheritance_conflict(name: str, stock: type, replacement: type) -> str:
    """Returns why ``replacement`` cannot derive from ``stock``, whose name is ``name``: neither
    class implements a method, or both have a private member of the same name. Empty if it can."""
    for member in sorted(getattr(replacement, "__abstractmethods__", ())):
        return f"{name}.{member} is abstract"
    for member in dir(stock):
        is_private = member.startswith("_") and not member.startswith("__")
        if is_private and hasattr(v2.NgramSpeculator, member):
            return f"{name} has {member}, which ngram_npu's class has too"
    return ""


def install_request_data(module: Any) -> None:
    """Makes the V2 runner in ``module`` pass the scheduler's data of new requests to its
    speculator, which otherwise gets only tensors. The data contains the scopes of the requests."""
    runner: Any = getattr(module, "GPUModelRunner", None)
    add_requests = getattr(runner, "add_requests", None)
    if add_requests is not None and parameter_names(add_requests) == ["self", "scheduler_output"]:
        wrap_function(runner, "add_requests", v2.add_requests)
        v2.RowDrafter.has_request_data = True


def install_neural() -> None:
    """Wraps the V2 runner's factory of speculators, now or when vLLM imports the runner. Without
    the option ``neural``, the factory works as before. Never raises; may be called again."""
    run_after_import(
        V2_RUNNER, lambda module: wrap_function(module, V2_FACTORY, _create_speculator)
    )


def _create_speculator(stock: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    speculator = stock(vllm_config, *args, **kwargs)
    if not read_neural_option(vllm_config):
        return speculator

    def attach(vllm_config: Any, device: Any, req_states: Any) -> str:
        options = read_options(vllm_config, "neural")
        install_request_data(sys.modules.get(V2_RUNNER))
        return neural.attach_ngram_drafts(vllm_config, options, device, req_states, speculator)

    reason = find_signature_mismatch(V2_FACTORY, stock, attach) or attach(
        vllm_config, *args, **kwargs
    )
    if reason:
        logger.warning(
            "ngram_npu: neural=True has no effect, the speculator is left as it is: %s", reason
        )
    return speculator


def install_ascend() -> None:
    """Replaces vLLM-Ascend's drafters, now or when its runner or its V2 speculator is imported, and
    logs one line per method: enabled, or why not. Never raises; may be called again."""
    version = find_installed_version("vllm-ascend")

    def install_runner(runner: Any) -> None:
        device = ASCEND_DEVICE, ASCEND_LAUNCHER
        for method, names in (("ngram", (ASCEND_HOST,)), ("ngram_gpu", device)):
            label = f"method {method!r}"
            replace = functools.partial(_replace_ascend, names=names)
            refused = f" for {label}, {version} is left as it is"
            replace_after_import(ASCEND_RUNNER, replace, f"{label} of vllm-ascend", refused)
        _install_correction(runner, lambda: "npu")

    run_after_import(RUNNER, v1.install)  # whose constructor vLLM-Ascend's runner calls
    run_after_import(ASCEND_RUNNER, install_runner)
    install_v2(ASCEND_V2_MODULE, "AscendNgramSpeculator", "ascend_v2")


def _replace_ascend(runner: Any, names: tuple[str, ...]) -> str | None:
    """Replaces the attributes ``names``. The first is the class that the factory creates."""
    factory, drafter, reason = sys.modules[ASCEND_FACTORY], names[0], ""
    replacements = {name: getattr(ascend, name) for name in names}
    if getattr(factory, drafter, None) is not getattr(runner, drafter, None):
        reason = f"{ASCEND_FACTORY} makes another {drafter} than {ASCEND_RUNNER} uses"
    if ASCEND_LAUNCHER in names and not _library.has_kernel("ngram_step_", "npu"):
        reason = f"no NPU kernels: {_library.backends()['npu'].reason}"
    result = replace_attributes(runner, replacements, reason)
    if result == "":  # replaced now
        setattr(factory, drafter, replacements[drafter])
    return result
