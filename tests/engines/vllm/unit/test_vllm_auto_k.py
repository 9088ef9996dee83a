"""Tests the option ``k="auto"``: vLLM's table of draft lengths, and the observed step times."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu import NgramConfig
from ngram_npu.draft_length import Change
from ngram_npu.engines.vllm import auto_k
from ngram_npu.engines.vllm import scheduler as scheduler_module
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import SCHEDULER

K = 5
TABLE = [0, *[K] * 14, 3, 0]


def make_options(**values: Any) -> Options:
    values = {
        "ngram": NgramConfig(k=K),
        "lookup": "auto",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "keep_drafting": False,
        "neural": False,
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
        running=[],
    )


def make_output(num_drafts: dict[str, int], **values: Any) -> Any:
    """Returns the scheduler's output for a step, given the number of draft tokens per request."""
    values = {
        "num_scheduled_tokens": {name: 1 + k for name, k in num_drafts.items()},
        "scheduled_spec_decode_tokens": {n: [-1] * k for n, k in num_drafts.items() if k},
        "has_structured_output_requests": False,
        "num_spec_tokens_to_schedule": 0,
    } | values
    values.setdefault("total_num_scheduled_tokens", sum(values["num_scheduled_tokens"].values()))
    return SimpleNamespace(**values)


def make_results(output: Any, num_sampled: Sequence[int]) -> Any:
    """Returns the runner's output for a step, given the number of generated tokens per request."""
    names = [*output.num_scheduled_tokens]
    return SimpleNamespace(
        sampled_token_ids=[[7] * number for number in num_sampled],
        req_id_to_index={name: row for row, name in enumerate(names)},
    )


class RecordingController:
    """A controller that records the observed steps and schedules."""

    def __init__(self) -> None:
        self.acceptance = RecordingAcceptance()
        self.steps: list[tuple[int, int, float | None]] = []
        self.kinds: list[tuple[int, Any]] = []
        self.schedules: list[int] = []

    def observe_step(
        self, batch: int, length: int, seconds: float | None, *, num_decodes: int, kind: Any
    ) -> None:
        self.steps.append((batch, length, seconds))
        self.kinds.append((num_decodes, kind))

    def observe_schedule(self, batch: int) -> None:
        self.schedules.append(batch)


class RecordingAcceptance:
    def __init__(self) -> None:
        self.counts: list[tuple[int, ...]] = []

    def observe(self, batch: int, num_accepted: Sequence[int]) -> None:
        self.counts.append(tuple(num_accepted))


@pytest.fixture
def steps() -> ObservedSteps:
    return ObservedSteps()


class ObservedSteps:
    """Steps that an observer passes to a controller."""

    def __init__(self) -> None:
        self.time = 100.0
        self.observer = auto_k.StepObserver(
            make_scheduler(), make_options(), clock=lambda: self.time
        )
        self.controller = self.observer.controller = RecordingController()  # type: ignore[assignment]

    def run(self, output: Any, num_sampled: Sequence[int] = (), seconds: float = 0.01) -> None:
        """Runs a step whose drafts were made by the step before."""
        drafts = output.scheduled_spec_decode_tokens
        self.observer._next_length = max(map(len, drafts.values()), default=0)
        self.observer.observe_schedule(output)
        self.time += seconds
        self.observer.observe_update(output, make_results(output, num_sampled))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 256])
def test_table_maps_batches_to_all_lengths(k: int, max_num_seqs: int) -> None:
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    assert lengths[0] == 0
    assert lengths[-1] == k
    assert len(lengths) <= 3
    table = auto_k.make_table(lengths, max_num_seqs)
    length_by_batch = [length for first, last, length in table for _ in range(first, last + 1)]
    assert len(length_by_batch) == max_num_seqs
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert {*length_by_batch} == ({*lengths} if max_num_seqs > 1 else {k})


@pytest.mark.parametrize(
    ("k", "max_num_seqs", "lengths"),
    [
        (5, 256, (0, 3, 5)),
        (8, 16, (0, 4, 8)),
        (8, 15, (0, 8)),
        (2, 64, (0, 1, 2)),
        (1, 64, (0, 1)),
    ],
)
def test_chosen_lengths_are_zero_half_and_maximum(
    k: int, max_num_seqs: int, lengths: tuple[int, ...]
) -> None:
    assert auto_k.choose_lengths(k, max_num_seqs) == lengths


def make_config(sizes: dict[str, int] | None = None, **additional: Any) -> Any:
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1} | (sizes or {})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
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
        assert [*map(tuple, table)] == [(1, 14, 5), (15, 15, 3), (16, 16, 0)]
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


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "data_parallel_size"])
def test_parallel_engines_raise_before_the_model_is_loaded(option: str) -> None:
    with pytest.raises(ValueError) as error:
        auto_k.set_table(make_config({option: 2}, k="auto"))
    assert str(error.value) == f"ngram_npu: k: expected {option} 1 with 'auto', got 2"
    auto_k.set_table(make_config({option: 2}))


