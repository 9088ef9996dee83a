"""The option ``k="auto"``: vLLM's table of draft lengths, and what a scheduler's steps pass on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu import NgramConfig
from ngram_npu.draft_length import Change
from ngram_npu.engines.vllm import auto_k
from ngram_npu.engines.vllm.options import Options

K = 5


class Request:
    def __init__(self, token_ids: list[int]) -> None:
        self.all_token_ids = token_ids

    def is_finished(self) -> bool:
        return False


def make_options(**values: Any) -> Options:
    values = {
        "ngram": NgramConfig(min_n=1, max_n=16, k=K, match_policy="latest", overlap=True),
        "lookup": "1-16",
        "ignored_bounds": "",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "min_draft_probability": None,
        "keep_drafting": False,
        "beside": False,
        "sources": (),
    } | values
    return Options(**values)


def make_scheduler(**parallel: int) -> Any:
    compilation = SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None)
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1} | parallel
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=compilation,
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(served_model_name="tiny"),
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
        ),
        dynamic_sd_lookup=[K] * 17,
        running=[Request([1, 2, 3] * 20)],
    )


def make_output(num_drafts: dict[str, int], **values: Any) -> Any:
    """Returns a step of decoding requests, by their numbers of draft tokens."""
    values = {
        "num_scheduled_tokens": {name: 1 + k for name, k in num_drafts.items()},
        "scheduled_spec_decode_tokens": {n: [-1] * k for n, k in num_drafts.items() if k},
        "scheduled_new_reqs": [],
        "has_structured_output_requests": False,
        "num_spec_tokens_to_schedule": 0,
    } | values
    return SimpleNamespace(**values)


class Recorder:
    """A controller that records observed steps."""

    lengths = (0, 1, 3, 5)

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float | None]] = []
        self.schedules: list[tuple[int, int]] = []

    def observe_step(self, batch: int, length: int, seconds: float | None) -> None:
        self.steps.append((batch, length, seconds))

    def observe_schedule(self, batch: int, length: int) -> None:
        self.schedules.append((batch, length))


@pytest.fixture
def observed() -> tuple[auto_k.StepObserver, Recorder, list[float]]:
    clock = [100.0]
    observer = auto_k.StepObserver(make_scheduler(), make_options(), clock=lambda: clock[0])
    recorder: Any = Recorder()
    observer.controller = recorder
    return observer, recorder, clock


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 256])
def test_table_maps_batches_to_all_lengths(k: int, max_num_seqs: int) -> None:
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    assert lengths[0] == 0
    assert lengths[-1] == k
    assert len(lengths) <= 4
    table = auto_k.make_table(lengths, max_num_seqs)
    by_batch = [length for first, last, length in table for _ in range(first, last + 1)]
    assert len(by_batch) == max_num_seqs
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert {*by_batch} == ({*lengths} if max_num_seqs >= len(lengths) else {k, 0}) - (
        {0} if max_num_seqs == 1 else set()
    )


def test_graph_pairs_are_those_within_the_captured_sizes() -> None:
    has_graph = auto_k.graph_pairs((0, 1, 3, 5), 256, [1, 2, 4, 8, 16, 24, 512])
    assert has_graph(256, 0)
    assert has_graph(256, 1)
    assert has_graph(128, 3)
    assert not has_graph(129, 3)
    assert has_graph(4, 5)
    assert not has_graph(86, 5)
    assert auto_k.graph_pairs((0, 5), 256, ())(256, 5)


def test_time_between_decode_steps_of_one_length_is_observed(observed: Any) -> None:
    observer, recorder, clock = observed
    drafts = [0, 0, 5, 5, 5, 0]
    for number, k in enumerate(drafts):
        clock[0] += 0.01 + 0.001 * number
        observer.observe_update(make_output({"a": k, "b": k}), [[1], [1]])
    times = [None if t is None else round(t, 6) for _, _, t in recorder.steps]
    assert [(b, k) for b, k, _ in recorder.steps] == [(2, k) for k in drafts]
    assert times == [None, 0.011, None, 0.013, 0.014, None]


@pytest.mark.parametrize(
    "other",
    [
        make_output({"a": 0}, scheduled_new_reqs=["new"]),
        make_output({"a": 0}, has_structured_output_requests=True),
        make_output({"a": 0, "b": 5}),
        make_output({"a": 0}, num_scheduled_tokens={"a": 64}),
        make_output({}),
    ],
    ids=["prefill", "grammar", "different lengths", "chunk", "empty"],
)
def test_other_steps_are_not_observed(observed: Any, other: Any) -> None:
    observer, recorder, clock = observed
    for output in (make_output({"a": 0}), other, make_output({"a": 0}), make_output({"a": 0})):
        clock[0] += 0.01
        observer.observe_update(output, [[1]])
    assert [t is None for _, _, t in recorder.steps] == [True, True, False]


def test_step_after_an_idle_engine_has_no_time(observed: Any) -> None:
    observer, recorder, clock = observed
    running = observer._scheduler.running
    observer.observe_update(make_output({"a": 0}), [[1]])
    observer._scheduler.running = []
    observer.observe_update(make_output({"a": 0}), [[1]])
    observer._scheduler.running = running
    clock[0] += 1000
    observer.observe_update(make_output({"a": 0}), [[1]])
    assert recorder.steps[-1] == (1, 0, None)


def test_schedule_is_counted_for_the_next_drafts(observed: Any) -> None:
    observer, recorder, _ = observed
    observer.observe_schedule(make_output({"a": 0, "b": 0}, num_spec_tokens_to_schedule=3))
    observer.observe_schedule(make_output({}))
    assert recorder.schedules == [(2, 3)]


def test_acceptance_with_store_is_measured_in_steps_with_drafts() -> None:
    config = NgramConfig(sizes="ladder", k=K, min_draft_probability=0.2, store="live")
    observer = auto_k.StepObserver(make_scheduler(), make_options(ngram=config))
    for _ in range(20):
        output = make_output({"a": 3, "b": 3, "c": 3})
        observer.observe_update(output, [[7], [7, 8], [7, 8, 9, 1]])
    acceptance = observer.controller.acceptance
    assert acceptance.tokens_per_step(3) == pytest.approx(7 / 3)
    assert acceptance.tokens_per_step(1) == pytest.approx(5 / 3)
    assert acceptance.tokens_per_step(5) is None


def test_acceptance_without_store_is_sampled_from_running_requests() -> None:
    scheduler = make_scheduler()
    observer = auto_k.StepObserver(scheduler, make_options())
    for _ in range(400):
        scheduler.running[0].all_token_ids.append(len(scheduler.running[0].all_token_ids) % 3 + 1)
        observer.observe_update(make_output({"a": 0}), [[1]])
    assert observer.controller.acceptance.tokens_per_step(5) == pytest.approx(6, abs=0.1)


class FakeScheduler:
    """Has the functions of vLLM's scheduler that are wrapped."""

    def __init__(self, vllm_config: Any) -> None:
        stock = make_scheduler()
        self.vllm_config, self.running = vllm_config, stock.running
        self.dynamic_sd_lookup = stock.dynamic_sd_lookup

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return make_output({"a": 0})

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"


