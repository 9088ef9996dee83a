"""Runs every drafter in a fake of its runner. The drafts must equal the reference's, however the
runner assigns and moves rows, without and with a store."""

from __future__ import annotations

import itertools
import re
import sys
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
    make_scheduler_output,
    run_random_steps,
)
from ngram_npu import _C, NgramConfig
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.engines.vllm import ascend, plugin, v1
from ngram_npu.engines.vllm.drafter import Drafter
from ngram_npu.engines.vllm.options import DEFAULT_MIN_PROBABILITY
from ngram_npu.engines.vllm.patching import RUNNER
from ngram_npu.engines.vllm.v2 import RowDrafter
from ngram_npu.ops import workspace_size
from ngram_npu.store import PRIVATE_SCOPE, SHARED_SCOPE, scope_of_request
from ops import reference

LOOKUP: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True}
RUNNERS = V1, V1Async, Ascend, V2


class Model:
    """The reference's operators, called with the texts and scopes of a fake engine's requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.limits = engine, {"vocab_size": VOCABULARY}
        if not isinstance(engine, V2):  # which does not limit a draft to max_model_len
            self.limits["max_len"] = LENGTH
        self.costs = DraftCosts(NgramConfig(k=K, min_draft_probability=DEFAULT_MIN_PROBABILITY))
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
            *(tokens, lengths), **step, num_sampled=counts, k=K, **LOOKUP, **self.limits, **fill
        )
        agreement = np.full(len(requests), -2, np.int32)
        if self.store:
            step["scopes"] = np.array([self.find_scope(request) for request in requests])
            hold_back = not isinstance(self.engine, V1)
            reference.store_append_(
                *(tokens, lengths, counts), **step, **self.store, max_new=K + 1, hold_back=hold_back
            )
            reference.store_propose_(
                *(tokens, lengths, counts),
                **step,
                **{name: self.store[name] for name in ("text", "blocks", "table")},
                draft_token_ids=drafts,
                num_draft_tokens=num_drafts,
                match_len=match_len,
                agreement=agreement,
                **self.limits,
                **fill,
            )
        if isinstance(self.engine, V1):
            self.costs.limit_counts(num_drafts, match_len, agreement if self.store else None)
        lists = drafts.tolist()
        if not self.engine.pads:
            lists = [draft[:n] for draft, n in zip(lists, num_drafts.tolist(), strict=True)]
        return lists, int((agreement != -2).sum())

    def find_scope(self, request: Request) -> int:
        if isinstance(self.engine, V1):  # which does not know the scopes
            return SHARED_SCOPE
        if request.sampling_params.extra_args is not None:
            return PRIVATE_SCOPE
        adapter = request.lora_request
        return scope_of_request(request.cache_salt, adapter and adapter.lora_name)


def begin_requests_in_four_scopes(engine: Engine) -> None:
    """Makes each request that begins from now on one of a tenant with or without an adapter, one
    without a tenant, or one that shares with nobody. An adapter's number may change."""
    numbers, begin = itertools.count(), engine.begin

    def begin_in_scope(*requests: Request) -> None:
        for request in requests:
            number = next(numbers) % 8
            request.cache_salt = "tenant" if number % 2 else None
            request.lora_request = make_adapter(next(numbers), "x") if number in (3, 7) else None
            request.sampling_params = make_params(is_stored=number != 4)
        begin(*requests)

    engine.begin = begin_in_scope  # type: ignore[method-assign]


@pytest.mark.parametrize("engine_class", RUNNERS)
@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_equal_the_reference(engine_class: Any, has_store: bool, seed: int) -> None:
    """Rows begin, end, are swapped, condensed and reused. Drafts of V1's synchronous runner end by
    their cost."""
    engine = engine_class(**(STORE if has_store else {}))
    begin_requests_in_four_scopes(engine)
    model, num_drafts, num_from_store = Model(engine), 0, 0
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
        tenants = {scope_of_request("tenant"), scope_of_request("tenant", "x")}
        assert engine.store.scopes.keys() <= {SHARED_SCOPE, *tenants}
        for array_name, array in model.store.items():
            assert np.array_equal(getattr(engine.store, array_name), array)


# Stores.


