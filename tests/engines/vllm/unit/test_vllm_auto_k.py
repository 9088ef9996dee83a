"""Tests the option ``k="auto"``: vLLM's table of draft lengths, and the observed step times.
``test_vllm_scheduler.py`` tests how the observer is attached to a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import call, create_autospec

import pytest
from fake_engine import make_config
from ngram_npu.draft_acceptance import Acceptance
from ngram_npu.draft_length import Change, DraftLengthController
from ngram_npu.engines.vllm import auto_k
from ngram_npu.engines.vllm.options import read_options

K, MAX_NUM_SEQS = 5, 16
DEFAULT_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def make_auto_config(**sizes: int) -> Any:
    vllm_config = make_config(k=K, rows=MAX_NUM_SEQS)
    vllm_config.additional_config = {"ngram_npu": {"k": "auto"}}
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1} | sizes
    vars(vllm_config.parallel_config).update(sizes)
    graphs = {"cudagraph_mode": None, "cudagraph_capture_sizes": None}
    vllm_config.compilation_config = SimpleNamespace(**graphs)
    return vllm_config


def make_observer(clock: Any = None, **graphs: Any) -> auto_k.StepObserver:
    vllm_config = make_auto_config()
    vars(vllm_config.compilation_config).update(graphs)
    table = [0, *[K] * (MAX_NUM_SEQS - 2), 3, 0]
    scheduler = SimpleNamespace(vllm_config=vllm_config, dynamic_sd_lookup=table)
    options = read_options(vllm_config, "v2")
    return auto_k.StepObserver(scheduler, options, *([clock] if clock else []))


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


@pytest.fixture
def steps() -> ObservedSteps:
    return ObservedSteps()


class ObservedSteps:
    """Steps that an observer passes to a controller."""

    def __init__(self) -> None:
        self.time = 100.0
        self.observer = make_observer(lambda: self.time)
        self.controller = create_autospec(DraftLengthController, instance=True)
        self.controller.acceptance = create_autospec(Acceptance, instance=True)
        self.observer.controller = self.controller

    def run(self, output: Any, num_sampled: Sequence[int] = (), seconds: float = 0.01) -> None:
        """Runs a step whose drafts were made by the step before."""
        drafts = output.scheduled_spec_decode_tokens
        self.observer._next_length = max(map(len, drafts.values()), default=0)
        self.observer.observe_schedule(output)
        self.time += seconds
        self.observer.observe_update(output, make_results(output, num_sampled))

    @property
    def steps(self) -> list[tuple[int, int, float | None]]:
        """Returns the batch size, draft length and time of each step."""
        return [step.args for step in self.controller.observe_step.call_args_list]

    @property
    def counts(self) -> list[tuple[int, ...]]:
        """Returns for each step the number of requests by number of accepted tokens."""
        return [tuple(step.args[1]) for step in self.controller.acceptance.observe.call_args_list]


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


def test_table_is_set_before_vllm_validates_the_configuration() -> None:
    vllm_config = make_auto_config()
    for _ in range(2):  # vLLM may validate a configuration again, after it turned tuples into lists
        auto_k.set_table(vllm_config)
        table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        assert [*map(tuple, table)] == [(1, 14, 5), (15, 15, 3), (16, 16, 0)]
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [*map(list, table)]


@pytest.mark.parametrize("option", ["table", "pipeline_parallel_size", "data_parallel_size"])
def test_configuration_that_contradicts_auto_raises_before_the_model_is_loaded(option: str) -> None:
    message = f"k: expected {option} 1 with 'auto', got 2"
    vllm_config = make_auto_config(**{option: 2})
    if option == "table":
        name, table = "num_speculative_tokens_per_batch_size", [[1, 16, 3]]
        setattr(vllm_config.speculative_config, name, table)
        message = f"{name}: expected none with k='auto', got {table}"
    with pytest.raises(ValueError) as error:
        auto_k.set_table(vllm_config)
    assert str(error.value) == f"ngram_npu: {message}"
    vllm_config.additional_config = {}
    auto_k.set_table(vllm_config)


def test_configuration_without_auto_table_or_speculation_gets_no_table() -> None:
    configs = [make_auto_config() for _ in range(3)]
    configs[0].additional_config = {}
    del configs[1].speculative_config.num_speculative_tokens_per_batch_size  # of an older vLLM
    configs[2].speculative_config = None
    for vllm_config in configs:
        before = str(vllm_config)
        auto_k.set_table(vllm_config)
        assert str(vllm_config) == before


@pytest.mark.parametrize(
    ("length", "max_num_seqs", "sizes", "chosen"),
    [
        (5, 256, DEFAULT_SIZES, [1, 2, 4, *range(11, 84, 8)]),
        (5, 12, DEFAULT_SIZES, [1, 2, 4, 12]),
        (
            0,
            512,
            [*range(96, 305, 8)],
            [*range(96, 129, 8), 144, 160, 176, 192, 208, 224, 240, 256, 280, 304],
        ),
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
    times = [None if t is None else round(t, 6) for _, _, t in steps.steps]
    assert [(b, k) for b, k, _ in steps.steps] == [(2, k) for k in drafts]
    assert times == [None, 0.011, None, 0.013, 0.014, None]


def test_step_without_decoding_request_is_not_observed_but_begins_the_next_time(
    steps: ObservedSteps,
) -> None:
    steps.run(make_output({"a": 0}), [1])
    steps.run(make_output({}), seconds=5.0)
    steps.run(make_output({"a": 0}, num_scheduled_tokens={"a": 64}), [], seconds=1000.0)  # idle
    steps.run(make_output({"a": 0}), [1], seconds=0.25)
    assert steps.steps == [(1, 0, None), (1, 0, 0.25)]


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
    (step,) = steps.controller.observe_step.call_args_list
    assert (step.kwargs["num_decodes"], step.kwargs["kind"]) == expected


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("num_prompts", [0, 1])
def test_accepted_tokens_are_counted_in_every_step(
    steps: ObservedSteps, grammar: bool, num_prompts: int
) -> None:
    """A draft that a grammar shortened counts as one whose next token was rejected."""
    output = make_output({"a": 3, "b": 3, "c": 3, "d": 3}, has_structured_output_requests=grammar)
    if grammar:
        output.scheduled_spec_decode_tokens["b"] = [5]
        output.num_scheduled_tokens["b"] = 2
    output.num_scheduled_tokens |= {f"prompt {i}": 500 for i in range(num_prompts)}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    steps.run(output, [1, 2, 4, 1] + [1] * num_prompts)
    assert steps.counts == [(2, 1, 0, 1)]
    assert steps.steps[0][:2] == (4 + num_prompts, 3)


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
    counts = steps.counts
    assert max(map(sum, counts)) <= 32
    assert [sum(column) for column in zip(*counts, strict=True)] == [0, 100, 0, 150]


def test_dropped_drafts_count_as_a_step_without_drafts(steps: ObservedSteps) -> None:
    output = make_output({"a": 0})
    steps.observer._next_length = 5
    steps.observer.observe_schedule(output)
    steps.observer.observe_update(output, make_results(output, [1]))
    assert steps.steps == [(1, 0, None)]
    assert steps.counts == [()]


def test_length_of_a_step_is_that_of_the_schedule_before(steps: ObservedSteps) -> None:
    """With asynchronous scheduling, the next step is scheduled before the results arrive."""
    first = make_output({"a": 0}, num_spec_tokens_to_schedule=3)
    second = make_output({"a": 3}, num_spec_tokens_to_schedule=5)
    steps.observer.observe_schedule(first)
    steps.observer.observe_schedule(make_output({}, num_spec_tokens_to_schedule=1))
    steps.observer.observe_schedule(second)
    steps.observer.observe_update(first, make_results(first, [1]))
    steps.observer.observe_update(second, make_results(second, [2]))
    assert [length for _, length, _ in steps.steps] == [0, 3]
    assert steps.controller.observe_schedule.call_args_list == [call(1), call(1)]


def test_start_and_changes_are_logged_and_exported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[Any] = []

    class Metrics:
        def __init__(self, vllm_config: Any, batches: Sequence[str]) -> None:
            exported.append([*batches])

        def observe_change(self, *values: Any) -> None:
            exported.append(values)

    monkeypatch.setattr(auto_k, "DraftLengthMetrics", Metrics)
    make_observer()
    observer = make_observer(cudagraph_mode=2, cudagraph_capture_sizes=DEFAULT_SIZES)
    observer._report_change(Change(9, 16, 0, 3, 1.25, 1.25))
    ranges = ["1-1", "2-2", "3-4", "5-8", "9-16"]
    assert exported == [ranges, ranges, ("9-16", 3, 1.25)]
    start = (
        "ngram_npu: k='auto': each step drafts 0, 3 or 5 tokens per request, whichever generates "
        "most tokens per second as measured while the engine runs, at first 0; vLLM captures "
    )
    assert caplog.messages == [
        start + "0 full graphs for decode steps",
        start + "15 full graphs for decode steps",
        "ngram_npu: k='auto': batch sizes 9-16: draft length 0 -> 3: 1.25 times as many tokens per "
        "second are expected",
    ]


def test_measurements_are_logged_once_if_no_tokens_are_drafted(
    steps: ObservedSteps, caplog: pytest.LogCaptureFixture
) -> None:
    steps.controller.describe_measurements.return_value = "measured"
    for _ in range(2):
        steps.run(make_output({"a": 0}, num_scheduled_tokens={"a": 50}))
    for _ in range(2 * auto_k.REPORT_STEPS):
        steps.run(make_output({"a": 0}), [1])
    (line,) = caplog.messages
    assert line == (
        "ngram_npu: k='auto': still drafts no tokens after 500 steps; measured; 2 steps in which "
        "no request generated tokens were ignored"
    )
