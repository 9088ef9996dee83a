"""Tests the functions of vLLM's scheduler that the plugin replaces, in a fake engine core."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import STORE, K, make_config
from ngram_npu.engines.vllm import scheduler
from ngram_npu.engines.vllm.patching import SCHEDULER
from ngram_npu.engines.vllm.scheduler import ATTRIBUTE, CORE, METHOD

TABLE = [0, *[K] * 6]
"""Draft lengths by batch size, one for each number of requests."""


def make_core(
    monkeypatch: pytest.MonkeyPatch,
    *,
    parallel: dict[str, int] | None = None,
    options: dict[str, Any] | None = None,
    table: list[int] | None = None,
    **attributes: Any,
) -> Any:
    """Returns an engine core with a scheduler and one running request, all wrapped by the plugin.
    ``attributes`` are those of the configuration, ``parallel`` those of its ``parallel_config``."""

    class Scheduler:
        def __init__(self) -> None:
            self.vllm_config = make_config(**(options or {}))
            vars(self.vllm_config).update(attributes)
            sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1}
            vars(self.vllm_config.parallel_config).update(sizes | (parallel or {}))
            self.running = [SimpleNamespace(spec_token_ids=[])]
            self.dynamic_sd_lookup = table
            self.is_shut_down = False

        def schedule(self, throttle_prefills: bool = False) -> Any:
            self.running[0].spec_token_ids = [-1] * K
            return SimpleNamespace(
                num_scheduled_tokens={"a": 1},
                total_num_scheduled_tokens=1,
                scheduled_spec_decode_tokens={},
                has_structured_output_requests=False,
                num_spec_tokens_to_schedule=K,
            )

        def update_draft_token_ids(self, draft_token_ids: list[int]) -> None:
            self.running[0].spec_token_ids = draft_token_ids

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
            return "outputs"

        def shutdown(self) -> None:
            self.is_shut_down = True

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


# The switch.


def test_switch_drops_drafts_of_both_kinds_of_schedulers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(monkeypatch)
    (request,) = core.scheduler.running
    for enabled, num_drafts in ((True, K), (False, 0), (True, K)):
        assert core.collective_rpc(METHOD, None, (enabled,)) == [{"drafting": enabled}]
        core.scheduler.schedule()
        assert len(request.spec_token_ids) == num_drafts
        core.scheduler.update_draft_token_ids([7] * K)
        assert len(request.spec_token_ids) == num_drafts
    assert caplog.messages == [f"ngram_npu: drafting is {state}" for state in ("on", "off", "on")]


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


# The option k="auto".


def make_auto_scheduler(monkeypatch: pytest.MonkeyPatch, table: list[int] | None = TABLE) -> Any:
    graphs = SimpleNamespace(cudagraph_mode=None)
    arguments: Any = {"use_v2_model_runner": True, "compilation_config": graphs}
    arguments["additional_config"] = {"ngram_npu": {"k": "auto"}}
    return make_core(monkeypatch, table=table and [*table], **arguments).scheduler


def test_scheduler_with_auto_begins_without_drafts_and_observes_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = make_auto_scheduler(monkeypatch)
    assert subject.dynamic_sd_lookup == [0] * 7
    observer = getattr(subject, ATTRIBUTE).observer
    assert observer is not None
    for _ in range(2):
        arguments = {"scheduler_output": subject.schedule(True), "model_runner_output": None}
        assert subject.update_from_output(**arguments) == "outputs"
        assert subject.update_from_output(subject.schedule(), None) == "outputs"
    assert observer._num_steps == 4
    assert getattr(subject, ATTRIBUTE).observer is observer, "expected no error in the observer"


@pytest.mark.parametrize("fault", ["no attribute", "no argument"])
def test_error_in_observer_ends_drafts_but_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    subject = make_auto_scheduler(monkeypatch)
    subject.dynamic_sd_lookup[:] = TABLE
    output = subject.schedule()
    if fault == "no attribute":
        del output.total_num_scheduled_tokens
    else:  # a later vLLM passes the arguments by other names
        hooks = getattr(subject, ATTRIBUTE)
        hooks._stock_update_from_output = lambda *, step, outcome: "outputs"
    for _ in range(2):
        if fault == "no attribute":
            assert subject.update_from_output(output, None) == "outputs"
        else:
            assert subject.update_from_output(step=output, outcome=None) == "outputs"
    assert subject.dynamic_sd_lookup == [0] * 7
    assert caplog.text.count("k='auto' is off") == 1


@pytest.mark.parametrize(
    ("table", "expected", "is_on"),
    [([K] * 5, [0] * 5, False), ([K] * 9, [K, *[0] * 6, K, K], True), (None, None, False)],
)
def test_table_of_another_length_causes_no_error_in_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    table: list[int] | None,
    expected: list[int] | None,
    is_on: bool,
) -> None:
    subject = make_auto_scheduler(monkeypatch, table)
    for batch in (1, 6, 7, 100):
        output = subject.schedule()
        output.num_scheduled_tokens = dict.fromkeys(range(batch), 1)
        assert subject.update_from_output(output, None) == "outputs"
    assert subject.dynamic_sd_lookup == expected
    assert (getattr(subject, ATTRIBUTE).observer is not None) == is_on
    message = "k='auto' has no effect without vLLM's table of draft lengths"
    assert (message in caplog.text) == (table is None)


def test_scheduler_without_auto_keeps_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_core(monkeypatch, table=[*TABLE]).scheduler
    assert subject.dynamic_sd_lookup == TABLE
    assert getattr(subject, ATTRIBUTE).observer is None


# The option store_feed.


def test_feed_adds_text_to_steps_until_the_scheduler_is_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = make_core(monkeypatch).scheduler
    assert getattr(subject, ATTRIBUTE).feed is None
    calls: list[Any] = []
    getattr(subject, ATTRIBUTE).feed = SimpleNamespace(
        ready=[], add_texts=calls.append, close=lambda: calls.append("closed")
    )
    subject.schedule()
    getattr(subject, ATTRIBUTE).feed.ready.append("piece")
    output = subject.schedule()
    subject.shutdown()
    assert calls == [output, "closed"]
    assert subject.is_shut_down


def test_feed_without_vllms_event_classes_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", None)
    feed = {**STORE, "store_feed": "tcp://10.0.0.1:5557"}
    subject = make_core(monkeypatch, options=feed).scheduler
    assert getattr(subject, ATTRIBUTE).feed is None
    assert caplog.text.count("store_feed is off: ModuleNotFoundError") == 1
    subject.schedule()
    subject.shutdown()
