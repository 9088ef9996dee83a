"""Serves the n-gram methods of vLLM and of vLLM-Ascend, when it is loaded as vLLM's plugin.

- vLLM's ``method="ngram"``, and ``"ngram_gpu"`` of its V1 runner: the runner looks up the stock
  classes in their modules when it makes a drafter and again when it calls it, so an assignment in
  that module is sufficient. It waits until vLLM imports the module: that imports numba, and vLLM's
  CPU worker (0.32.0) does not start if numba was imported before.
- The n-gram methods of the V2 runner: it imports the stock speculator's class when it makes one.
- N-gram drafts beside a neural drafter of the V2 runner: any speculator is made by one function,
  which gets the configuration and the state of the requests. It is wrapped.
- vLLM-Ascend: its V1 runner's module has the drafter classes and the launcher of the device lookup
  as globals, and a factory in another module makes the drafter; both places are replaced together.
  Its V2 runner derives from vLLM's, and is served as that is.

Each replacement is made only if what it replaces has the signatures this was written for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

from ngram_npu import _library
from ngram_npu.engines.vllm import admission, ascend, beside, v1_device, v2
from ngram_npu.engines.vllm.options import Method, method_of, read_options, wants_beside
from ngram_npu.engines.vllm.patching import (
    ASCEND_RUNNER,
    RUNNER,
    V2_RUNNER,
    after_import,
    installed,
    logger,
    one_line,
    parameters,
    put,
    refuse,
    serve,
    unlike,
    wrap,
)
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer

MODULE = "vllm.v1.spec_decode.ngram_proposer"
CLASS = "NgramProposer"
ASYNC_CLASS = "NgramProposerGPU"
TRIM = "update_scheduler_for_invalid_drafts"
COPY = "copy_num_valid_draft_tokens"

V2_MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
V2_CLASS = "NgramGPUSpeculator"
V2_FACTORY = "init_speculator"
CONFIG = "vllm.config.vllm"
V2_REFUSED = " for the V2 runner, which is left as it is"

ASCEND_FACTORY = "vllm_ascend.spec_decode"
ASCEND_HOST = "AscendNgramProposer"
ASCEND_DEVICE = "AscendNgramProposerNPU"
ASCEND_LAUNCHER = "triton_ngram_spec_decode"
ASCEND_V2_MODULE = "vllm_ascend.worker.v2.spec_decode.ngram"


def install() -> None:
    """Replaces the stock classes, now or when vLLM imports them, and logs one line for each:
    enabled, or why not. Never raises, because vLLM would not start; may be called again."""
    refused = f", vLLM is left as it is: this vLLM ({installed()}) is not supported"
    try:
        admission.install()
        if importlib.util.find_spec("vllm_ascend") is not None:
            # vLLM-Ascend has its own drafter classes; one of them derives from the stock class.
            install_ascend()
        elif MODULE not in sys.modules and importlib.util.find_spec(MODULE) is None:
            refuse(refused, f"it has no {MODULE}")
        else:
            serve(MODULE, _replace, "method 'ngram'", refused)
            after_import(RUNNER, _serve_async)
            install_v2()
            install_beside()
        after_import(CONFIG, _check_when_created)
    except Exception as error:
        refuse(refused, f"{MODULE} is not found: {one_line(error)}")


def _check_when_created(module: ModuleType) -> None:
    """Wraps the function that validates vLLM's configuration. It runs in the API's process, before
    an engine starts, so that an invalid option fails at once and not after the model is loaded."""
    wrap(getattr(module, "VllmConfig", None), "__post_init__", _check_options)


def _check_options(validate: Any, vllm_config: Any) -> None:
    validate(vllm_config)
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft, target = (getattr(speculative, f"{n}_model_config", None) for n in ("draft", "target"))
    is_drafts = model is draft is not target  # vLLM's n-gram methods have one for both
    if getattr(model, "is_submodel_config", False) or is_drafts:
        return  # derived from a configuration that has been checked
    method = method_of(vllm_config)
    if method is not None:
        platforms = importlib.import_module("vllm.platforms")
        read_options(vllm_config, method).check_device(
            method, platforms.current_platform.device_type
        )


def _replace(module: Any) -> str | None:
    bound = getattr(sys.modules.get(RUNNER), CLASS, None) is getattr(module, CLASS, None)
    doubt = f"{RUNNER} has bound {CLASS} already" if bound else ""
    return put(module, {CLASS: StockNgramProposer}, doubt)


def _serve_async(runner: ModuleType) -> None:
    wrap(getattr(runner, "GPUModelRunner", None), "__init__", _without_beside)
    admission.install_v1(runner)
    method = "method 'ngram_gpu' of the V1 runner"
    serve(RUNNER, _replace_async, method, f" for {method}, which is left as it is")
    v1_device.install_correction(runner, lambda module: module.current_platform.device_type)


def _replace_async(runner: Any) -> str | None:
    if getattr(runner, ASYNC_CLASS, None) is v1_device.AsyncNgramProposer:
        return None
    trim: Any = getattr(runner, TRIM, None)

    def unless_padded(num_valid_draft_tokens_event: Any, *args: Any, **kwargs: Any) -> None:
        if num_valid_draft_tokens_event is not None:
            trim(num_valid_draft_tokens_event, *args, **kwargs)

    ours = {ASYNC_CLASS: v1_device.AsyncNgramProposer, TRIM: unless_padded}
    return put(runner, ours, unlike(COPY, getattr(runner, COPY, None), _copy))


def _without_beside(init: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Logs one line if ``beside`` is asked for and an engine takes the V1 runner."""
    with contextlib.suppress(ValueError):  # what reads the options says what is wrong with them
        if wants_beside(vllm_config):
            logger.warning("ngram_npu: beside=True has no effect: this is the V1 runner")
    init(self, vllm_config, *args, **kwargs)


