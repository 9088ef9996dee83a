"""Serves the n-gram methods of vLLM's V2 runner.

The runner imports the stock speculator's class when it makes one, for ``ngram`` and ``ngram_gpu``,
so one assignment in its module is sufficient. It is made only if the stock class is the one this
was written for; otherwise vLLM is left as it is.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from ngram_npu.vllm.after_import import after_import, agree, one_line, parameters

logger = logging.getLogger("vllm.ngram_npu")

MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
CLASS = "NgramGPUSpeculator"
RUNNER = "vllm.v1.worker.gpu.model_runner"
RUNNER_CLASS = "GPUModelRunner"


def install() -> None:
    """Replaces the stock class now or when vLLM imports it, and logs one line: enabled, or why not.
    Does nothing in a vLLM without it. Never raises; may be called again."""
    after_import(MODULE, _replace)


def _replace(module: ModuleType) -> None:
    try:
        from ngram_npu.vllm import v2

        stock: Any = getattr(module, CLASS, None)
        if inspect.isclass(stock) and issubclass(stock, v2.NgramSpeculator):
            return
        doubt = _doubt(stock, v2.NgramSpeculator)
        if not doubt:
            setattr(module, CLASS, v2.in_place_of(stock, _refuse))
            tell_of_requests(sys.modules.get(RUNNER))
    except Exception as error:
        doubt = one_line(error)
    if doubt:
        _refuse(doubt)
    else:
        logger.info("ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)")


def tell_of_requests(module: ModuleType | None) -> None:
    """A speculator gets tensors only; scopes are in what the scheduler says of new requests.
    ``module`` is the runner's."""
    from ngram_npu.vllm.row_lookup import RowLookup, telling

    runner = getattr(module, RUNNER_CLASS, None)
    add_requests = getattr(runner, "add_requests", None)
    if not inspect.isfunction(add_requests) or RowLookup.sees_requests:
        return
    if parameters(add_requests) == ["self", "scheduler_output"]:
        runner.add_requests = telling(add_requests)  # type: ignore[union-attr]
        RowLookup.sees_requests = True


def _refuse(doubt: str) -> None:
    logger.warning("ngram_npu: not enabled for the V2 runner, which is left as it is: %s", doubt)


def _doubt(stock: Any, ours: type) -> str:
    """How this vLLM differs from those this was written for; empty if it does not."""
    if not inspect.isclass(stock):
        return f"{MODULE} has no class {CLASS}"
    lacking = {name for name in dir(stock) if not name.startswith("_")} - set(dir(ours))
    if lacking:
        return f"{CLASS} has {', '.join(sorted(lacking))}, which ngram_npu's class lacks"
    for name in ("__init__", "init_cudagraph_manager", "capture", "propose"):
        theirs = getattr(stock, name, None)
        if not inspect.isfunction(theirs):
            return f"{CLASS} has no {name}"
        found, expected = parameters(theirs), parameters(getattr(ours, name))
        if not agree(found, expected):
            return f"{CLASS}.{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
    return ""
