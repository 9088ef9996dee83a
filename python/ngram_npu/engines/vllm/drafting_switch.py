"""Switches drafting off and on while an engine runs, with ``collective_rpc``.

The engine's own process answers the call between two steps, so workers need no extension. While
drafting is off, the scheduler drops the drafts of every step before they are verified. Text does
not change, because every rank receives the same scheduled drafts. The index and the store still
receive the text of each step.
"""

from __future__ import annotations

from typing import Any

from ngram_npu.engines.vllm.metrics import set_drafting_gauge
from ngram_npu.engines.vllm.options import find_method
from ngram_npu.engines.vllm.patching import SCHEDULER, logger, run_after_import, wrap_function

CORE = "vllm.v1.engine.core"
METHOD = "ngram_npu_set_drafting"
ATTRIBUTE = "ngram_npu_drafting_off"
"""Attribute of a scheduler: whether drafting is off."""


def install() -> None:
    """Wraps vLLM's engine core and scheduler, now or when vLLM imports them. May be called
    again."""
    run_after_import(CORE, _wrap_core)
    run_after_import(SCHEDULER, _wrap_scheduler)


def _wrap_core(module: Any) -> None:
    wrap_function(getattr(module, "EngineCore", None), "collective_rpc", _collective_rpc)


def _wrap_scheduler(module: Any) -> None:
    scheduler = getattr(module, "Scheduler", None)
    wrap_function(scheduler, "__init__", _init)
    wrap_function(scheduler, "schedule", _schedule)
    wrap_function(scheduler, "update_draft_token_ids", _update_draft_token_ids)


def _init(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    stock(scheduler, *args, **kwargs)
    if find_method(scheduler.vllm_config) is not None:
        set_drafting_gauge(scheduler.vllm_config, True)


def _collective_rpc(
    stock: Any,
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if method != METHOD:
        return stock(core, method, timeout, args, kwargs)
    return [set_drafting(core.scheduler, *args, **(kwargs or {}))]


def set_drafting(scheduler: Any, enabled: Any) -> dict[str, bool]:
    """Switches drafting of an engine on or off, from the next step on.

    Returns:
        ``{"drafting": enabled}``.

    Raises:
        ValueError: ``enabled`` is not a bool, or ngram_npu does not draft for this engine.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"ngram_npu: {METHOD}: expected true or false, got {enabled!r}")
    if find_method(scheduler.vllm_config) is None:
        raise ValueError(f"ngram_npu: {METHOD}: expected an engine for which ngram_npu drafts")
    setattr(scheduler, ATTRIBUTE, not enabled)
    set_drafting_gauge(scheduler.vllm_config, enabled)
    logger.info("ngram_npu: drafting is %s", "on" if enabled else "off")
    return {"drafting": enabled}


def _schedule(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = stock(scheduler, *args, **kwargs)
    if getattr(scheduler, ATTRIBUTE, False):
        _drop_drafts(scheduler)  # an asynchronous scheduler has set placeholders for them
        vllm_config = scheduler.vllm_config
        parallel = vllm_config.parallel_config
        is_single = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        # The V2 runner then looks up nothing. Data-parallel engines must schedule the same number.
        if is_single and getattr(vllm_config, "use_v2_model_runner", False):
            output.num_spec_tokens_to_schedule = 0
    return output


def _update_draft_token_ids(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result = stock(scheduler, *args, **kwargs)
    if getattr(scheduler, ATTRIBUTE, False):
        _drop_drafts(scheduler)
    return result


def _drop_drafts(scheduler: Any) -> None:
    for request in scheduler.running:
        if request.spec_token_ids:
            request.spec_token_ids = []
