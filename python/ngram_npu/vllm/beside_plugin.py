"""N-gram drafts put beside a neural drafter of vLLM's V2 runner, where they are asked for.

The runner makes its speculator by one function, which gets the configuration and the state of the
requests: that is what is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ngram_npu.vllm.after_import import after_import, parameters
from ngram_npu.vllm.options import read_options, wants_beside
from ngram_npu.vllm.v2_plugin import RUNNER, tell_of_requests

logger = logging.getLogger("vllm.ngram_npu")

FUNCTION = "init_speculator"
PARAMETERS = ["vllm_config", "device", "req_states"]


def install() -> None:
    """Wraps the runner's function, now or when vLLM imports the runner. Unless ``beside`` is set,
    it does then what it did before. Never raises; may be called again."""
    after_import(RUNNER, _wrap)


def _wrap(module: ModuleType) -> None:
    stock: Any = getattr(module, FUNCTION, None)
    if inspect.isfunction(stock) and not hasattr(stock, "beside"):
        wrapped = _beside(stock, module)
        wrapped.beside = True  # type: ignore[attr-defined]
        setattr(module, FUNCTION, wrapped)


def _beside(init_speculator: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(init_speculator)
    def init(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        speculator = init_speculator(vllm_config, *args, **kwargs)
        if wants_beside(vllm_config):
            found = parameters(init_speculator)
            if found == PARAMETERS:
                given = inspect.signature(init_speculator).bind(vllm_config, *args, **kwargs)
                doubt = _attach(module, speculator, **given.arguments)
            else:
                expected = ", ".join(PARAMETERS)
                doubt = f"{FUNCTION} takes ({', '.join(found)}), expected ({expected})"
            if doubt:
                logger.warning(
                    "ngram_npu: beside=True has no effect, the speculator is left as it is: %s",
                    doubt,
                )
        return speculator

    return init


def _attach(
    module: ModuleType, speculator: Any, vllm_config: Any, device: Any, req_states: Any
) -> str:
    from ngram_npu.vllm import v2_beside

    options = read_options(vllm_config, "beside")
    if options.ngram.store is not None:
        tell_of_requests(module)
    return v2_beside.attach(vllm_config, options, device, req_states, speculator)