DEFAULT_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


@pytest.mark.parametrize(
    ("length", "max_num_seqs", "sizes", "chosen"),
    [
        (0, 16, DEFAULT_SIZES, [1, 2, 4, 8, 16]),
        (5, 256, DEFAULT_SIZES, [1, 2, 4, *range(11, 84, 8)]),
        (5, 12, DEFAULT_SIZES, [1, 2, 4, 12]),
        (
            0,
            512,
            [*range(96, 305, 8)],
            [*range(96, 129, 8), 144, 160, 176, 192, 208, 224, 240, 256, 280, 304],
        ),
        (5, 256, [1, 7, 100, 1024], [1, 2, 17]),
        (5, 256, [], []),
    ],
)
def test_graphs_are_at_most_eight_requests_apart_if_there_are_sizes(
    length: int, max_num_seqs: int, sizes: list[int], chosen: list[int]
) -> None:
    assert auto_k.choose_graph_sizes(length, max_num_seqs, sizes) == chosen


def test_time_between_decode_steps_with_equal_draft_length_is_observed(
    steps: ObservedSteps,
) -> None:
    drafts = [0, 0, 5, 5, 5, 0]
    for number, k in enumerate(drafts):
        steps.run(make_output({"a": k, "b": k}), [1, 1], 0.01 + 0.001 * number)
    times = [None if t is None else round(t, 6) for _, _, t in steps.controller.steps]
    assert [(b, k) for b, k, _ in steps.controller.steps] == [(2, k) for k in drafts]
    assert times == [None, 0.011, None, 0.013, 0.014, None]


def test_step_without_decoding_request_is_not_observed_but_begins_the_next_time(
    steps: ObservedSteps,
) -> None:
    steps.run(make_output({"a": 0}), [1])
    steps.run(make_output({}), seconds=5.0)
    steps.run(make_output({"a": 0}, num_scheduled_tokens={"a": 64}), [], seconds=1000.0)  # idle
    steps.run(make_output({"a": 0}), [1], seconds=0.25)
    assert steps.controller.steps == [(1, 0, None), (1, 0, 0.25)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (make_output({"a": 0, "b": 0}), (2, (False, 0))),
        (make_output({"a": 5, "b": 5}), (2, (False, 0))),
        (make_output({"a": 5}, has_structured_output_requests=True), (1, (True, 0))),
        # a prompt of 100 or 900 tokens beside a request that decodes
        (make_output({"a": 0}, num_scheduled_tokens={"a": 1, "b": 100}), (1, (False, 3))),
        (make_output({"a": 5}, num_scheduled_tokens={"a": 6, "b": 900}), (1, (False, 6))),
        # a request that decodes without drafts yet
        (make_output({"a": 5}, num_scheduled_tokens={"a": 6, "b": 1}), (1, (False, 0))),
    ],
    ids=["decode", "drafts", "grammar", "prefill", "drafts and prefill", "new"],
)
def test_kind_of_step_tells_grammar_and_number_of_prompt_tokens(
    steps: ObservedSteps, output: Any, expected: Any
) -> None:
    steps.run(output, [1] * len(output.num_scheduled_tokens))
    assert steps.controller.kinds == [expected]


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("num_prompts", [0, 1])
def test_accepted_tokens_are_counted_in_every_step(
    steps: ObservedSteps, grammar: bool, num_prompts: int
) -> None:
    output = make_output({"a": 3, "b": 3, "c": 3, "d": 3}, has_structured_output_requests=grammar)
    output.num_scheduled_tokens |= {f"prompt {i}": 500 for i in range(num_prompts)}
    output.total_num_scheduled_tokens += 500 * num_prompts
    steps.run(output, [1, 2, 4, 1] + [1] * num_prompts)
    assert steps.controller.acceptance.counts == [(2, 1, 0, 1)]


def test_draft_that_a_grammar_shortened_counts_as_rejected(steps: ObservedSteps) -> None:
    output = make_output({"a": 3, "b": 3})
    output.scheduled_spec_decode_tokens["b"] = [5]
    output.num_scheduled_tokens["b"] = 2
    output.total_num_scheduled_tokens = 6
    steps.run(output, [4, 2])
    assert steps.controller.acceptance.counts == [(0, 1, 0, 1)]
    assert steps.controller.steps[0][:2] == (2, 3)


