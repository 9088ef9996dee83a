"""Tests the option ``k="auto"``: vLLM's table of draft lengths, and the observed step times."""

from __future__ import annotations

import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu import NgramConfig
from ngram_npu.draft_acceptance import PRIOR_GAIN, Acceptance
from ngram_npu.draft_length import Change
from ngram_npu.engines.vllm import auto_k
from ngram_npu.engines.vllm import scheduler as scheduler_module
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import SCHEDULER

K = 5
TABLE = [0, *[K] * 13, 3, 1, 0]


class Request:
    def __init__(self, token_ids: list[int]) -> None:
        self.all_token_ids = token_ids

    def is_finished(self) -> bool:
        return False


def make_options(**values: Any) -> Options:
    values = {
        "ngram": NgramConfig(k=K),
        "lookup": "auto",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "keep_drafting": False,
        "beside": False,
        "sources": (),
    } | values
    return Options(**values)


def make_scheduler(*, is_async: bool = False, **parallel: int) -> Any:
    compilation = SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None)
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1} | parallel
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=compilation,
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(served_model_name="tiny"),
            scheduler_config=SimpleNamespace(async_scheduling=is_async),
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
        ),
        dynamic_sd_lookup=[*TABLE],
        running=[Request([1, 2, 3] * 20)],
    )


def make_output(num_drafts: dict[str, int], **values: Any) -> Any:
    """Returns the scheduler's output for a step, given the number of draft tokens per request."""
    values = {
        "num_scheduled_tokens": {name: 1 + k for name, k in num_drafts.items()},
        "scheduled_spec_decode_tokens": {n: [-1] * k for n, k in num_drafts.items() if k},
        "scheduled_new_reqs": [],
        "has_structured_output_requests": False,
        "num_spec_tokens_to_schedule": 0,
    } | values
    return SimpleNamespace(**values)


class RecordingController:
    """A controller that records the observed steps and schedules."""

    lengths = (0, 1, 3, 5)

    def __init__(self) -> None:
        self.acceptance = Acceptance(self.lengths)
        self.steps: list[tuple[int, int, float | None]] = []
        self.schedules: list[tuple[int, int]] = []

    def observe_step(self, batch: int, length: int, seconds: float | None) -> None:
        self.steps.append((batch, length, seconds))

    def observe_schedule(self, batch: int, length: int) -> None:
        self.schedules.append((batch, length))


@pytest.fixture
def observer_setup() -> tuple[auto_k.StepObserver, RecordingController, list[float]]:
    """An observer, its controller, and its clock as a list with the time in seconds."""
    clock = [100.0]
    observer = auto_k.StepObserver(make_scheduler(), make_options(), clock=lambda: clock[0])
    controller: Any = RecordingController()
    observer.controller = controller
    return observer, controller, clock


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 256])
def test_table_maps_batches_to_all_lengths(k: int, max_num_seqs: int) -> None:
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    assert lengths[0] == 0
    assert lengths[-1] == k
    assert len(lengths) <= 4
    table = auto_k.make_table(lengths, max_num_seqs)
    length_by_batch = [length for first, last, length in table for _ in range(first, last + 1)]
    assert len(length_by_batch) == max_num_seqs
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    expected = {*lengths} if max_num_seqs >= len(lengths) else {k, 0}
    assert {*length_by_batch} == (expected if max_num_seqs > 1 else expected - {0})


@pytest.mark.parametrize(
    ("k", "max_num_seqs", "lengths"),
    [
        (5, 256, (0, 1, 3, 5)),
        (8, 4, (0, 1, 4, 8)),
        (8, 3, (0, 8)),
        (2, 3, (0, 1, 2)),
        (1, 1, (0, 1)),
    ],
)
def test_chosen_lengths_are_zero_one_half_and_maximum(
    k: int, max_num_seqs: int, lengths: tuple[int, ...]
) -> None:
    assert auto_k.choose_lengths(k, max_num_seqs) == lengths


def make_config(**additional: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=K, num_speculative_tokens_per_batch_size=None
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        additional_config={"ngram_npu": additional},
    )


def test_table_is_set_before_vllm_validates_the_configuration() -> None:
    vllm_config = make_config(k="auto")
    for _ in range(2):  # vLLM may validate a configuration again, after it turned tuples into lists
        auto_k.set_table(vllm_config)
        table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        assert [*map(tuple, table)] == [(1, 13, 5), (14, 14, 3), (15, 15, 1), (16, 16, 0)]
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [*map(list, table)]


