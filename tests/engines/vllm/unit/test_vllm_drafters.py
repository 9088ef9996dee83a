"""Runs every drafter in a fake of its runner. The drafts must equal the reference's, however the
runner assigns and moves rows, without and with a store."""

from __future__ import annotations

import itertools
import re
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
    VOCABULARY,
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
    make_params,
    run_random_steps,
)
from ngram_npu import _C, NgramConfig
from ngram_npu import NgramProposer as CoreProposer
from ngram_npu.engines.vllm import NgramProposer, ascend, drafter, plugin, v1
from ngram_npu.engines.vllm.v2 import RowDrafter
from ngram_npu.ops import workspace_size
from ngram_npu.store import PRIVATE_SCOPE, SHARED_SCOPE, scope_of_request
from ops import reference

VLLM_V1: dict[str, Any] = {"min_n": 2, "max_n": 4}
AUTO: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True}
LIMIT: dict[str, Any] = {"max_len": LENGTH, "vocab_size": VOCABULARY}
NO_END: dict[str, Any] = {"min_draft_probability": None}
DRAFTERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "V1": (V1, NO_END, {**AUTO, **LIMIT}),
    "V1, vLLM's": (V1, {"lookup": "ngram"}, {**VLLM_V1, "max_n": 5, **LIMIT}),
    "V1 async": (V1Async, {}, {**AUTO, **LIMIT}),
    "V1 async, vLLM's": (V1Async, {"lookup": "ngram"}, {**VLLM_V1, **LIMIT}),
    "Ascend": (Ascend, {}, {**AUTO, **LIMIT}),
    "Ascend, vLLM's": (Ascend, {"lookup": "ngram"}, {**VLLM_V1, **LIMIT}),
    "V2": (V2, {}, {**AUTO, "vocab_size": VOCABULARY}),
    "V2, vLLM's": (
        V2,
        {"lookup": "ngram"},
        {**VLLM_V1, "match_policy": 1, "vocab_size": VOCABULARY},
    ),
}
"""By name: the fake engine, its options, and the arguments of the reference's lookup."""


class Model:
    """The reference's operators, called with the texts and scopes of a fake engine's requests."""

    def __init__(self, engine: Engine, arguments: dict[str, Any]) -> None:
        self.engine, self.arguments = engine, arguments
        self.store: dict[str, Any] = {}
        if engine.drafter.shared_store is not None:
            names = "slots", "text", "blocks", "table", "allocator"
            self.store = {name: np.array(getattr(engine.store, name)) for name in names}
        if isinstance(engine, V2):
            self.watch_rows(engine)

    def watch_rows(self, engine: V2) -> None:
        """Empties the slot of a row in which a request begins."""
        add_request = engine.req_states.add_request

        def add(**arguments: Any) -> None:
            add_request(**arguments)
            if self.store:
                self.store["slots"][engine.get_row(arguments["req_id"])] = 0

        engine.req_states.add_request = add

    def draft(self, samples: dict[str, list[int]]) -> tuple[list[list[int]], int]:
        """Returns the drafts of a step, and how many of them are from the store."""
        requests = [self.engine.alive[name] for name in samples]
        rows = np.arange(len(requests))
        if isinstance(self.engine, V2):
            rows = np.array([self.engine.get_row(name) for name in samples], np.int64)
        tokens, lengths = np.zeros((ROWS, LENGTH), np.int32), np.zeros(ROWS, np.int32)
        for row, request in zip(rows, requests, strict=True):
            tokens[row, : len(request.tokens)] = request.tokens
            lengths[row] = len(request.tokens)
        counts = np.array([len(new) for new in samples.values()], np.int32)
        step: dict[str, Any] = {"row_indices": rows}
        fill = {"fill": True} if self.engine.pads else {}
        drafts, num_drafts, match_len = reference.ngram_propose(
            *(tokens, lengths), **step, num_sampled=counts, k=K, **self.arguments, **fill
        )
        agreement = np.full(len(requests), -2, np.int32)
        if self.store:
            step["scopes"] = np.array([self.find_scope(request) for request in requests])
            hold_back = not isinstance(self.engine, V1)
            reference.store_append_(
                *(tokens, lengths, counts), **step, **self.store, max_new=K + 1, hold_back=hold_back
            )
            limits = {n: v for n, v in self.arguments.items() if n in ("max_len", "vocab_size")}
            reference.store_propose_(
                *(tokens, lengths, counts),
                **step,
                **{name: self.store[name] for name in ("text", "blocks", "table")},
                draft_token_ids=drafts,
                num_draft_tokens=num_drafts,
                match_len=match_len,
                agreement=agreement,
                **limits,
                **fill,
            )
        lists = drafts.tolist()
        if not self.engine.pads:
            lists = [draft[:n] for draft, n in zip(lists, num_drafts.tolist(), strict=True)]
        return lists, int((agreement != -2).sum())

    def find_scope(self, request: Request) -> int:
        if isinstance(self.engine, V1):  # which does not know the scopes
            return SHARED_SCOPE
        if request.sampling_params.extra_args is not None:
            return PRIVATE_SCOPE
        return scope_of_request(request.cache_salt)


