"""Runs every drafter in a fake of its runner, with a scan, an index, a ladder and a store. The
drafts must equal the reference's, however the runner assigns and moves rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import (
    CPU,
    LENGTH,
    ROWS,
    STORE,
    V1,
    V2,
    WORDS,
    Ascend,
    Engine,
    K,
    OperatorRecorder,
    Request,
    V1Async,
    V2Neural,
    make_adapter,
    make_config,
    make_input_batch,
    run_random_steps,
)
from ngram_npu import _C, NgramConfig
from ngram_npu import NgramProposer as CoreProposer
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer, plugin, v1_device, v2
from ngram_npu.engines.vllm.v2 import RowLookup
from ngram_npu.ops import workspace_size
from ops.reference.drafting import compute_draft

LATEST = {"match_policy": "latest"}
DRAFTERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "v1 scan": (V1, {"engine": "scan"}),
    "v1 index": (V1, {"engine": "index"}),
    "v1 index, latest": (V1, {"engine": "index", **LATEST}),
    "v1 async scan": (V1Async, {"engine": "scan"}),
    "v1 async index": (V1Async, {"engine": "index"}),
    "v1 async padded": (V1Async, {"engine": "scan", "drafts": "padded"}),
    "v1 async padded index": (V1Async, {"engine": "index", "drafts": "padded"}),
    "ascend scan": (Ascend, {}),
    "v2 scan": (V2, {"engine": "scan"}),
    "v2 index": (V2, {"engine": "index"}),
    "v2 index, overlap": (V2, {"engine": "index", "overlap": True}),
    "v2 scan, earliest": (V2, {"engine": "scan", "match_policy": "earliest"}),
}


@pytest.fixture
def full_index_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes each prompt completely before its first draft, even where a scan would be cheap."""
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)


def pad_draft(draft: list[int], engine: Engine, name: str) -> list[int]:
    newest = engine.alive[name].tokens[-1]
    return draft + [newest] * (K - len(draft)) if engine.pads else draft


@pytest.mark.usefixtures("full_index_budget")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_drafts_equal_the_reference(name: str, seed: int) -> None:
    engine_class, options = DRAFTERS[name]
    engine = engine_class(**options)
    is_latest = engine_class is V2 or "match_policy" in options
    policy = int(is_latest and options.get("match_policy") != "earliest")
    overlap = options.get("overlap", False)
    max_len = 2 * LENGTH if isinstance(engine, V2) else LENGTH
    num_drafts = 0
    for samples, drafts in run_random_steps(engine, seed):
        for request, tokens in samples.items():
            text = engine.alive[request].tokens
            draft = compute_draft(text, 2, 4, K, policy, overlap, max_len)[0] if tokens else []
            assert drafts[request] == pad_draft(draft, engine, request)
            num_drafts += bool(draft)
    assert num_drafts > 60
    if options.get("engine") == "index":
        engine.index.check_integrity()
        statistics = engine.index.statistics
        assert statistics.rows_indexed > 0.9 * num_drafts
        assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0