def _copy(*args: Any, num_valid_draft_tokens: Any, **kwargs: Any) -> None:
    """vLLM's function, which copies nothing if the count is None, as for padded drafts."""


def install_v2(module: str = V2_MODULE, name: str = V2_CLASS, method: Method = "v2") -> None:
    """As :func:`install`. Does nothing in a vLLM without the class."""

    def replace(module: Any) -> str | None:
        stock: Any = getattr(module, name, None)
        if not inspect.isclass(stock):
            return f"there is no class {name}"
        if issubclass(stock, v2.NgramSpeculator):
            return None
        ours = v2.in_place_of(stock, functools.partial(refuse, V2_REFUSED), method)
        found = put(module, {name: ours}, _conflict(name, stock, ours))
        if not found:
            tell_of_requests(sys.modules.get(V2_RUNNER))
        return found

    serve(module, replace, "n-gram methods of the V2 runner", V2_REFUSED)


def _conflict(name: str, stock: type, ours: type) -> str:
    """Why ``ours`` cannot derive from ``stock``, called ``name``: a method that neither implements,
    or a private member that both have; empty if it can."""
    for member in sorted(getattr(ours, "__abstractmethods__", ())):
        return f"{name}.{member} is abstract"
    for member in dir(stock):
        is_private = member.startswith("_") and not member.startswith("__")
        if is_private and hasattr(v2.NgramSpeculator, member):
            return f"{name} has {member}, which ngram_npu's class has for itself"
        is_property = isinstance(inspect.getattr_static(stock, member), property)
        if is_property and member in v2.ATTRIBUTES:
            return f"{name}.{member} is a property, which ngram_npu's class sets"
    return ""


def tell_of_requests(module: Any) -> None:
    """A speculator gets tensors only; scopes are in what the scheduler says of new requests.
    ``module`` is the runner's."""
    runner: Any = getattr(module, "GPUModelRunner", None)
    add_requests = getattr(runner, "add_requests", None)
    if add_requests is not None and parameters(add_requests) == ["self", "scheduler_output"]:
        wrap(runner, "add_requests", v2.add_requests)
        v2.RowLookup.sees_requests = True


def install_beside() -> None:
    """Wraps the runner's function, now or when vLLM imports the runner. Unless ``beside`` is set,
    it does then what it did before. Never raises; may be called again."""
    after_import(V2_RUNNER, lambda module: wrap(module, V2_FACTORY, _with_beside))


def _with_beside(stock: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    speculator = stock(vllm_config, *args, **kwargs)
    if not wants_beside(vllm_config):
        return speculator

    def attach(vllm_config: Any, device: Any, req_states: Any) -> str:
        options = read_options(vllm_config, "beside")
        if options.ngram.store is not None:
            tell_of_requests(sys.modules.get(V2_RUNNER))
        return beside.attach(vllm_config, options, device, req_states, speculator)

    doubt = unlike(V2_FACTORY, stock, attach) or attach(vllm_config, *args, **kwargs)
    if doubt:
        logger.warning(
            "ngram_npu: beside=True has no effect, the speculator is left as it is: %s", doubt
        )
    return speculator


def install_ascend() -> None:
    """Replaces the drafters now or when vLLM-Ascend imports its runner or its V2 speculator, and
    logs one line per method: enabled, or why not. Never raises; may be called again."""
    version = installed("vllm-ascend")

    def served(runner: Any) -> None:
        device = ASCEND_DEVICE, ASCEND_LAUNCHER
        for method, names in (("ngram", (ASCEND_HOST,)), ("ngram_gpu", device)):
            what = f"method {method!r}"
            replace = functools.partial(_replace_ascend, names=names)
            refused = f" for {what}, {version} is left as it is"
            serve(ASCEND_RUNNER, replace, f"{what} of vllm-ascend", refused)
        v1_device.install_correction(runner, lambda _: "npu")

    after_import(ASCEND_RUNNER, served)
    install_v2(ASCEND_V2_MODULE, "AscendNgramSpeculator", "ascend_v2")


def _replace_ascend(runner: Any, names: tuple[str, ...]) -> str | None:
    """The first of the names is the class that the factory makes."""
    factory, made, doubt = sys.modules[ASCEND_FACTORY], names[0], ""
    ours = {name: getattr(ascend, name) for name in names}
    if getattr(factory, made, None) is not getattr(runner, made, None):
        doubt = f"{ASCEND_FACTORY} makes another {made} than {ASCEND_RUNNER} knows"
    if ASCEND_LAUNCHER in names and not _library.has_kernel("ngram_step_", "npu"):
        doubt = f"no NPU kernels: {_library.backends()['npu'].reason}"
    found = put(runner, ours, doubt)
    if found == "":
        setattr(factory, made, ours[made])
    return found