def begin_requests_in_three_scopes(engine: Engine) -> None:
    """Makes each request that begins from now on one of a tenant, one without a tenant, or one that
    shares with nobody."""
    numbers, begin = itertools.count(), engine.begin

    def begin_in_scope(*requests: Request) -> None:
        for request in requests:
            number = next(numbers) % 8
            request.cache_salt = "tenant" if number % 2 else None
            request.sampling_params = make_params(is_stored=number != 4)
        begin(*requests)

    engine.begin = begin_in_scope  # type: ignore[method-assign]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_equal_the_reference(name: str, has_store: bool, seed: int) -> None:
    """Rows begin, end, are swapped, condensed and reused."""
    engine_class, options, arguments = DRAFTERS[name]
    engine = engine_class(**options, **(STORE if has_store else {}))
    begin_requests_in_three_scopes(engine)
    model, num_drafts, num_from_store = Model(engine, arguments), 0, 0
    for samples, drafts in run_random_steps(engine, seed):
        if not samples:
            continue
        expected, from_store = model.draft(samples)
        num_from_store += from_store
        for new_tokens, draft, right in zip(
            samples.values(), drafts.values(), expected, strict=True
        ):
            assert draft == right or (engine.pads and not new_tokens)
            num_drafts += bool(draft) and bool(new_tokens)
    assert num_drafts > 60
    if has_store:
        # A row that moves loses the text that is held back.
        assert num_from_store > (1 if issubclass(engine_class, V1Async) else 10)
        assert engine.store.scopes.keys() <= {SHARED_SCOPE, scope_of_request("tenant")}
        for array_name, array in model.store.items():
            assert np.array_equal(getattr(engine.store, array_name), array)
        engine.store.check_integrity()


@pytest.mark.parametrize("probability", [0.12, 0.5])
@pytest.mark.parametrize("method", ["custom_class", "ngram"])
def test_draft_of_synchronous_runner_ends_by_its_cost(method: str, probability: float) -> None:
    """Without the option, the probability is 0.12."""
    options = {} if probability == 0.12 else {"min_draft_probability": probability}
    engine = V1(**options)
    config = NgramConfig(
        k=K, max_len=LENGTH, vocab_size=VOCABULARY, min_draft_probability=probability
    )
    core = CoreProposer(config)
    for samples, drafts in run_random_steps(engine, 5):
        batch = len(samples)
        if not batch:
            continue
        counts = np.array([*map(len, samples.values())], np.int32)
        expected = core.propose(engine.buffer[:batch], engine.lengths[:batch], num_sampled=counts)
        pairs = zip(expected.draft_token_ids, expected.num_draft_tokens, strict=True)
        assert [*drafts.values()] == [draft[:n].tolist() for draft, n in pairs]


# Stores.


