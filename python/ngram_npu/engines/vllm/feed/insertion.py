"""Inserts the text of other engines into the store of a rank, in the order of its steps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ngram_npu.engines.vllm.patching import (
    RUNNER,
    find_argument,
    is_wrapped,
    parameter_names,
    wrap_function,
)
from ngram_npu.engines.vllm.ranks import exit_worker_on_error
from ngram_npu.store.contents import BLOCK_TOKENS

ATTRIBUTE = "ngram_npu_texts"
"""Attribute of a ``SchedulerOutput`` with the pieces of text for a step: the scope of each, and its
int32 tokens as bytes, because pickling arrays takes ten times as long."""


def insert_texts(drafter: Any, scheduler_output: Any) -> None:
    """Inserts the text that the scheduler added to its output, if any, into a drafter's store.
    Called before each step."""
    texts = getattr(scheduler_output, ATTRIBUTE, ())
    if texts and getattr(drafter, "shared_store", None) is not None:
        _insert(drafter, texts)


@exit_worker_on_error
def _insert(drafter: Any, texts: Sequence[tuple[int, bytes]]) -> None:
    store = drafter.shared_store.contents
    for scope, tokens in texts:
        store.begin_step(1, BLOCK_TOKENS)
        store.add_text(np.frombuffer(tokens, np.int32).copy(), scope)


def init_v1(stock: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the constructor of V1's ``GPUModelRunner``. Replaces ``execute_model`` of the instance,
    because a subclass may override the function without a call of the one that it overrides.
    ``_update_states``, which is wrapped for salts, may get a copy of the output without the text.
    """
    stock(runner, *args, **kwargs)
    execute_model = runner.execute_model

    def insert_and_execute(*args: Any, **kwargs: Any) -> Any:
        output = find_argument(args, kwargs, 0, "scheduler_output")
        insert_texts(getattr(getattr(runner, "drafter", None), "ngram_npu", None), output)
        return execute_model(*args, **kwargs)

    runner.execute_model = insert_and_execute


def install_v1(module: Any) -> None:
    """Makes the V1 runner in ``module`` insert text before each step."""
    runner = getattr(module, "GPUModelRunner", None)
    stock = getattr(runner, "execute_model", None)
    if inspect.isfunction(stock) and parameter_names(stock)[:2] == ["self", "scheduler_output"]:
        wrap_function(runner, "__init__", init_v1)


def require_wrapped_runner() -> None:
    """Raises ValueError if the plugin has not wrapped the V1 runner of this process."""
    runner = getattr(sys.modules.get(RUNNER), "GPUModelRunner", None)
    if runner is not None and not is_wrapped(runner.__init__, init_v1):
        raise ValueError(
            "ngram_npu: store_feed: expected NGRAM_NPU_VLLM=1 and a V1 runner whose "
            "execute_model ngram_npu can wrap; this one is not wrapped"
        )
