"""Tests the request key ``ngram_npu_k``: which requests are rejected, and how the wrapped scheduler
truncates drafts."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import fake_engine
import pytest
from fake_engine import K
from ngram_npu.engines.vllm import request_limits
from ngram_npu.engines.vllm.options import K_ARGUMENT
from ngram_npu.engines.vllm.patching import SCHEDULER

PLACEHOLDERS = [-1] * K


class FakeScheduler:
    """A scheduler with the functions of vLLM's scheduler that the plugin wraps. If `is_async`,
    ``schedule`` sets placeholders for drafts."""

    def __init__(self, *, is_async: bool = False) -> None:
        self.requests: dict[str, Any] = {}
        self.is_async = is_async

    def add_request(self, request: Any) -> str:
        self.requests.setdefault(request.request_id, request)
        return "added"

    def schedule(self, throttle_prefills: bool = False) -> list[str]:
        if self.is_async:
            for request in self.requests.values():
                request.spec_token_ids = PLACEHOLDERS
        return list(self.requests)

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> str:
        for request_id, tokens in draft_token_ids.items():
            self.requests[request_id].spec_token_ids = tokens
        return "updated"


class PlainScheduler(FakeScheduler):
    """A scheduler that the plugin does not wrap."""


@pytest.fixture
def scheduler_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler class that the plugin has wrapped."""
    functions = dict(vars(FakeScheduler))
    module = SimpleNamespace(Scheduler=type("Scheduler", (FakeScheduler,), functions))
    monkeypatch.setitem(sys.modules, SCHEDULER, module)  # type: ignore[arg-type]
    for _ in range(2):
        request_limits.install()
    return module.Scheduler


def make_request(name: str, k: Any = None, *, params: bool = True) -> Any:
    extra = None if k is None else {K_ARGUMENT: k}
    sampling_params = SimpleNamespace(extra_args=extra) if params else None
    return SimpleNamespace(request_id=name, sampling_params=sampling_params, spec_token_ids=[])


def get_drafts(scheduler: Any) -> dict[str, list[int]]:
    return {name: request.spec_token_ids for name, request in scheduler.requests.items()}


def make_config(method: str, scheduler_class: Any, *, v2: bool = False, **values: Any) -> Any:
    vllm_config = fake_engine.make_config(method=method, **values)
    vllm_config.speculative_config.method = method
    vllm_config.speculative_config.model = "ngram_npu.engines.vllm.NgramProposer"
    vllm_config.use_v2_model_runner = v2
    vllm_config.scheduler_config.get_scheduler_cls = lambda: scheduler_class
    return vllm_config


def test_synchronous_scheduler_truncates_drafts_of_limited_requests(scheduler_class: Any) -> None:
    scheduler = scheduler_class()
    for name, k in (("a", None), ("b", 0), ("c", "2"), ("d", 9)):
        assert scheduler.add_request(request=make_request(name, k)) == "added"
    scheduler.add_request(make_request("pooling", params=False))
    assert scheduler.schedule(throttle_prefills=True) == [*scheduler.requests]
    drafts = {name: [5, 6, 7, 8] for name in "abcd"}
    assert scheduler.update_draft_token_ids(draft_token_ids=drafts) == "updated"
    expected = {"a": [5, 6, 7, 8], "b": [], "c": [5, 6], "d": [5, 6, 7, 8], "pooling": []}
    assert get_drafts(scheduler) == expected


def test_asynchronous_scheduler_truncates_placeholders_of_limited_requests(
    scheduler_class: Any,
) -> None:
    scheduler = scheduler_class(is_async=True)
    for name, k in (("a", None), ("b", 0), ("c", 3)):
        scheduler.add_request(make_request(name, k))
    for _ in range(2):
        scheduler.schedule()
        assert get_drafts(scheduler) == {"a": PLACEHOLDERS, "b": [], "c": [-1] * 3}
    assert PLACEHOLDERS == [-1] * K


