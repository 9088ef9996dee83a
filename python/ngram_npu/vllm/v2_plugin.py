"""Serves the n-gram methods of vLLM's V2 runner and of vLLM-Ascend's, and n-gram drafts beside a
neural drafter of vLLM's.

The runner imports the stock speculator's class when it makes one, so one assignment in its module
is sufficient. It is made only if the stock class is the one this was written for. Any speculator is
made by one function, which gets the configuration and the state of the requests: it is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from ngram_npu.vllm.after_import import (
    after_import,
    class_unlike,
    logger,
    parameters,
    refuse,
    serve,
    unlike,
)
from ngram_npu.vllm.options import Method, read_options, wants_beside

MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
CLASS = "NgramGPUSpeculator"
RUNNER = "vllm.v1.worker.gpu.model_runner"
FUNCTION = "init_speculator"
REFUSED = " for the V2 runner, which is left as it is"


def install(module: str = MODULE, name: str = CLASS, method: Method = "v2") -> None:
    """As :func:`ngram_npu.vllm.plugin.install`. Does nothing in a vLLM without the class."""
    replace = functools.partial(_replace, name=name, method=method)
    serve(module, replace, "n-gram methods of the V2 runner", REFUSED)


def _replace(module: Any, name: str, method: Method) -> str | None:
    from ngram_npu.vllm import v2

    stock: Any = getattr(module, name, None)
    if inspect.isclass(stock) and issubclass(stock, v2.NgramSpeculator):
        return None
    methods = ("__init__", "init_cudagraph_manager", "capture", "propose")
    doubt = class_unlike(f"{module.__name__}.{name}", stock, v2.NgramSpeculator, methods)
    public = {other for other in dir(stock) if not other.startswith("_")}
    if not doubt and (lacking := public - set(dir(v2.NgramSpeculator))):
        doubt = f"{name} has {', '.join(sorted(lacking))}, which ngram_npu's class lacks"
    if not doubt:
        setattr(module, name, v2.in_place_of(stock, functools.partial(refuse, REFUSED), method))
        tell_of_requests(sys.modules.get(RUNNER))
    return doubt


def tell_of_requests(module: Any) -> None:
    """A speculator gets tensors only; scopes are in what the scheduler says of new requests.
    ``module`` is the runner's."""
    from ngram_npu.vllm.row_lookup import RowLookup, telling

    runner: Any = getattr(module, "GPUModelRunner", None)
    add_requests = getattr(runner, "add_requests", None)
    if not inspect.isfunction(add_requests) or RowLookup.sees_requests:
        return
    if parameters(add_requests) == ["self", "scheduler_output"]:
        runner.add_requests = telling(add_requests)
        RowLookup.sees_requests = True


def install_beside() -> None:
    """Wraps the runner's function, now or when vLLM imports the runner. Unless ``beside`` is set,
    it does then what it did before. Never raises; may be called again."""
    after_import(RUNNER, _wrap)


def _wrap(module: Any) -> None:
    stock: Any = getattr(module, FUNCTION, None)
    if not inspect.isfunction(stock) or hasattr(stock, "beside"):
        return

    @functools.wraps(stock)
    def init(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        speculator = stock(vllm_config, *args, **kwargs)
        if not wants_beside(vllm_config):
            return speculator

        def attach(vllm_config: Any, device: Any, req_states: Any) -> str:
            from ngram_npu.vllm import v2_beside

            options = read_options(vllm_config, "beside")
            if options.ngram.store is not None:
                tell_of_requests(module)
            return v2_beside.attach(vllm_config, options, device, req_states, speculator)

        doubt = unlike(FUNCTION, stock, attach) or attach(vllm_config, *args, **kwargs)
        if doubt:
            logger.warning(
                "ngram_npu: beside=True has no effect, the speculator is left as it is: %s", doubt
            )
        return speculator

    init.beside = True  # type: ignore[attr-defined]
    setattr(module, FUNCTION, init)