@pytest.mark.parametrize("engine_class", [V1Async, Ascend, V2])
@pytest.mark.parametrize(
    ("scope", "salt", "adapter", "is_stored", "expected"),
    [
        ("private", None, None, True, PRIVATE_SCOPE),
        ("private", "", None, True, PRIVATE_SCOPE),  # vLLM ignores an empty salt
        ("private", "t", None, True, scope_of_request("t")),
        ("private", None, "x", True, scope_of_request(None, "x")),
        ("private", "t", None, False, PRIVATE_SCOPE),
        ("shared", None, None, True, SHARED_SCOPE),
        ("shared", None, None, False, PRIVATE_SCOPE),
    ],
)
def test_option_scope_decides_whether_text_without_keys_is_stored(
    engine_class: Any,
    scope: str,
    salt: str | None,
    adapter: str | None,
    is_stored: bool,
    expected: int,
) -> None:
    engine = engine_class(**{**STORE, "scope": scope})
    adapter = make_adapter(1, adapter) if adapter else None
    engine.begin(Request("a", [1], salt, adapter, is_stored=is_stored))
    for word in WORDS:
        engine.step({"a": [word]})
    stored = {expected} - {PRIVATE_SCOPE}
    assert engine.store.scopes.keys() == stored


@pytest.mark.parametrize("engine_class", [V1Async, Ascend, V2])
def test_step_without_drafts_still_stores_its_text(engine_class: Any) -> None:
    engine = engine_class(**STORE)
    engine.begin(Request("a", [1]))
    arguments = {"num_speculative_tokens": 0} if engine_class is V2 else {"k": 0}
    for begin in range(0, len(WORDS), K):
        engine.step({"a": WORDS[begin : begin + K]}, **arguments)
    assert engine.store.statistics.tokens_held == len(WORDS) - K


@pytest.mark.parametrize("engine_class", [V1Async, Ascend])
def test_request_with_the_name_of_an_ended_one_has_its_own_scope(engine_class: Any) -> None:
    """vLLM may send the end of a request and another one of the same name with one step."""
    engine = engine_class(**STORE)
    for salt, words in (("a", WORDS[:20]), ("b", WORDS[20:])):
        request = Request("name", [1], salt)
        engine.alive["name"] = request
        engine.begin_step(make_scheduler_output(request, finished=["name"]))
        for begin in range(0, len(words), K):
            engine.step({"name": words[begin : begin + K]})
    assert engine.store.scopes.keys() == {scope_of_request("a"), scope_of_request("b")}


def test_store_in_unknown_runner_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnknownRunner:
        def execute_model(self, output: Any) -> None: ...

        def add_requests(self, output: Any) -> None: ...

    monkeypatch.setattr(RowDrafter, "has_request_data", False)
    module: Any = SimpleNamespace(GPUModelRunner=UnknownRunner)
    members = vars(UnknownRunner).copy()
    v1.install(module)
    plugin.install_request_data(module)
    assert vars(UnknownRunner) == members
    with pytest.raises(ValueError, match=r"store: expected a runner .*Runner.add_requests"):
        V2(**STORE)
    monkeypatch.setattr(v1, "require_request_checks", lambda: None)
    monkeypatch.setitem(sys.modules, RUNNER, module)
    message = r"store: expected a runner .*Runner.execute_model"
    with pytest.raises(ValueError, match=message):
        V1(**STORE)
    for runner in (UnknownRunner(), None):
        for drafter_class in (v1.AsyncNgramProposer, ascend.AscendNgramProposerNPU):
            with pytest.raises(ValueError, match=message):
                drafter_class(make_config(**STORE), CPU, runner)


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
    *("ngram_npu.ngram_propose_", "aten.clamp", "aten.index.Tensor", "aten.unsqueeze", "aten.ge"),
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
def test_workspace_is_allocated_once(engine_class: Any, op: str) -> None:
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
    on_device = Drafter(
        make_config(), engine.drafter.options, torch.device("meta"), "ngram_gpu", pads=True
    )
    assert on_device._workspace is not None
    assert len(on_device._workspace) == workspace_size("ngram_step_", ROWS)


NEURAL_HINT = "StandaloneARSpeculator where more accepted tokens are expected of it than that requ"


@pytest.mark.parametrize(
    ("engine_class", "options", "texts"),
    [
        (V1, {"num_threads": 0}, ["num_threads=as torch ", " min_draft_probability=0.12 "]),
        (V1, {}, ["lookup=auto (n-grams of 1 to 16 tokens, latest match, overlap=True) num_sp"]),
        (V1Async, {"lookup": "ngram"}, ["(method ngram_gpu): lookup=ngram (n-grams of 2 to 4 "]),
        (V2, {"k": 3}, [f"ngram_npu {_C.__version__} drafts for this engine (method ngram_gp"]),
        (V2Neural, {}, ["draft_model, V2 runner, with n-gram drafts): lookup=au", NEURAL_HINT]),
    ],
)
def test_engine_start_logs_settings(
    engine_class: Any, options: Any, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine_class(**options)
    assert len(caplog.messages) == 1 + (engine_class is V2Neural)
    assert all(text in caplog.text for text in texts)


@pytest.mark.parametrize("engine_class", [V1Async, V2])
def test_metrics_are_off_by_default(engine_class: Any) -> None:
    assert engine_class().drafter.stats is None
    assert V1().drafter.stats is not None
