"""Serves ``method="ngram_gpu"`` of vLLM's V1 runner.

The runner's module has the stock class and the function that trims drafts as globals, and looks
them up at each call. Both are replaced after the module has been imported, if they have the
signatures this was written for; otherwise vLLM is left as it is.
"""

from __future__ import annotations

import inspect
import logging
from types import ModuleType
from typing import Any

from ngram_npu.vllm.after_import import after_import, difference, one_line

logger = logging.getLogger("vllm.ngram_npu")

RUNNER = "vllm.v1.worker.gpu_model_runner"
CLASS = "NgramProposerGPU"
TRIM = "update_scheduler_for_invalid_drafts"
COPY = "copy_num_valid_draft_tokens"


def install() -> None:
    """Replaces both now or when vLLM imports its runner, and logs one line: enabled, or why not.
    Never raises; may be called again."""
    after_import(RUNNER, _replace)


def _replace(runner: ModuleType) -> None:
    try:
        from ngram_npu.vllm import v1

        stock = getattr(runner, CLASS, None)
        if stock is v1.AsyncNgramProposer:
            return
        trim = getattr(runner, TRIM, None)
        doubt = _doubt(stock, trim, getattr(runner, COPY, None))
        if not doubt:
            assert trim is not None
            setattr(runner, CLASS, v1.AsyncNgramProposer)
            setattr(runner, TRIM, v1.unless_padded(trim))
    except Exception as error:
        doubt = one_line(error)
    if doubt:
        logger.warning(
            "ngram_npu: not enabled for method 'ngram_gpu' of the V1 runner, which is left as it "
            "is: %s",
            doubt,
        )
    else:
        logger.info("ngram_npu: enabled for method 'ngram_gpu' of the V1 runner (NGRAM_NPU_VLLM=1)")


def _doubt(stock: Any, trim: Any, copy: Any) -> str:
    """How this vLLM differs from those this was written for; empty if it does not."""
    from ngram_npu.vllm import v1

    if not inspect.isclass(stock):
        return f"{RUNNER} has no class {CLASS}"
    own: Any = v1.AsyncNgramProposer
    for method in ("__init__", "load_model", "update_token_ids_ngram", "propose"):
        doubt = difference(f"{CLASS}.{method}", getattr(stock, method, None), getattr(own, method))
        if doubt:
            return doubt
    return difference(TRIM, trim, v1.unless_padded(trim)) or difference(COPY, copy, _copy)


def _copy(
    num_valid_draft_tokens_cpu: Any,
    num_valid_draft_tokens_copy_stream: Any,
    num_valid_draft_tokens_event: Any,
    num_valid_draft_tokens: Any,
    batch_size: int,
) -> None:
    """vLLM's function, which copies nothing if the count is None, as for padded drafts."""