def test_user_table_with_auto_raises() -> None:
    vllm_config = make_config(k="auto")
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 16, 3]]
    with pytest.raises(ValueError) as error:
        auto_k.set_table(vllm_config)
    assert str(error.value) == (
        "ngram_npu: num_speculative_tokens_per_batch_size: expected none with k='auto', got "
        "[[1, 16, 3]]"
    )


def test_configuration_without_auto_table_or_speculation_gets_no_table() -> None:
    vllm_config = make_config()
    auto_k.set_table(vllm_config)
    assert vllm_config.speculative_config.num_speculative_tokens_per_batch_size is None
    older_config = make_config(k="auto")  # of a vLLM without the setting
    del older_config.speculative_config.num_speculative_tokens_per_batch_size
    auto_k.set_table(older_config)
    assert not hasattr(older_config.speculative_config, "num_speculative_tokens_per_batch_size")
    config_without_speculation = make_config(k="auto")
    config_without_speculation.speculative_config = None
    auto_k.set_table(config_without_speculation)
    assert config_without_speculation.speculative_config is None


def test_batches_and_lengths_within_captured_sizes_have_a_graph() -> None:
    has_graph = auto_k.make_graph_check((0, 1, 3, 5), 256, [1, 2, 4, 8, 16, 24, 512])
    assert has_graph(256, 0)
    assert has_graph(256, 1)
    assert has_graph(128, 3)
    assert not has_graph(129, 3)
    assert has_graph(4, 5)
    assert not has_graph(86, 5)
    assert auto_k.make_graph_check((0, 5), 256, ())(256, 5)


def test_time_between_decode_steps_with_equal_draft_length_is_observed(observer_setup: Any) -> None:
    observer, controller, clock = observer_setup
    drafts = [0, 0, 5, 5, 5, 0]
    for number, k in enumerate(drafts):
        clock[0] += 0.01 + 0.001 * number
        observer.observe_update(make_output({"a": k, "b": k}), [[1], [1]])
    times = [None if t is None else round(t, 6) for _, _, t in controller.steps]
    assert [(b, k) for b, k, _ in controller.steps] == [(2, k) for k in drafts]
    assert times == [None, 0.011, None, 0.013, 0.014, None]


@pytest.mark.parametrize(
    "other_output",
    [
        make_output({"a": 0}, scheduled_new_reqs=["new"]),
        make_output({"a": 0}, has_structured_output_requests=True),
        make_output({"a": 0, "b": 5}),
        make_output({"a": 0}, num_scheduled_tokens={"a": 64}),
        make_output({}),
    ],
    ids=["prefill", "grammar", "different lengths", "chunk", "empty"],
)
def test_step_without_comparable_time_is_not_observed(
    observer_setup: Any, other_output: Any
) -> None:
    observer, controller, clock = observer_setup
    decode_output = make_output({"a": 0})
    for output in (decode_output, other_output, decode_output, decode_output):
        clock[0] += 0.01
        observer.observe_update(output, [[1]])
    assert [t is None for _, _, t in controller.steps] == [True, True, False]


@pytest.mark.parametrize(
    ("next_output", "is_observed"),
    [
        (make_output({"a": 0}), True),
        (make_output({"a": 0}, scheduled_new_reqs=["new"]), False),
        (make_output({"a": 0, "b": 0}), False),
        (make_output({}), False),
        (None, False),
    ],
    ids=["similar", "prefill", "another batch size", "empty", "none"],
)
def test_asynchronous_step_time_is_observed_if_a_similar_step_follows(
    next_output: Any, is_observed: bool
) -> None:
    observer = auto_k.StepObserver(make_scheduler(is_async=True), make_options())
    controller: Any = RecordingController()
    observer.controller = controller
    first, second = make_output({"a": 0}), make_output({"a": 0})
    for scheduled, updated in (first, None), (second, first), (next_output, second):
        if scheduled is not None:
            observer.observe_schedule(scheduled)
        if updated is not None:
            observer.observe_update(updated, [[1]])
    assert [seconds is not None for _, _, seconds in controller.steps] == [False, is_observed]


def test_first_step_after_idle_engine_has_no_time(observer_setup: Any) -> None:
    observer, controller, clock = observer_setup
    running = observer._scheduler.running
    observer.observe_update(make_output({"a": 0}), [[1]])
    observer._scheduler.running = []
    observer.observe_update(make_output({"a": 0}), [[1]])
    observer._scheduler.running = running
    clock[0] += 1000
    observer.observe_update(make_output({"a": 0}), [[1]])
    assert controller.steps[-1] == (1, 0, None)