def make_ladder_drafts(
    engine: Engine, samples: dict[str, list[int]], probability: float | None
) -> tuple[list[list[int]], Any]:
    """Returns the drafts and their costs from a new index of the requests' texts."""
    ladder = NgramConfig(k=K, sizes="ladder", min_draft_probability=probability, max_len=LENGTH)
    texts = [engine.alive[name].tokens for name in samples]
    rows = np.zeros((len(texts), LENGTH), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([*map(len, texts)], np.int32)
    counts = np.array([*map(len, samples.values())], np.int32)
    costs = None if probability is None else np.zeros((len(texts), K), np.uint8)
    drafts = CoreProposer(ladder).propose(rows, lengths, num_sampled=counts, draft_costs=costs)
    pairs = zip(drafts.draft_token_ids.tolist(), drafts.num_draft_tokens.tolist(), strict=True)
    return [draft[:n] for draft, n in pairs], costs


@pytest.mark.usefixtures("full_index_budget")
@pytest.mark.parametrize("probability", [None, 0.177])
@pytest.mark.parametrize(
    ("engine_class", "options", "truncates"),
    [
        (V1, {}, True),
        (V1Async, {"drafts": "trimmed"}, True),
        (V1Async, {"drafts": "padded"}, False),
        (V2, {}, False),
        (V2, {"adaptive": True}, True),
    ],
)
def test_ladder_drafts_equal_those_of_a_new_index(
    engine_class: Any, options: Any, truncates: bool, probability: float | None
) -> None:
    """A draft is truncated by its probability unless the runner verifies all ``K`` tokens. In V2, a
    truncated draft is padded with its continuation."""
    engine = engine_class(lookup="ladder", min_draft_probability=probability, **options)
    threshold = probability if truncates else None
    lengths = []
    for samples, drafts in run_random_steps(engine, 4):
        expected, costs = make_ladder_drafts(engine, samples, threshold) if samples else ([], None)
        lengths += [len(draft) for draft in expected if draft]
        if engine.pads and truncates:
            expected, _ = make_ladder_drafts(engine, samples, None)
        for name, draft in zip(samples, expected, strict=True):
            assert drafts[name] == pad_draft(draft, engine, name)
        if costs is not None and engine_class is V2:
            confidence = engine.speculator.draft_token_confidence_probs
            assert (confidence.dtype, confidence.shape) == (torch.float32, (ROWS, K))
            probabilities = 2 ** (costs / -16.0)
            assert confidence[: len(samples)].numpy() == pytest.approx(probabilities, rel=1e-5)
    assert len(lengths) > 60
    assert (min(lengths) < K) == (truncates and probability is not None)
    engine.index.check_integrity()
    assert engine.index.statistics.rebuilds_options == 0
    if engine_class is V2:
        has_confidence = truncates and probability is not None
        assert engine.speculator.enable_adaptive_verification == has_confidence
        assert hasattr(engine.speculator, "draft_token_confidence_probs") == has_confidence


# Stores.


def step_with_words(engine: Engine, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs steps in which ``a`` samples ``WORDS``, then a step in which each of ``others`` samples
    the first three words. Returns the drafts of the last step."""
    for begin in range(0, 40, 4):
        engine.step({"a": WORDS[begin : begin + 4]})
    return engine.step(dict.fromkeys(others, WORDS[:3]))


def get_first_tokens(engine: Engine, drafts: dict[str, list[int]]) -> list[Any]:
    """Returns the first token of each draft, or None if it is empty or only padding."""
    newest = WORDS[2]
    return [None if draft in ([], [newest] * K) else draft[0] for draft in drafts.values()]


@pytest.mark.usefixtures("_wrap_add_requests")
@pytest.mark.parametrize("engine_class", [V1Async, V2, V2Neural])
def test_store_shares_text_within_a_scope(
    engine_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_class(**STORE)
    message = "requests of one cache_salt, LoRA adapter and extra_args['ngram_npu_scope'] draft"
    assert message in caplog.text
    engine.begin(Request("a", [1], "t"), Request("b", [2], "t"), Request("c", [3], "u"))
    engine.begin(Request("d", [4], "t", make_adapter(1, "x")), Request("e", [5], "t", None, "salt"))
    engine.begin(Request("f", [6]))
    if engine_class is V2Neural:
        engine.drafter.neural_acceptance[:] = 1  # as if no neural draft had been accepted
        engine.speculator.drafts[:] = WORDS[2]
        engine.drafter.neural_acceptance[:, 1] = 1 + K
    drafts = step_with_words(engine, tuple("bcdef"))
    if engine_class is V2Neural:
        assert [drafts[name] for name in "cdef"] == [[WORDS[2]] * K] * 4
    assert get_first_tokens(engine, drafts) == [WORDS[3], None, None, None, None]
    if engine_class is not V1Async:
        assert get_first_tokens(engine, {"b": drafts["b"]}) == [WORDS[3]]
    engine.end("b")
    engine.begin(Request("g", [7], "v"))  # in the row and the slot of b
    assert get_first_tokens(engine, engine.step({"g": WORDS[:3]})) == [None]
    engine.store.check_integrity()


def test_store_receives_output_of_rows_whose_prompts_are_not_indexed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 1)
    engine = V1(length=400, **STORE)
    engine.begin(Request("a", [*range(100, 400)]), Request("b", [1]))
    for begin in range(0, 40, 4):
        engine.step({"a": WORDS[begin : begin + 4], "b": []})
    assert engine.drafter.engine._num_behind > 0
    assert engine.store.statistics.tokens_inserted == 40
    assert engine.step({"a": [], "b": WORDS[:3]})["b"][0] == WORDS[3]
    assert engine.store.statistics.drafts == 1


FINISH_STORE = {**STORE, "store": "finish"}


def test_synchronous_runner_treats_absent_requests_as_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(INDEX_POLICY, "max_absent_steps", 4)
    engine = V1(**FINISH_STORE)
    engine.begin(Request("a", [9]), Request("b", [1]))
    step_with_words(engine)
    assert engine.store.statistics.tokens_inserted == 0
    for step in range(9):
        engine.step({"b": [90 + step]})
    assert engine.store.statistics.tokens_inserted == 40


def test_asynchronous_runner_stores_finished_requests_but_not_preempted_ones() -> None:
    engine = V1Async(**FINISH_STORE)
    engine.begin(Request("a", [9]), Request("b", [1]))
    step_with_words(engine, others=("b",))  # a is preempted
    assert engine.store.statistics.open_slots == 2
    engine.step({"b": [3], "a": [90, 91]})
    assert engine.store.statistics.tokens_inserted == 0
    engine.end("a")
    engine.step({"b": [4]})
    assert engine.store.statistics.tokens_inserted == 42


@pytest.mark.usefixtures("_wrap_add_requests")
def test_v2_removed_request_is_stored_in_next_step_or_when_idle() -> None:
    engine = V2(**FINISH_STORE)
    engine.begin(Request("a", [1]), Request("b", [2]))
    step_with_words(engine)
    engine.end("a")
    assert engine.step({"b": [3]})["b"] == [3] * K
    assert engine.store.statistics.tokens_inserted == 40
    assert engine.step({"b": WORDS[:3]})["b"][0] == WORDS[3]
    # Drafts of the store are padded too, because vLLM's model reads every position.
    assert engine.step({"b": WORDS[37:39]})["b"] == [WORDS[39]] + [WORDS[38]] * (K - 1)
    assert engine.req_states.remove_request("unknown") is None
    engine.end("b")
    assert engine.store.statistics.tokens_inserted == 40 + 1 + 3 + 2


def run_request_and_read_store(engine: V2, length: int = 1) -> list[list[int]]:
    """Runs a request that samples 7, 8 and 9 in three steps and ends one step later. Returns the
    texts in the store."""
    engine.begin(Request("one", [*range(length)]))
    for token in (7, 8, 9):
        engine.step({"one": [token]})
    engine.step({})
    engine.end("one")
    engine.begin(Request("next", [4]))
    engine.step({"next": []})
    return [text.tolist() for _, text in engine.store.texts()]


@pytest.mark.usefixtures("_wrap_add_requests")
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_v2_text_sampled_after_unreported_stop_is_not_stored(batches: int) -> None:
    """Another process finds stop strings, so the runner removes the request up to ``batches - 1``
    steps late. The drafter itself detects ``max_model_len`` and stores the text up to it."""
    assert run_request_and_read_store(V2(**STORE, batches=batches)) == [[7, 8, 9][: 4 - batches]]
    assert run_request_and_read_store(V2(**STORE, batches=batches), LENGTH - 3) == [[7, 8, 9]]
    engine = V2(**STORE, batches=batches)
    engine.req_states.max_model_len = 3  # vLLM may lower it
    assert run_request_and_read_store(engine) == [[7, 8]] if batches < 3 else [[7]]


@pytest.mark.usefixtures("_wrap_add_requests")
def test_v2_dummy_run_does_not_count_as_a_step() -> None:
    """With two batches in flight, the tokens of the last step are dropped when the request is
    removed. A dummy run in between must not make them old enough to be stored."""
    engine = V2(**STORE, batches=2, adaptive=True)
    engine.begin(Request("ended", [1, 2, 3]))
    engine.step({"ended": [7, 8]})
    engine.propose([engine.get_row("ended")], {"ended": [1]}, dummy_run=True)
    engine.end("ended")
    engine.begin(Request("next", [4]))
    engine.step({"next": [5]})
    assert engine.store.statistics.tokens_inserted == 0


def test_v2_requests_without_request_data_have_separate_scopes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plugin did not wrap this runner's ``add_requests``, so each request has its own scope."""
    monkeypatch.setattr(RowLookup, "has_request_data", True)
    engine = V2(**STORE)
    engine.begin(Request("one", [1, 2, 3]), Request("other", [1, 2, 3]))
    engine.step({"one": [7, 8], "other": [7, 8]})
    assert len(engine.store.scopes.keys() - {0}) == 2


def test_store_in_unknown_runner_raises() -> None:
    class UnknownRunner:
        def _update_states(self, output: Any) -> None: ...

        def add_requests(self, output: Any) -> None: ...

    module: Any = SimpleNamespace(GPUModelRunner=UnknownRunner)
    members = vars(UnknownRunner).copy()
    plugin.request_scopes.install_v1(module)
    plugin.install_request_data(module)
    assert vars(UnknownRunner) == members
    for runner in (UnknownRunner(), None):
        with pytest.raises(ValueError, match=r"store: expected a runner .*_update_states"):
            v1_device.AsyncNgramProposer(make_config(**STORE), CPU, runner)
    with pytest.raises(ValueError, match=r"store: expected a runner .*Runner.add_requests"):
        V2(**STORE)


# Device operations per step, and log messages.


@pytest.mark.parametrize(
    ("engine_class", "options"),
    [
        (V1Async, {"drafts": "padded"}),
        (V1Async, {"drafts": "padded", "engine": "index"}),
        (V1Async, {}),
        (Ascend, {}),
    ],
)
def test_step_does_not_wait_for_device(
    monkeypatch: pytest.MonkeyPatch, engine_class: Any, options: dict[str, Any]
) -> None:
    engine = engine_class(**options)
    engine.begin(Request("a", [1, 2, 1]), Request("b", [3]))
    samples = {"a": [2], "b": []}
    engine.step(samples)
    arguments = engine.write_rows(samples)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("expected no wait in a step")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "pin_memory"):
        monkeypatch.setattr(torch.Tensor, name, fail)
    for name in ("current_stream", "Stream", "Event", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, fail)
    engine.call_drafter(*arguments, K)


@pytest.mark.parametrize(
    ("engine_class", "expected"),
    [
        (V2, ["ngram_npu.ngram_propose_"]),
        (
            V2Neural,
            [
                *("ngram_npu.ngram_propose", "aten.add.Tensor", "aten.sub_.Tensor"),
                "ngram_npu.merge_drafts_",
            ],
        ),
    ],
)
def test_v2_step_on_device_runs_only_lookup_and_merge(
    engine_class: Any, expected: list[str]
) -> None:
    """The merge only runs beside a neural drafter. Nothing is copied between host and device."""
    engine = engine_class(engine="scan")
    engine.begin(Request("a", [1, 2, 1]))
    engine.step({"a": [2]})
    batch, num_sampled = make_input_batch([engine.get_row("a")]), torch.ones(1, dtype=torch.int32)
    counts = num_sampled, num_sampled - 1
    last_tokens = engine.req_states.last_sampled_tokens
    with OperatorRecorder() as recorder:
        engine.speculator.propose(batch, *[None] * 4, *counts, last_tokens, *[None] * 3)
    assert [name for name in recorder.names if not re.search("slice|empty", name)] == expected


@pytest.mark.parametrize(
    ("engine_class", "module", "op"),
    [(V1Async, v1_device, "ngram_step_"), (V2, v2, "ngram_propose_")],
)
def test_workspace_is_allocated_once(
    monkeypatch: pytest.MonkeyPatch, engine_class: Any, module: Any, op: str
) -> None:
    created_workspaces: list[torch.Tensor] = []
    make_workspace = v1_device.make_workspace

    def make_on_cpu(op: str, options: Any, device: torch.device) -> Any:
        assert make_workspace(op, options, device) is None  # the CPU needs no workspace
        workspace: Any = make_workspace(op, options, torch.device("meta"))
        assert workspace.shape == (workspace_size(op, ROWS),)
        created_workspaces.append(torch.zeros_like(workspace, device="cpu"))
        return created_workspaces[-1]

    monkeypatch.setattr(module, "make_workspace", make_on_cpu)
    engine = engine_class(engine="scan")
    engine.begin(Request("a", [1]))
    with OperatorRecorder() as recorder:
        engine.step({"a": [1]})
        engine.step({"a": [2]})
    workspaces = [kw["workspace"] for name, kw in recorder.calls if name == f"ngram_npu.{op}"]
    assert [*map(id, workspaces)] == [*map(id, created_workspaces * 2)]


BOUNDS_HINT = (
    "lookup=ladder sets the n-gram lengths; prompt_lookup_min=2 prompt_lookup_max=4 has no effect"
)
BESIDE_HINT = (
    "StandaloneARSpeculator where it promises more accepted tokens than that request's neural "
    "drafts had, and at least 0.5 (beside_threshold)"
)
PROBABILITY = {"lookup": "ladder", "min_draft_probability": 0.177}
PROBABILITY_HINT = (
    "ngram_npu: min_draft_probability=0.177 ends no draft here: vLLM verifies "
    f"num_speculative_tokens={K} tokens of every request, however many are likely"
)

STEP_TIMES = {"lookup": "ladder", "step_times_file": "example-8b-l4"}
COST_HINT = "min_draft_probability follows from the step times of 4 requests in step_times_file"


@pytest.mark.parametrize(
    ("engine_class", "options", "expected_text", "expected_warnings"),
    [
        (V1, {"num_threads": 0}, "num_threads=as torch's ", []),
        (V1, STEP_TIMES, "): lookup=ladder min_draft_probability=0.0", [COST_HINT, BOUNDS_HINT]),
        (V1, PROBABILITY, "): lookup=ladder min_draft_probability=0.177 num_spec", [BOUNDS_HINT]),
        (V1, {"length": 8192}, " engine=scan ", []),
        (V1, {"length": 8193}, " engine=index ", []),
        (V1, {"length": 8193, "bounds": (2, 10)}, " engine=scan ", []),
        (V1Async, {"length": 8193}, " engine=index device=cpu num_threads=1 ", []),
        (V1Async, {}, "(method ngram_gpu): prompt_lookup_min=2 prompt_lookup_max=4 num_spec", []),
        (
            *(V1Async, {"drafts": "padded", **PROBABILITY}, " drafts=padded; "),
            [PROBABILITY_HINT, BOUNDS_HINT],
        ),
        (V2, {"k": 3}, f"ngram_npu {_C.__version__} drafts for this engine (method ngram_gpu,", []),
        (V2, {"k": 3}, "num_speculative_tokens=3 match_policy=latest overlap=False max_model", []),
        (V2, {"length": 8193}, " max_model_len=8193 engine=index on the host ", []),
        (V2, {"draft_on": "host"}, "engine=scan on the host", []),
        (V2Neural, {"beside_threshold": 0.5}, "V2 runner, with n-gram drafts): p", [BESIDE_HINT]),
    ],
)
def test_engine_start_logs_settings_and_ignored_options(
    engine_class: Any,
    options: Any,
    expected_text: str,
    expected_warnings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine_class(**options)
    settings, *warnings = caplog.messages
    assert expected_text in settings
    for warning, expected in zip(warnings, expected_warnings, strict=True):
        assert expected in warning


# The acceptance that the option `metrics` counts.


@pytest.mark.parametrize("name", ["v1 scan", "v1 index", "v1 async index", "v2 scan", "v2 index"])
def test_acceptance_is_counted_by_match_length_and_position(name: str) -> None:
    """A draft is counted only if its row then grew by exactly the sampled tokens."""
    engine_class, options = DRAFTERS[name]
    engine = engine_class(**options, metrics=True)
    policy = int(engine_class is V2)
    expected = np.zeros((2, 5, K), np.int64)
    # By row: its length, and the match length and number of tokens of its draft.
    last_drafts: dict[int, tuple[int, int, int]] = {}
    num_rows = 0
    for samples, _ in run_random_steps(engine, 0, 120):
        for position, (request, tokens) in enumerate(samples.items()):
            row = engine.get_row(request) if engine_class is V2 else position
            text = engine.alive[request].tokens
            length, match_len, num_drafted = last_drafts.pop(row, (0, 0, 0))
            if not tokens:
                continue
            if length == len(text) - len(tokens):
                expected[0, match_len, :num_drafted] += 1
                expected[1, match_len, : min(num_drafted, len(tokens) - 1)] += 1
            draft, match_len = compute_draft(text, 2, 4, K, policy, False, LENGTH)[:2]
            last_drafts[row] = len(text), match_len, len(draft)
            num_rows += 1
    stats = engine.drafter._stats
    assert stats._sums["rows"] == num_rows
    is_indexed = options.get("engine") == "index"
    assert stats.rows_indexed > 0.9 * num_rows if is_indexed else stats.rows_indexed == 0
    tokens = stats.acceptance.read_and_reset()
    assert tokens.tolist() == expected.tolist()
    num_verified, num_accepted = tokens.sum(axis=(1, 2))
    assert num_verified > num_accepted > 50
    assert stats.acceptance.read_and_reset().sum() == 0


@pytest.mark.parametrize("engine_class", [V1Async, V2])
def test_metrics_are_off_by_default(engine_class: Any) -> None:
    assert engine_class().drafter._stats is None
    assert V1().drafter._stats.acceptance is None


def test_first_rank_of_each_pipeline_stage_has_statistics() -> None:
    for rank in (1, 2):  # ranks 0 and 1 are a stage; rank 2 is the first one of the next stage
        drafter = NgramProposer(make_config(method="custom_class", rank=rank, ranks=2))
        assert (drafter._stats is None) == (rank == 1)
