"""Wraps vLLM's scheduler, for the draft length by load, the drafting switch and fed text.

Functions of the scheduler's instance are replaced, because subclasses of vLLM's scheduler may
override those of its class. All ranks receive what is scheduled, so none of this changes text.

Drafting is switched off and on while an engine runs, with ``collective_rpc``. The engine's own
process answers the call between two steps, so workers need no extension. While drafting is off, the
scheduler drops the drafts of every step before they are verified. The store still receives the text
of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ngram_npu.engines.vllm.auto_k import StepObserver, make_observer, turn_off
from ngram_npu.engines.vllm.metrics import set_drafting_gauge
from ngram_npu.engines.vllm.options import Options, find_method, read_options
from ngram_npu.engines.vllm.patching import (
    SCHEDULER,
    find_argument,
    format_error,
    logger,
    run_after_import,
    wrap_function,
)

CORE = "vllm.v1.engine.core"
METHOD = "ngram_npu_set_drafting"
ATTRIBUTE = "ngram_npu"
"""Attribute of a scheduler that holds its :class:`SchedulerHooks`."""


def install() -> None:
    """Wraps vLLM's engine core and scheduler, now or when vLLM imports them. May be called
    again."""
    run_after_import(CORE, _wrap_core)
    run_after_import(SCHEDULER, _wrap_scheduler)


def _wrap_core(module: Any) -> None:
    wrap_function(getattr(module, "EngineCore", None), "collective_rpc", _collective_rpc)


def _wrap_scheduler(module: Any) -> None:
    wrap_function(getattr(module, "Scheduler", None), "__init__", _init)


def _init(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    stock(scheduler, *args, **kwargs)
    if find_method(scheduler.vllm_config) is not None:
        setattr(scheduler, ATTRIBUTE, SchedulerHooks(scheduler))


class SchedulerHooks:
    """Replaces functions of a scheduler for which ngram_npu drafts."""

    def __init__(self, scheduler: Any) -> None:
        vllm_config = scheduler.vllm_config
        method = find_method(vllm_config)
        assert method is not None
        options = read_options(vllm_config, method)
        self._scheduler = scheduler
        self.is_drafting = True
        self.observer: StepObserver | None = make_observer(scheduler, options)
        self.feed = _start_feed(vllm_config, options)
        parallel = vllm_config.parallel_config
        sizes = (
            getattr(parallel, name, 1) for name in ("data_parallel_size", "pipeline_parallel_size")
        )
        in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
        self._skips_lookups = in_v2 and all(size == 1 for size in sizes)
        """Whether steps without drafts look up nothing: data-parallel engines must schedule the
        same number of draft tokens."""
        for name in ("schedule", "update_draft_token_ids", "update_from_output", "shutdown"):
            if hasattr(scheduler, name):
                setattr(self, f"_stock_{name}", getattr(scheduler, name))
                setattr(scheduler, name, getattr(self, name))
        set_drafting_gauge(vllm_config, True)

    _stock_schedule: Callable[..., Any]
    _stock_update_draft_token_ids: Callable[..., Any]
    _stock_update_from_output: Callable[..., Any]
    _stock_shutdown: Callable[..., Any]

    def set_drafting(self, enabled: bool) -> None:
        """Switches drafting on or off, from the next step on."""
        self.is_drafting = enabled
        set_drafting_gauge(self._scheduler.vllm_config, enabled)
        logger.info("ngram_npu: drafting is %s", "on" if enabled else "off")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._stock_schedule(*args, **kwargs)
        if not self.is_drafting:
            self._drop_drafts()  # an asynchronous scheduler has set placeholders for them
            if self._skips_lookups:
                output.num_spec_tokens_to_schedule = 0
        if self.observer is not None:  # after the switch, so that it sees the step that is executed
            observe = self.observer.observe_schedule
            self._call_observer(lambda: observe(output))
        if self.feed is not None and self.feed.ready:
            self.feed.add_texts(output)
        return output

    def update_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        result = self._stock_update_draft_token_ids(*args, **kwargs)
        if not self.is_drafting:
            self._drop_drafts()
        return result

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        if (observer := self.observer) is not None:

            def observe() -> None:
                output = find_argument(args, kwargs, 0, "scheduler_output")
                results = find_argument(args, kwargs, 1, "model_runner_output")
                observer.observe_update(output, results)

            self._call_observer(observe)
        return self._stock_update_from_output(*args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        if self.feed is not None:
            self.feed.close()
        return self._stock_shutdown(*args, **kwargs)

    def _drop_drafts(self) -> None:
        for request in self._scheduler.running:
            if request.spec_token_ids:
                request.spec_token_ids = []

    def _call_observer(self, call: Callable[[], None]) -> None:
        """An error turns off k='auto', but not the engine."""
        try:
            call()
        except Exception as error:
            self.observer = None
            turn_off(self._scheduler, error)


def _start_feed(vllm_config: Any, options: Options) -> Any:
    """Returns the reader of the option ``store_feed``; None without it, and after an error, because
    an engine works without other engines' text."""
    if not options.store_feed:
        return None
    try:
        # Needs packages that vLLM requires.
        from ngram_npu.engines.vllm.feed.reader import FeedReader

        feed = FeedReader(vllm_config, options)
        feed.start()
    except Exception as error:
        logger.error("ngram_npu: store_feed is off: %s", format_error(error))
        return None
    return feed


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
    hooks: SchedulerHooks | None = getattr(scheduler, ATTRIBUTE, None)
    if hooks is None:
        raise ValueError(f"ngram_npu: {METHOD}: expected an engine for which ngram_npu drafts")
    hooks.set_drafting(enabled)
    return {"drafting": enabled}