def step_with_words(engine: Engine, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs steps in which ``a`` samples ``WORDS``, then a step in which each of ``others`` samples
    the first three words. Returns the drafts of the last step."""
    for begin in range(0, 40, 4):
        engine.step({"a": WORDS[begin : begin + 4]})
    return engine.step(dict.fromkeys(others, WORDS[:3]))


def get_first_tokens(drafts: dict[str, list[int]]) -> list[Any]:
    """Returns the first token of each draft, or None if it is empty or only padding."""
    newest = WORDS[2]
    return [None if draft in ([], [newest] * K) else draft[0] for draft in drafts.values()]


@pytest.mark.parametrize("engine_class", [V1Async, Ascend, V2, V2Neural])
def test_requests_with_the_same_salt_and_adapter_draft_from_each_other(engine_class: Any) -> None:
    """An adapter's number differs between engines."""
    engine, adapter = engine_class(**STORE), make_adapter(1, "x")
    engine.begin(Request("a", [1], "t", adapter), Request("b", [2], "t", make_adapter(2, "x")))
    engine.begin(Request("c", [3], "u", adapter), Request("d", [4], "t"), Request("e", [5]))
    engine.begin(Request("f", [6], "t", adapter, is_stored=False))
    if engine_class is V2Neural:
        engine.drafter.neural_acceptance[:] = 1  # as if no neural draft had been accepted
        engine.speculator.drafts[:] = WORDS[2]
        engine.drafter.neural_acceptance[:, 1] = 1 + K
    drafts = step_with_words(engine, tuple("bcdef"))
    if engine_class is V2Neural:
        assert [drafts[name] for name in "cdef"] == [[WORDS[2]] * K] * 4
    assert get_first_tokens(drafts) == [WORDS[3], None, None, None, None]
    engine.end("b")
    engine.begin(Request("g", [7], "v"))  # in the row and the slot of b
    assert get_first_tokens(engine.step({"g": WORDS[:3]})) == [None]
    engine.store.check_integrity()


@pytest.mark.parametrize("engine_class", [V1Async, Ascend, V2, V2Neural])
@pytest.mark.parametrize(
    ("scope", "request_options", "is_shared"),
    [
        ("private", {}, False),
        ("private", {"salt": ""}, False),  # vLLM ignores an empty salt
        ("private", {"salt": "t"}, True),
        ("private", {"adapter": make_adapter(1, "x")}, True),
        ("private", {"salt": "t", "is_stored": False}, False),
        ("shared", {}, True),
        ("shared", {"is_stored": False}, False),
    ],
)
def test_option_scope_decides_whether_text_without_keys_is_stored(
    engine_class: Any, scope: str, request_options: dict[str, Any], is_shared: bool
) -> None:
    engine = engine_class(**{**STORE, "scope": scope})
    engine.begin(Request("a", [1], **request_options), Request("b", [2], **request_options))
    if engine_class is V2Neural:
        engine.drafter.neural_acceptance[:] = 1  # as if no neural draft had been accepted
        engine.speculator.drafts[:] = WORDS[2]
    drafts = step_with_words(engine, ("b",))
    assert get_first_tokens(drafts) == [WORDS[3] if is_shared else None]
    assert bool(engine.store.statistics.tokens_held) == is_shared


@pytest.mark.parametrize("engine_class", [V1, V1Async, Ascend])
def test_row_that_moves_and_returns_is_not_stored_twice(engine_class: Any) -> None:
    engine = engine_class(**STORE)
    engine.begin(Request("a", [1]), Request("b", [2]))
    tokens = iter(range(10, 90))
    for order in ("ab", "ba", "ab", "b", "ab", "a", "ba"):
        engine.step({name: [next(tokens)] for name in order})
    stored = [token for _, text in engine.store.texts() for token in text.tolist()]
    assert len(stored) == len(set(stored))
    # A row that moves loses the text that is held back, and here rows move in each step.
    assert len(stored) >= (12 if engine_class is V1 else 1)
    engine.store.check_integrity()


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("engine_class", [V1Async, Ascend, V2])
def test_step_with_fewer_drafts_still_stores_its_text(engine_class: Any, k: int) -> None:
    engine = engine_class(**STORE)
    engine.begin(Request("a", [1]), Request("b", [2]))
    arguments = {"num_speculative_tokens": k} if engine_class is V2 else {"k": k}
    for begin in range(0, len(WORDS), K):
        engine.step({"a": WORDS[begin : begin + K]}, **arguments)
    assert engine.store.statistics.tokens_held == len(WORDS) - K
    assert engine.step({"b": WORDS[:3]})["b"] == WORDS[3 : 3 + K]


def test_neural_draft_is_replaced_by_text_of_the_store() -> None:
    engine = V2Neural(**STORE, vocabulary=VOCABULARY)
    engine.begin(Request("a", [1]))
    for begin in range(0, len(WORDS), K):
        engine.step({"a": WORDS[begin : begin + K]})
    engine.begin(Request("b", [2]))
    for word in WORDS[:20]:  # no neural draft token is accepted
        drafts = engine.step({"b": [word]})
    assert drafts["b"] == WORDS[20 : 20 + K]


def test_store_in_unknown_runner_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnknownRunner:
        def _update_states(self, output: Any) -> None: ...

        def add_requests(self, output: Any) -> None: ...

    monkeypatch.setattr(RowDrafter, "has_request_data", False)
    module: Any = SimpleNamespace(GPUModelRunner=UnknownRunner)
    members = vars(UnknownRunner).copy()
    plugin.request_scopes.install_v1(module)
    plugin.install_request_data(module)
    assert vars(UnknownRunner) == members
    for runner in (UnknownRunner(), None):
        for drafter_class in (v1.AsyncNgramProposer, ascend.AscendNgramProposerNPU):
            with pytest.raises(ValueError, match=r"store: expected a runner .*_update_states"):
                drafter_class(make_config(**STORE), CPU, runner)
    with pytest.raises(ValueError, match=r"store: expected a runner .*Runner.add_requests"):
        V2(**STORE)


# Device operations per step, and log messages.


@pytest.mark.parametrize("options", [{}, STORE])
@pytest.mark.parametrize("engine_class", [V1Async, Ascend])
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


STORE_STEP = [
    *("aten.clamp", "aten.index.Tensor", "ngram_npu.ngram_propose_"),
    *("ngram_npu.store_append_", "ngram_npu.store_propose_"),
]
MERGE_STEP = [
    *("ngram_npu.ngram_propose", "aten.clamp", "aten.index.Tensor", "aten.unsqueeze", "aten.ge"),
    *("aten.masked_fill_", "aten.add.Tensor", "aten.sub_.Tensor", "ngram_npu.merge_drafts_"),
]


@pytest.mark.parametrize(
    ("engine_class", "options", "expected"),
    [
        (V2, {}, ["ngram_npu.ngram_propose_"]),
        (V2, STORE, STORE_STEP),
        (V2Neural, {}, MERGE_STEP),
    ],
)
def test_v2_step_on_device_launches_few_kernels_and_copies_nothing(
    engine_class: Any, options: dict[str, Any], expected: list[str]
) -> None:
    engine = engine_class(**options)
    engine.begin(Request("a", [1, 2, 1]))
    engine.step({"a": [2]})
    batch, num_sampled = make_input_batch([engine.get_row("a")]), torch.ones(1, dtype=torch.int32)
    counts = num_sampled, num_sampled - 1
    last_tokens = engine.req_states.last_sampled_tokens
    with OperatorRecorder() as recorder:
        engine.speculator.propose(batch, *[None] * 4, *counts, last_tokens, *[None] * 3)
    names = [n for n in recorder.names if not re.search("slice|empty|select|eq", n)]
    assert [re.sub(r"(ge|masked_fill_)\..*", r"\1", name) for name in names] == expected


@pytest.mark.parametrize(("engine_class", "op"), [(V1Async, "ngram_step_"), (V2, "ngram_propose_")])
def test_workspace_is_allocated_once(
    monkeypatch: pytest.MonkeyPatch, engine_class: Any, op: str
) -> None:
    engine = engine_class()
    assert engine.drafter._workspace is None  # the CPU needs no workspace
    size = workspace_size(op, ROWS)
    workspace = engine.drafter._workspace = torch.zeros(size, dtype=torch.int32)
    engine.begin(Request("a", [1]))
    with OperatorRecorder() as recorder:
        engine.step({"a": [1]})
        engine.step({"a": [2]})
    workspaces = [kw["workspace"] for name, kw in recorder.calls if name == f"ngram_npu.{op}"]
    assert [*map(id, workspaces)] == [id(workspace)] * 2
    assert workspace_size("ngram_step_", ROWS) >= workspace_size("ngram_propose_", ROWS)


STORE_LINE = "ngram_npu: the store is on with scope="
NEURAL_HINT = "StandaloneARSpeculator where more accepted tokens are expected of it than that requ"


@pytest.mark.parametrize(
    ("engine_class", "options", "expected_text", "expected_lines"),
    [
        (V1, {"num_threads": 0}, "num_threads=as torch ", []),
        (V1, {}, "lookup=auto (n-grams of 1 to 16 tokens, latest match, overlap=True) num_sp", []),
        (V1, {}, " min_draft_probability=0.12 ", []),
        (
            V1,
            {"lookup": "ngram"},
            "(n-grams of 2 to 5 tokens, earliest match, overlap=False) ",
            [],
        ),
        (
            V1Async,
            {"lookup": "ngram"},
            "(method ngram_gpu): lookup=ngram (n-grams of 2 to 4 ",
            [],
        ),
        (V1Async, {}, " num_speculative_tokens=4 max_model_len=96 device=cpu num_thread", []),
        (V2, {"k": 3}, f"ngram_npu {_C.__version__} drafts for this engine (method ngram_gp", []),
        (V1, STORE, "drafts for this engine (method custom_class)", [f"{STORE_LINE}shared: all "]),
        (V2, STORE, "V2 runner): lookup=auto ", [f"{STORE_LINE}shared: requests with the same "]),
        (V2Neural, {}, "draft_model, V2 runner, with n-gram drafts): lookup=au", [NEURAL_HINT]),
    ],
)
def test_engine_start_logs_settings(
    engine_class: Any,
    options: Any,
    expected_text: str,
    expected_lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine_class(**options)
    settings, *lines = caplog.messages
    assert expected_text in settings
    for line, expected in zip(lines, expected_lines, strict=True):
        assert expected in line


@pytest.mark.parametrize("engine_class", [V1Async, V2])
def test_metrics_are_off_by_default(engine_class: Any) -> None:
    assert engine_class().drafter.stats is None
    assert V1().drafter.stats is not None


def test_first_rank_of_each_pipeline_stage_has_statistics() -> None:
    for rank in (1, 2):  # ranks 0 and 1 are a stage; rank 2 is the first one of the next stage
        proposer = NgramProposer(make_config(method="custom_class", rank=rank, ranks=2))
        assert (getattr(proposer, drafter.ATTRIBUTE).stats is None) == (rank == 1)
