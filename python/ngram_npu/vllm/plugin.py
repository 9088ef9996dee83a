"""Serves vLLM's ``method="ngram"``: existing deployments keep their configuration.

The runner looks up the stock class in its module when it makes a drafter and again when it calls
it, so one assignment in that module is sufficient. It is made only if the stock class has the
signatures this was written for; otherwise vLLM is left as it is.

The stock module is not imported here: it imports numba, and vLLM's CPU worker (0.32.0) does not
start if numba was imported before. So the assignment waits until vLLM imports the module.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from ngram_npu.vllm import v1_plugin, v2_plugin
from ngram_npu.vllm.after_import import after_import, one_line, parameters, vllm_version
from ngram_npu.vllm.proposer import StockNgramProposer

logger = logging.getLogger("vllm.ngram_npu")

MODULE = "vllm.v1.spec_decode.ngram_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CLASS = "NgramProposer"


def install() -> None:
    """Replaces the stock class by :class:`StockNgramProposer`, now or when vLLM imports it, and
    logs one line: enabled, or why not.

    Never raises, because vLLM would not start; may be called again.
    """
    try:
        if importlib.util.find_spec("vllm_ascend") is not None:
            # vLLM-Ascend has its own drafter classes; one of them derives from the stock class.
            from ngram_npu.vllm import ascend_plugin

            ascend_plugin.install()
        elif MODULE not in sys.modules and importlib.util.find_spec(MODULE) is None:
            _refuse(f"it has no {MODULE}")
        else:
            after_import(MODULE, _replace)
            v1_plugin.install()
            v2_plugin.install()
    except Exception as error:
        _refuse(f"{MODULE} is not found: {one_line(error)}")


def _replace(module: ModuleType) -> None:
    stock = getattr(module, CLASS, None)
    if stock is StockNgramProposer:
        return
    try:
        doubt = _doubt(stock)
    except Exception as error:
        doubt = one_line(error)
    if doubt:
        _refuse(doubt)
        return
    setattr(module, CLASS, StockNgramProposer)
    logger.info("ngram_npu: enabled for method 'ngram' (NGRAM_NPU_VLLM=1)")


def _refuse(doubt: str) -> None:
    logger.warning(
        "ngram_npu: not enabled, vLLM is left as it is: this vLLM (%s) is not supported: %s",
        vllm_version(),
        doubt,
    )


def _doubt(stock: Any) -> str:
    """How this vLLM differs from those this was written for; empty if it does not."""
    if not inspect.isclass(stock):
        return f"{MODULE} has no class {CLASS}"
    for name in ("__init__", "propose", "load_model"):
        theirs = getattr(stock, name, None)
        if not inspect.isfunction(theirs):
            return f"{CLASS} has no {name}"
        found, ours = parameters(theirs), parameters(getattr(StockNgramProposer, name))
        if found != ours:
            return f"{CLASS}.{name} takes ({', '.join(found)}), expected ({', '.join(ours)})"
    if getattr(sys.modules.get(RUNNER), CLASS, None) is stock:
        return f"{RUNNER} has bound {CLASS} already"
    return ""