def test_schedule_is_observed_with_length_of_the_next_drafts(observer_setup: Any) -> None:
    observer, controller, _ = observer_setup
    observer.observe_schedule(make_output({"a": 0, "b": 0}, num_spec_tokens_to_schedule=3))
    observer.observe_schedule(make_output({}))
    assert controller.schedules == [(2, 3)]


def test_acceptance_with_store_is_measured_in_steps_with_drafts() -> None:
    observer = auto_k.StepObserver(make_scheduler(), make_options(store=True))
    for _ in range(20):
        output = make_output({"a": 3, "b": 3, "c": 3})
        observer.observe_update(output, [[7], [7, 8], [7, 8, 9, 1]])
    acceptance = observer.controller.acceptance
    assert acceptance.estimate_tokens_per_step(3) == pytest.approx(7 / 3)
    assert acceptance.estimate_tokens_per_step(1) == pytest.approx(5 / 3)
    assert acceptance.estimate_tokens_per_step(5) is None


def test_acceptance_without_store_is_sampled_from_running_requests() -> None:
    scheduler = make_scheduler()
    observer = auto_k.StepObserver(scheduler, make_options())
    for _ in range(400):
        scheduler.running[0].all_token_ids.append(len(scheduler.running[0].all_token_ids) % 3 + 1)
        observer.observe_update(make_output({"a": 0}), [[1]])
    assert observer.controller.acceptance.estimate_tokens_per_step(5) == pytest.approx(6, abs=0.1)


class FakeScheduler:
    """A scheduler with the functions of vLLM's scheduler that the plugin wraps."""

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
    options = make_options(k="auto" if is_auto else "")
    monkeypatch.setattr(scheduler_module, "find_method", lambda config: "v2")
    monkeypatch.setattr(scheduler_module, "read_options", lambda config, method: options)
    monkeypatch.setitem(sys.modules, SCHEDULER, module)  # type: ignore[arg-type]
    scheduler_module.install()
    return module.Scheduler(make_scheduler(**parallel).vllm_config)


def get_hooks(scheduler: Any) -> Any:
    return getattr(scheduler, scheduler_module.ATTRIBUTE)


def test_wrapped_scheduler_begins_without_drafts_and_accepts_keyword_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch)
    assert scheduler.dynamic_sd_lookup[1:] == [0] * 16
    observer = get_hooks(scheduler).observer
    controller = observer.controller = RecordingController()
    output = scheduler.schedule(throttle_prefills=True)
    results = SimpleNamespace(sampled_token_ids=[[1]])
    arguments = {"scheduler_output": output, "model_runner_output": results}
    assert scheduler.update_from_output(**arguments) == "outputs"
    assert scheduler.update_from_output(output, model_runner_output=results) == "outputs"
    assert get_hooks(scheduler).observer is observer, "expected no error in the observer"
    assert controller.schedules == [(1, 0)]
    assert [(batch, length) for batch, length, _ in controller.steps] == [(1, 0), (1, 0)]


def test_scheduler_with_unknown_parameters_is_called_and_auto_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def update_from_output(self: Any, step: Any, *, outcome: Any, stale: bool = False) -> Any:
        return step, outcome, stale

    monkeypatch.setattr(FakeScheduler, "update_from_output", update_from_output)
    scheduler = make_wrapped_scheduler(monkeypatch)
    for _ in range(2):
        assert scheduler.update_from_output(7, outcome=8, stale=True) == (7, 8, True)
    assert caplog.text.count("k='auto' is off") == 1


def make_scheduler_with_table(monkeypatch: pytest.MonkeyPatch, table: list[int] | None) -> Any:
    stock_init = FakeScheduler.__init__

    def init(self: Any, vllm_config: Any) -> None:
        stock_init(self, vllm_config)
        self.dynamic_sd_lookup = table

    monkeypatch.setattr(FakeScheduler, "__init__", init)
    return make_wrapped_scheduler(monkeypatch)


@pytest.mark.parametrize(
    ("table", "expected", "is_on"), [([K] * 5, [0] * 5, False), ([K] * 20, [K] + [0] * 16, True)]
)
def test_table_of_another_length_causes_no_error_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, table: list[int], expected: list[int], is_on: bool
) -> None:
    scheduler = make_scheduler_with_table(monkeypatch, table)
    for batch in (1, 16, 17, 100):
        output = make_output({str(i): 0 for i in range(batch)})
        results = SimpleNamespace(sampled_token_ids=[[1]] * batch)
        scheduler.schedule()
        assert scheduler.update_from_output(output, results) == "outputs"
    assert scheduler.dynamic_sd_lookup[:17] == expected
    assert (get_hooks(scheduler).observer is not None) == is_on