@pytest.mark.parametrize("num_prompts", [0, 2])
def test_large_batches_are_counted_by_samples_that_reach_all_requests(
    steps: ObservedSteps, num_prompts: int
) -> None:
    output = make_output({str(i): 3 for i in range(250)})
    output.num_scheduled_tokens |= {f"prompt {i}": 500 for i in range(num_prompts)}
    output.total_num_scheduled_tokens += 500 * num_prompts
    num_sampled = [2] * 100 + [4] * 150 + [0] * num_prompts
    for _ in range(8):
        steps.run(output, num_sampled)
    counts = steps.controller.acceptance.counts
    assert max(map(sum, counts)) <= 32
    assert [sum(column) for column in zip(*counts, strict=True)] == [0, 100, 0, 150]


def test_dropped_drafts_count_as_a_step_without_drafts(steps: ObservedSteps) -> None:
    output = make_output({"a": 0})
    steps.observer._next_length = 5
    steps.observer.observe_schedule(output)
    steps.observer.observe_update(output, make_results(output, [1]))
    assert steps.controller.steps == [(1, 0, None)]
    assert steps.controller.acceptance.counts == [()]


def test_length_of_a_step_is_that_of_the_schedule_before(steps: ObservedSteps) -> None:
    """With asynchronous scheduling, the next step is scheduled before the results arrive."""
    first = make_output({"a": 0}, num_spec_tokens_to_schedule=3)
    second = make_output({"a": 3}, num_spec_tokens_to_schedule=5)
    steps.observer.observe_schedule(first)
    steps.observer.observe_schedule(make_output({}, num_spec_tokens_to_schedule=1))
    steps.observer.observe_schedule(second)
    steps.observer.observe_update(first, make_results(first, [1]))
    steps.observer.observe_update(second, make_results(second, [2]))
    assert [length for _, length, _ in steps.controller.steps] == [0, 3]
    assert steps.controller.schedules == [1, 1]


def simulate_engine(
    num_steps: int,
    make_step: Callable[[int, dict[str, int]], tuple[Any, float]],
    batch: int = 8,
) -> auto_k.StepObserver:
    """Runs a scheduler whose requests accept two tokens of each draft.

    Args:
        make_step: Returns a step and its seconds without drafts, given its number and the number of
            draft tokens of each request.
    """
    time, length = [0.0], 0
    scheduler = make_scheduler()
    observer = auto_k.StepObserver(scheduler, make_options(), clock=lambda: time[0])
    for number in range(num_steps):
        names = {str(i): length for i in range(batch)}
        output, seconds = make_step(number, names)
        next_length = scheduler.dynamic_sd_lookup[len(output.num_scheduled_tokens)]
        output.num_spec_tokens_to_schedule = next_length
        observer.observe_schedule(output)
        time[0] += seconds + 0.002 * length
        num_sampled = [1 + min(length, 2)] * batch
        num_sampled += [0] * (len(output.num_scheduled_tokens) - batch)
        observer.observe_update(output, make_results(output, num_sampled))
        length = next_length
    return observer


def make_grammar_step(number: int, names: dict[str, int]) -> tuple[Any, float]:
    return make_output(names, has_structured_output_requests=True), 0.015


def make_prefill_step(number: int, names: dict[str, int]) -> tuple[Any, float]:
    """Nine of ten steps have a prefill, of 50 to 2,000 tokens."""
    output = make_output(names)
    num_tokens = random.Random(number).randrange(50, 2000) if number % 10 else 0
    if num_tokens:
        output.num_scheduled_tokens["prompt"] = num_tokens
        output.total_num_scheduled_tokens += num_tokens
    return output, 0.01 + 2e-5 * num_tokens


@pytest.mark.parametrize("make_step", [make_grammar_step, make_prefill_step])
def test_permanent_grammar_or_prefill_does_not_prevent_drafts(make_step: Any) -> None:
    changes: list[Any] = []
    original = auto_k.DraftLengthMetrics.observe_change
    auto_k.DraftLengthMetrics.observe_change = lambda self, *change: changes.append(change)  # type: ignore[method-assign]
    try:
        simulate_engine(600, make_step)
    finally:
        auto_k.DraftLengthMetrics.observe_change = original  # type: ignore[method-assign]
    assert changes
    assert changes[-1][1] > 0


def test_start_is_logged_with_lengths_and_number_of_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = make_scheduler()
    graphs = scheduler.vllm_config.compilation_config
    with caplog.at_level(logging.INFO, logger="vllm.ngram_npu"):
        auto_k.StepObserver(scheduler, make_options())
        graphs.cudagraph_mode, graphs.cudagraph_capture_sizes = 2, DEFAULT_SIZES
        auto_k.StepObserver(scheduler, make_options())
    start = (
        "ngram_npu: k='auto': each step drafts 0, 3 or 5 tokens per request, whichever generates "
        "most tokens per second as measured while the engine runs, at first 0; vLLM captures "
    )
    assert caplog.messages == [
        start + "0 full graphs for decode steps",
        start + "15 full graphs for decode steps",
    ]


