"""Serves vLLM's ``method="ngram"``, and ``"ngram_gpu"`` of its V1 runner.

The runner looks up the stock classes in their modules when it makes a drafter and again when it
calls it, so an assignment in that module is sufficient. It is made only if what it replaces has the
signatures this was written for. It waits until vLLM imports the module: that imports numba, and
vLLM's CPU worker (0.32.0) does not start if numba was imported before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

from ngram_npu.vllm import correction, v2_plugin
from ngram_npu.vllm.after_import import (
    after_import,
    class_unlike,
    installed,
    logger,
    one_line,
    refuse,
    serve,
    unlike,
)
from ngram_npu.vllm.options import wants_beside
from ngram_npu.vllm.proposer import StockNgramProposer

MODULE = "vllm.v1.spec_decode.ngram_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CLASS = "NgramProposer"
ASYNC_CLASS = "NgramProposerGPU"
TRIM = "update_scheduler_for_invalid_drafts"
COPY = "copy_num_valid_draft_tokens"


def install() -> None:
    """Replaces the stock classes, now or when vLLM imports them, and logs one line for each:
    enabled, or why not. Never raises, because vLLM would not start; may be called again."""
    refused = f", vLLM is left as it is: this vLLM ({installed()}) is not supported"
    try:
        if importlib.util.find_spec("vllm_ascend") is not None:
            # vLLM-Ascend has its own drafter classes; one of them derives from the stock class.
            from ngram_npu.vllm import ascend_plugin

            ascend_plugin.install()
        elif MODULE not in sys.modules and importlib.util.find_spec(MODULE) is None:
            refuse(refused, f"it has no {MODULE}")
        else:
            serve(MODULE, _replace, "method 'ngram'", refused)
            after_import(RUNNER, _serve_async)
            v2_plugin.install()
            v2_plugin.install_beside()
    except Exception as error:
        refuse(refused, f"{MODULE} is not found: {one_line(error)}")


def _replace(module: Any) -> str | None:
    stock = getattr(module, CLASS, None)
    if stock is StockNgramProposer:
        return None
    methods = ("__init__", "propose", "load_model")
    doubt = class_unlike(f"{MODULE}.{CLASS}", stock, StockNgramProposer, methods)
    if not doubt and getattr(sys.modules.get(RUNNER), CLASS, None) is stock:
        doubt = f"{RUNNER} has bound {CLASS} already"
    if not doubt:
        setattr(module, CLASS, StockNgramProposer)
    return doubt


def _serve_async(runner: ModuleType) -> None:
    method = "method 'ngram_gpu' of the V1 runner"
    serve(RUNNER, _replace_async, method, f" for {method}, which is left as it is")
    correction.install(runner, lambda module: module.current_platform.device_type)


def _replace_async(runner: Any) -> str | None:
    from ngram_npu.vllm import v1

    _tell_of_beside(getattr(runner, "GPUModelRunner", None))
    stock: Any = getattr(runner, ASYNC_CLASS, None)
    trim: Any = getattr(runner, TRIM, None)
    if stock is v1.AsyncNgramProposer:
        return None
    ours, own_trim = v1.AsyncNgramProposer, v1.unless_padded(trim)
    methods = ("__init__", "load_model", "update_token_ids_ngram", "propose")
    doubt = (
        class_unlike(f"{RUNNER}.{ASYNC_CLASS}", stock, ours, methods)
        or unlike(TRIM, trim, own_trim)
        or unlike(COPY, getattr(runner, COPY, None), _copy)
    )
    if not doubt:
        setattr(runner, ASYNC_CLASS, ours)
        setattr(runner, TRIM, own_trim)
    return doubt


def _tell_of_beside(runner: Any) -> None:
    """Logs one line if ``beside`` is asked for and an engine takes the V1 runner."""
    stock = getattr(runner, "__init__", None)
    if not inspect.isfunction(stock) or hasattr(stock, "beside"):
        return

    @functools.wraps(stock)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ValueError):  # what reads the options says what is wrong with them
            if wants_beside(vllm_config):
                logger.warning("ngram_npu: beside=True has no effect: this is the V1 runner")
        stock(self, vllm_config, *args, **kwargs)

    init.beside = True  # type: ignore[attr-defined]
    runner.__init__ = init


def _copy(
    num_valid_draft_tokens_cpu: Any,
    num_valid_draft_tokens_copy_stream: Any,
    num_valid_draft_tokens_event: Any,
    num_valid_draft_tokens: Any,
    batch_size: int,
) -> None:
    """vLLM's function, which copies nothing if the count is None, as for padded drafts."""