def make_wrapped_scheduler(
    monkeypatch: pytest.MonkeyPatch, *, is_auto: bool = True, **parallel: int
) -> Any:
    module = SimpleNamespace(
        Scheduler=type("Scheduler", (FakeScheduler,), dict(vars(FakeScheduler)))
    )
    monkeypatch.setattr(auto_k, "find_method", lambda config: "v2")
    monkeypatch.setattr(auto_k, "read_k_option", lambda config: is_auto)
    monkeypatch.setattr(auto_k, "read_options", lambda config, method: make_options())
    auto_k._wrap_scheduler(module)
    return module.Scheduler(make_scheduler(**parallel).vllm_config)


def test_wrapped_scheduler_begins_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch)
    assert scheduler.dynamic_sd_lookup[1:] == [0] * 16
    output = scheduler.schedule(throttle_prefills=True)
    results = SimpleNamespace(sampled_token_ids=[[1]])
    assert scheduler.update_from_output(output, results) == "outputs"


def test_scheduler_without_option_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch, is_auto=False)
    assert scheduler.dynamic_sd_lookup == [K] * 17
    assert not hasattr(scheduler, auto_k.ATTRIBUTE)


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "data_parallel_size"])
def test_parallel_engines_draft_the_configured_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.ngram_npu"):
        scheduler = make_wrapped_scheduler(monkeypatch, **{option: 2})
    assert scheduler.dynamic_sd_lookup[1:] == [K] * 16
    assert not hasattr(scheduler, auto_k.ATTRIBUTE)
    assert "k='auto' has no effect with pipeline or data parallelism" in caplog.text


def test_error_in_observer_ends_drafts_but_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch)
    scheduler.dynamic_sd_lookup[:] = [K] * 17
    results = SimpleNamespace(sampled_token_ids=[[1]])
    with caplog.at_level(logging.ERROR, logger="vllm.ngram_npu"):
        assert scheduler.update_from_output(SimpleNamespace(), results) == "outputs"
    assert scheduler.dynamic_sd_lookup == [0] * 17
    assert "k='auto' is off" in caplog.text
    assert scheduler.update_from_output(SimpleNamespace(), results) == "outputs"


def test_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    observer = auto_k.StepObserver(make_scheduler(), make_options())
    changes = (0, 3, 1.25), (3, 0, 1.0)
    with caplog.at_level(logging.INFO, logger="vllm.ngram_npu"):
        for before, after, goodput in changes:
            observer._report_change(Change(9, 16, before, after, goodput, "because"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"ngram_npu: k='auto': batch sizes 9-16: draft length {before} -> {after}: because"
        for before, after, _ in changes
    ]


def make_graph(num_tokens: int, uniform_token_count: int | None, **values: int) -> Any:
    values = {"num_active_loras": 0, "num_ubatches": 1} | values
    return SimpleNamespace(num_tokens=num_tokens, uniform_token_count=uniform_token_count, **values)


def test_candidates_contain_the_smallest_sufficient_graph_of_each_length() -> None:
    piecewise, six, twelve = make_graph(8, None), make_graph(6, 6), make_graph(12, 6)
    eight, lora = make_graph(8, 1), make_graph(8, 1, num_active_loras=1)
    candidates = {(5, 0): [six, piecewise], (7, 0): [eight, piecewise], (9, 0): [twelve]}
    auto_k.add_candidates(candidates, [twelve, eight, lora, piecewise, six])
    assert candidates == {
        (5, 0): [eight, six, piecewise],
        (7, 0): [twelve, eight, piecewise],
        (9, 0): [twelve],
    }
