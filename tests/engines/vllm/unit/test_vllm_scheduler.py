"""Tests the functions of vLLM's scheduler that the plugin replaces, in a fake engine core."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import K, make_config
from ngram_npu.engines.vllm import scheduler
from ngram_npu.engines.vllm.patching import SCHEDULER
from ngram_npu.engines.vllm.scheduler import ATTRIBUTE, CORE, METHOD


def make_core(
    monkeypatch: pytest.MonkeyPatch,
    *,
    parallel: dict[str, int] | None = None,
    **attributes: Any,
) -> Any:
    """Returns an engine core with a scheduler and one running request, all wrapped by the plugin.
    ``attributes`` are those of the configuration, ``parallel`` those of its ``parallel_config``."""

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config = make_config()
            vars(self.vllm_config).update(attributes)
            sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1}
            vars(self.vllm_config.parallel_config).update(sizes | (parallel or {}))
            self.running = [SimpleNamespace(spec_token_ids=[])]

        def schedule(self) -> Any:
            self.running[0].spec_token_ids = [-1] * K
            return SimpleNamespace(num_spec_tokens_to_schedule=K)

        def update_draft_token_ids(self, draft_token_ids: list[int]) -> None:
            self.running[0].spec_token_ids = draft_token_ids

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = Scheduler()

        def collective_rpc(self, *args: Any) -> Any:
            return args

    for name, cls in ((SCHEDULER, Scheduler), (CORE, EngineCore)):
        module: Any = SimpleNamespace(**{cls.__name__: cls})
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        scheduler.install()
    return EngineCore()


def test_switch_drops_drafts_of_both_kinds_of_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(monkeypatch)
    (request,) = core.scheduler.running
    for enabled, num_drafts in ((True, K), (False, 0), (True, K)):
        assert core.collective_rpc(METHOD, None, (enabled,)) == [{"drafting": enabled}]
        core.scheduler.schedule()
        assert len(request.spec_token_ids) == num_drafts
        core.scheduler.update_draft_token_ids([7] * K)
        assert len(request.spec_token_ids) == num_drafts


@pytest.mark.parametrize(
    ("in_v2", "parallel", "expected"),
    [(True, {}, 0), (False, {}, K)]
    + [(True, {f"{name}_parallel_size": 2}, K) for name in ("data", "pipeline")],
)
def test_v2_runner_of_a_single_engine_looks_up_nothing_while_drafting_is_off(
    monkeypatch: pytest.MonkeyPatch, in_v2: bool, parallel: dict[str, int], expected: int
) -> None:
    core = make_core(monkeypatch, parallel=parallel, use_v2_model_runner=in_v2)
    core.collective_rpc(METHOD, kwargs={"enabled": False})
    assert core.scheduler.schedule().num_spec_tokens_to_schedule == expected


def test_functions_of_a_subclass_are_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(monkeypatch)

    class OtherScheduler(type(core.scheduler)):  # type: ignore[misc]
        def schedule(self) -> Any:
            self.running[0].spec_token_ids = [-2] * K
            return SimpleNamespace(num_spec_tokens_to_schedule=K)

    core.scheduler = OtherScheduler()
    core.collective_rpc(METHOD, None, (False,))
    core.scheduler.schedule()
    assert core.scheduler.running[0].spec_token_ids == []


def test_other_calls_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(monkeypatch)
    assert core.collective_rpc("sleep", 1.0, (2,), {"a": 3}) == ("sleep", 1.0, (2,), {"a": 3})


def test_invalid_call_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(monkeypatch)
    with pytest.raises(ValueError, match="ngram_npu_set_drafting: expected true or false, got 0"):
        core.collective_rpc(METHOD, None, (0,))
    delattr(core.scheduler, ATTRIBUTE)  # as if ngram_npu did not draft
    with pytest.raises(ValueError, match="expected an engine for which ngram_npu drafts"):
        core.collective_rpc(METHOD, None, (False,))
    core.scheduler.schedule()
    assert core.scheduler.running[0].spec_token_ids == [-1] * K