def test_limit_of_ended_request_is_removed(scheduler_class: Any) -> None:
    scheduler = scheduler_class(is_async=True)
    scheduler.add_request(make_request("a", 0))
    del scheduler.requests["a"]
    scheduler.schedule()
    assert getattr(scheduler, request_limits.ATTRIBUTE) == {}
    scheduler.add_request(make_request("a", 1))
    del scheduler.requests["a"]
    scheduler.add_request(make_request("a"))
    scheduler.schedule()
    assert get_drafts(scheduler) == {"a": PLACEHOLDERS}


def test_newest_part_of_a_streamed_request_determines_the_limit(scheduler_class: Any) -> None:
    scheduler = scheduler_class(is_async=True)
    for k in (0, 2):
        scheduler.add_request(make_request("a", k))
        scheduler.schedule()
        assert get_drafts(scheduler) == {"a": [-1] * k}


@pytest.mark.parametrize("value", [True, False, -1, K + 1, 0.5, "", "-1", "x", [0], {}, "0" * 99])
def test_malformed_limit_raises(scheduler_class: Any, value: Any) -> None:
    vllm_config = make_config("ngram", scheduler_class)
    with pytest.raises(ValueError) as error:
        request_limits.check_limit(make_request("a", value), vllm_config)
    assert str(error.value) == (
        "ngram_npu: ngram_npu_k in extra_args (over HTTP: vllm_xargs): expected an integer from 0 "
        f"to {K}, got {value!r}"
    )


@pytest.mark.parametrize("value", [None, 0, K, 0.0, "0", str(K)])
@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "ngram"},
        {"method": "ngram_gpu"},
        {"method": "custom_class"},
        {"method": "ngram_gpu", "v2": True, "adaptive": True},
        {"method": "draft_model", "v2": True, "adaptive": True, "beside": True},
    ],
)
def test_limit_is_accepted_where_it_reduces_verified_tokens(
    scheduler_class: Any, arguments: Any, value: Any
) -> None:
    vllm_config = make_config(scheduler_class=scheduler_class, **arguments)
    request_limits.check_limit(make_request("a", value), vllm_config)


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "ngram", "v2": True},
        {"method": "draft_model", "v2": True, "beside": True},
        {"method": "draft_model", "v2": True, "adaptive": True},
        {"method": "eagle"},
    ],
)
def test_limit_raises_where_all_rows_have_equally_many_tokens(
    scheduler_class: Any, arguments: Any
) -> None:
    vllm_config = make_config(scheduler_class=scheduler_class, **arguments)
    request_limits.check_limit(make_request("a"), vllm_config)
    for value in (0, 1):
        with pytest.raises(
            ValueError, match=rf"ngram_npu_k in extra_args .*: expected none, got {value}: "
        ):
            request_limits.check_limit(make_request("a", value), vllm_config)


def test_limit_raises_with_a_scheduler_that_does_not_truncate_drafts(scheduler_class: Any) -> None:
    with pytest.raises(ValueError, match=r"ngram_npu_k in extra_args .*: expected none, got 0"):
        request_limits.check_limit(make_request("a", 0), make_config("ngram", PlainScheduler))
    overriding = type("Scheduler", (scheduler_class,), {"schedule": FakeScheduler.schedule})
    with pytest.raises(ValueError, match=r"ngram_npu_k in extra_args .*: expected none, got 0"):
        request_limits.check_limit(make_request("a", 0), make_config("ngram", overriding))
    derived = type("AsyncScheduler", (scheduler_class,), {})
    request_limits.check_limit(make_request("a", 0), make_config("ngram", derived))


def test_limit_is_accepted_by_vllm_without_the_v2_runner(scheduler_class: Any) -> None:
    vllm_config = make_config("ngram", scheduler_class)
    del vllm_config.use_v2_model_runner
    del vllm_config.speculative_config.enable_adaptive_verification
    request_limits.check_limit(make_request("a", 0), vllm_config)
    vllm_config.use_v2_model_runner = True
    with pytest.raises(ValueError, match="expected none, got 0"):
        request_limits.check_limit(make_request("a", 0), vllm_config)


def test_limit_in_engine_without_speculation_must_be_zero() -> None:
    vllm_config = SimpleNamespace(speculative_config=None)
    request_limits.check_limit(make_request("a", 0), vllm_config)
    with pytest.raises(ValueError, match="expected an integer from 0 to 0, got 1"):
        request_limits.check_limit(make_request("a", 1), vllm_config)