def test_scheduler_without_table_drafts_the_configured_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_scheduler_with_table(monkeypatch, None)
    assert get_hooks(scheduler).observer is None
    assert "k='auto' has no effect without vLLM's table of draft lengths" in caplog.text
    assert scheduler.update_from_output(scheduler.schedule(), SimpleNamespace()) == "outputs"


def test_clock_jumps_do_not_change_the_chosen_length() -> None:
    clock, rng = [0.0], random.Random(1)
    scheduler = make_scheduler()
    options = make_options(max_model_len=10_000)
    observer = auto_k.StepObserver(scheduler, options, clock=lambda: clock[0])
    text, length = scheduler.running[0].all_token_ids, 0
    for _ in range(1000):
        clock[0] += 0.01 + 0.0001 * length
        if rng.random() < 0.1:
            clock[0] += rng.choice([-1e9, -5, 5, 1e9])
        text += [len(text) % 3 + 1 for _ in range(1 + length)]
        output = make_output(
            {"a": length}, num_spec_tokens_to_schedule=scheduler.dynamic_sd_lookup[1]
        )
        observer.observe_schedule(output)
        observer.observe_update(output, [text[-1 - length :]])
        length = scheduler.dynamic_sd_lookup[1]
        assert length in observer.controller.lengths
    assert length == K


def test_scheduler_without_option_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch, is_auto=False)
    assert scheduler.dynamic_sd_lookup == TABLE
    assert get_hooks(scheduler).observer is None


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "data_parallel_size"])
def test_parallel_engines_draft_the_configured_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.ngram_npu"):
        scheduler = make_wrapped_scheduler(monkeypatch, **{option: 2})
    assert scheduler.dynamic_sd_lookup[1:] == [K] * 16
    assert get_hooks(scheduler).observer is None
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


def test_change_of_draft_length_is_logged_and_exported(caplog: pytest.LogCaptureFixture) -> None:
    observer = auto_k.StepObserver(make_scheduler(), make_options())
    changes = (0, 3, 1.25), (3, 0, 1.0)
    exported: list[Any] = []
    observer._metrics.observe_change = lambda *values: exported.append(values)  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger="vllm.ngram_npu"):
        for old_length, new_length, goodput in changes:
            observer._report_change(Change(9, 16, old_length, new_length, goodput, "because"))
    assert exported == [("9-16", 3, 1.25), ("9-16", 0, 1.0)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"ngram_npu: k='auto': batch sizes 9-16: draft length {old_length} -> {new_length}: because"
        for old_length, new_length, _ in changes
    ]


def make_graph(num_tokens: int, uniform_token_count: int | None, **values: int) -> Any:
    values = {"num_active_loras": 0, "num_ubatches": 1} | values
    return SimpleNamespace(num_tokens=num_tokens, uniform_token_count=uniform_token_count, **values)


def test_candidates_contain_the_smallest_sufficient_graph_of_each_length() -> None:
    piecewise, graph_6, graph_12 = make_graph(8, None), make_graph(6, 6), make_graph(12, 6)
    graph_8, lora_graph = make_graph(8, 1), make_graph(8, 1, num_active_loras=1)
    candidates = {(5, 0): [graph_6, piecewise], (7, 0): [graph_8, piecewise], (9, 0): [graph_12]}
    auto_k.add_candidates(candidates, [graph_12, graph_8, lora_graph, piecewise, graph_6])
    assert candidates == {
        (5, 0): [graph_8, graph_6, piecewise],
        (7, 0): [graph_12, graph_8, piecewise],
        (9, 0): [graph_12],
    }


def test_results_of_verified_drafts_scale_acceptance_estimates(observer_setup: Any) -> None:
    observer, controller, _ = observer_setup
    for length in (1, 3, 5):
        controller.acceptance.observe(length, (1 + length) * 100, 100)
    for _ in range(100):
        observer.observe_update(make_output({"a": 3, "b": 3}), [[1], [1, 2]])
    expected = 1 + 3 * (100 + PRIOR_GAIN) / (600 + PRIOR_GAIN)
    assert controller.acceptance.estimate_tokens_per_step(3) == pytest.approx(expected, rel=0.05)
