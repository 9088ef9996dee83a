"""Limits the draft tokens of single requests to the value ``ngram_npu_k`` of their ``extra_args``.

vLLM's scheduler keeps a request's draft tokens, or placeholders for the tokens, until it schedules
the request again. This module truncates the list of these tokens, so the step verifies fewer
tokens, whichever process or device drafts. The drafter does not know the limit: it looks up the
request's n-grams in any case.
"""

from __future__ import annotations

from typing import Any

from ngram_npu.config import MAX_DRAFT_TOKENS
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENTS, K_ARGUMENT, find_method
from ngram_npu.engines.vllm.patching import (
    SCHEDULER,
    find_argument,
    is_wrapped,
    run_after_import,
    wrap_function,
)

ATTRIBUTE = "ngram_npu_limits"
"""Attribute of a scheduler that maps the ids of requests with a limit to their limits."""


def install() -> None:
    """Wraps vLLM's scheduler, now or when vLLM imports it. May be called again."""
    run_after_import(SCHEDULER, _wrap_scheduler)


def check_limit(request: Any, vllm_config: Any) -> None:
    """Checks the limit of a request where vLLM admits it.

    Raises:
        ValueError: The limit is malformed, or this engine does not support limits.
    """
    value = _get_limit_argument(request)
    if value is None:
        return
    name = f"ngram_npu: {K_ARGUMENT} in {EXTRA_ARGUMENTS}"
    largest_limit = _find_largest_limit(vllm_config)
    if largest_limit is None:
        raise ValueError(
            f"{name}: expected none, got {value!r}: this engine cannot draft less for one request; "
            "the V1 runner with an n-gram method, and adaptive verification in the V2 runner, can"
        )
    if _parse_limit(value, largest_limit) is None:
        raise ValueError(f"{name}: expected an integer from 0 to {largest_limit}, got {value!r}")


def _get_limit_argument(request: Any) -> Any:
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(K_ARGUMENT)


def _find_largest_limit(vllm_config: Any) -> int | None:
    """Returns the largest limit that the engine's requests may have; None if they may have none.

    Without speculation the largest limit is 0. The V2 runner verifies the same number of tokens of
    every request unless its verification is adaptive.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 0
    in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    is_adaptive = getattr(speculative, "enable_adaptive_verification", False)
    if find_method(vllm_config) is None or (in_v2 and not is_adaptive):
        return None
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    has_wrappers = all(
        is_wrapped(getattr(scheduler, name, None), wrapper) for name, wrapper in _WRAPPERS.items()
    )
    return int(speculative.num_speculative_tokens) if has_wrappers else None


def _parse_limit(value: Any, largest_limit: int) -> int | None:
    """Returns a limit from 0 to `largest_limit` that is given as a number or as decimal digits;
    None for any other value."""
    if isinstance(value, bool):
        return None
    return next((limit for limit in range(largest_limit + 1) if value in (limit, str(limit))), None)


def _wrap_scheduler(module: Any) -> None:
    scheduler = getattr(module, "Scheduler", None)
    for name, wrapper in _WRAPPERS.items():
        wrap_function(scheduler, name, wrapper)


def _add_request(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Stores the limit of a request, or of the newest part of a request with several parts."""
    result = stock(scheduler, *args, **kwargs)
    request = find_argument(args, kwargs, 0, "request")
    limit = _parse_limit(_get_limit_argument(request), MAX_DRAFT_TOKENS)
    limits = vars(scheduler).setdefault(ATTRIBUTE, {})
    limits.pop(request.request_id, None)
    if limit is not None:
        limits[request.request_id] = limit
    return result


def _schedule(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    # An asynchronous scheduler has set placeholders for the next step's drafts.
    output = stock(scheduler, *args, **kwargs)
    _truncate_drafts(scheduler)
    return output


def _update_draft_token_ids(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    # A synchronous scheduler has received the next step's drafts.
    result = stock(scheduler, *args, **kwargs)
    _truncate_drafts(scheduler)
    return result


def _truncate_drafts(scheduler: Any) -> None:
    limits: dict[str, int] = getattr(scheduler, ATTRIBUTE, {})
    for request_id, limit in list(limits.items()):
        request = scheduler.requests.get(request_id)
        if request is None:
            del limits[request_id]
        elif len(request.spec_token_ids) > limit:
            request.spec_token_ids = request.spec_token_ids[:limit]  # requests share placeholders


_WRAPPERS = {
    "add_request": _add_request,
    "schedule": _schedule,
    "update_draft_token_ids": _update_draft_token_ids,
}