def test_gauges_exist_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(auto_k, "DraftLengthMetrics", lambda config, names: started.append(names))
    auto_k.StepObserver(make_scheduler(), make_options())
    assert started == [["1-1", "2-2", "3-4", "5-8", "9-16"]]


def test_measurements_are_logged_once_if_no_tokens_are_drafted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make_step(number: int, names: dict[str, int]) -> tuple[Any, float]:
        if number in (1, 2):
            return make_output(names, num_scheduled_tokens=dict.fromkeys(names, 50)), 0.01
        return make_output(names), 0.003

    with caplog.at_level(logging.INFO, logger="vllm.ngram_npu"):
        simulate_engine(1500, make_step)
    _, line = caplog.messages
    assert line.startswith(
        "ngram_npu: k='auto': still drafts no tokens after 500 steps; batch sizes 5-8: with 3 "
        "draft tokens a step takes 3.00 times as long and generates 3."
    )
    assert line.endswith("; 2 steps in which no request generated tokens were ignored")


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
    results = make_results(output, [1])
    arguments = {"scheduler_output": output, "model_runner_output": results}
    assert scheduler.update_from_output(**arguments) == "outputs"
    assert scheduler.update_from_output(output, model_runner_output=results) == "outputs"
    assert get_hooks(scheduler).observer is observer, "expected no error in the observer"
    assert controller.schedules == [1]
    assert [(batch, length) for batch, length, _ in controller.steps] == [(1, 0)]


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
        results = make_results(output, [1] * batch)
        scheduler.schedule()
        if is_on:
            get_hooks(scheduler).observer.observe_schedule(output)
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
    rng = random.Random(1)

    def make_step(number: int, names: dict[str, int]) -> tuple[Any, float]:
        jump = rng.choice([-1e9, -5, 5, 1e9]) if rng.random() < 0.1 else 0.0
        return make_output(names), 0.02 + jump

    observer = simulate_engine(1000, make_step)
    assert observer.controller.table[8] > 0


def test_scheduler_without_option_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch, is_auto=False)
    assert scheduler.dynamic_sd_lookup == TABLE
    assert get_hooks(scheduler).observer is None


def test_error_in_observer_ends_drafts_but_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_wrapped_scheduler(monkeypatch)
    scheduler.dynamic_sd_lookup[:] = [K] * 17
    output = scheduler.schedule()
    results = make_results(output, [1])
    del output.total_num_scheduled_tokens
    with caplog.at_level(logging.ERROR, logger="vllm.ngram_npu"):
        assert scheduler.update_from_output(output, results) == "outputs"
    assert scheduler.dynamic_sd_lookup == [0] * 17
    assert "k='auto' is off" in caplog.text
    assert scheduler.update_from_output(output, results) == "outputs"


def test_change_of_draft_length_is_logged_and_exported(caplog: pytest.LogCaptureFixture) -> None:
    observer = auto_k.StepObserver(make_scheduler(), make_options())
    exported: list[Any] = []
    observer._metrics.observe_change = lambda *values: exported.append(values)  # type: ignore[method-assign]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm.ngram_npu"):
        observer._report_change(Change(9, 16, 0, 3, 1.25, 1.25))
        observer._report_change(Change(9, 16, 3, 0, 1.1, 1.0))
    assert exported == [("9-16", 3, 1.25), ("9-16", 0, 1.0)]
    assert caplog.messages == [
        "ngram_npu: k='auto': batch sizes 9-16: draft length 0 -> 3: 1.25 times as many tokens per "
        "second are expected",
        "ngram_npu: k='auto': batch sizes 9-16: draft length 3 -> 0: 1.10 times as many tokens per "
        "second are expected",
    ]


def make_graph(num_tokens: int, uniform_token_count: int | None, **values: int) -> Any:
    values = {"num_active_loras": 0, "num_ubatches": 1} | values
    values["num_reqs"] = num_tokens // uniform_token_count if uniform_token_count else 0
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


def test_graphs_that_are_not_chosen_are_removed() -> None:
    uniform = [make_graph(6 * batch, 6) for batch in range(12, 0, -1)]
    piecewise = make_graph(72, None)
    compilation = SimpleNamespace(cudagraph_mode=2, cudagraph_capture_sizes=[6, 12, 24, 48, 64, 72])
    manager = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compilation),
        max_num_reqs=12,
        _capture_descs={1: [*uniform], 2: [piecewise]},
        _candidates={(70, 0): [uniform[0], piecewise], (50, 0): [uniform[3], piecewise]},
    )
    auto_k.remove_graphs(manager)
    assert [graph.num_reqs for graph in manager._capture_descs[1]] == [12, 4, 2, 1]
    assert manager._capture_descs[2] == [piecewise]
    assert manager._candidates == {(70, 0): [uniform[0], piecewise], (50, 0): [piecewise]}
