"""N-gram drafts beside a neural speculator of the V2 runner, without vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from beside_runner import (
    ONCE,
    PASSAGE,
    TWICE,
    VOCAB,
    K,
    R,
    StandaloneARSpeculator,
    State,
    config,
    step,
)
from ngram_npu.config import default_match_costs
from ngram_npu.engines.vllm import v2 as beside
from ngram_npu.engines.vllm.v2 import NeuralDrafterWrapper as Beside, attach_ngram_drafts as attach
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.v2 import RowLookup
from torch_calls import TorchCalls
from v2_state import batch_of

CPU = torch.device("cpu")
NEXT = PASSAGE[12 : 12 + K]
NEURAL = torch.arange(R * K).reshape(R, K) + 1


def _beside(
    state: State, *, probabilistic: bool = False, adaptive: bool = False, **options: Any
) -> tuple[Any, Beside]:
    speculator = StandaloneARSpeculator(probabilistic)
    speculator.enable_adaptive_verification = adaptive
    speculator.drafts = NEURAL.clone()
    given = config(**options)
    given.speculative_config.enable_adaptive_verification = adaptive
    assert attach(given, read_options(given, "beside"), CPU, state, speculator) == ""
    beside: Beside = speculator.ngram_npu  # type: ignore[attr-defined]
    state.begin("twice", 3, TWICE)
    state.begin("once", 1, ONCE)
    return speculator, beside


def _measured(speculator: Any, state: State, rows: list[int], steps: int = 20) -> None:
    """Steps in which no neural token was accepted."""
    for _ in range(steps):
        step(speculator, rows, [1] * len(rows))


ENGINES = pytest.mark.parametrize(
    "options",
    [
        {"engine": "scan"},
        {"lookup": "1-16", "min_draft_probability": 0.1},
        {"lookup": "1-16", "min_draft_probability": 1},  # ends no draft: all tokens are verified
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)


@ENGINES
def test_ours_where_they_promise_more_than_the_drafter_achieved(options: Any) -> None:
    state = State()
    speculator, beside = _beside(state, **options)
    drafts = step(speculator, [3, 1], [1, 1])
    assert drafts.tolist() == NEURAL[:2].tolist(), "trusted until it was measured"
    _measured(speculator, state, [3, 1])
    drafts = step(speculator, [3, 1], [1, 1])
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == [NEXT, NEURAL[1].tolist()]
    assert beside.neural_acceptance[[3, 1], 1].tolist() == [1, 1 + K]


@ENGINES
def test_theirs_while_they_are_accepted(options: Any) -> None:
    state = State()
    speculator, _ = _beside(state, **options)
    for _ in range(20):
        drafts = step(speculator, [3, 1], [K + 1, K + 1])
        assert drafts.tolist() == NEURAL[:2].tolist()


def test_a_new_request_begins_with_trust_and_nothing_of_the_one_before() -> None:
    state = State()
    speculator, beside = _beside(state)
    _measured(speculator, state, [3])
    assert step(speculator, [3], [1]).tolist() == [NEXT]
    state.begin("another", 3, TWICE)
    assert step(speculator, [3], [1]).tolist() == [NEURAL[0].tolist()]
    assert beside.neural_acceptance[3].tolist() == [K << 16, 1 + K]


def test_where_nothing_was_sampled_nothing_changes() -> None:
    state = State()
    speculator, beside = _beside(state)
    _measured(speculator, state, [3])
    before = beside.neural_acceptance.clone()
    assert step(speculator, [3], [0]).tolist() == [NEURAL[0].tolist()]
    assert torch.equal(beside.neural_acceptance, before)


def test_a_threshold_keeps_what_promises_little() -> None:
    state = State()
    speculator, _ = _beside(state, beside_threshold=float(K))
    _measured(speculator, state, [3])
    assert step(speculator, [3], [1]).tolist() == [NEURAL[0].tolist()]


def test_fewer_tokens_than_there_are_places() -> None:
    """The places after them hold -1, as the runner expects."""
    state = State()
    speculator, beside = _beside(state)
    for _ in range(30):  # one accepted of one: the best possible
        drafts = step(speculator, [3], [2], 1, num_speculative_tokens=1)
        assert drafts.tolist() == [[NEURAL[0, 0].item(), *[-1] * (K - 1)]]
        assert beside.neural_acceptance[3, 1] == 2
    assert speculator.given["num_speculative_tokens"] == 1
    step(speculator, [3], [1], 1, num_speculative_tokens=0)
    assert beside.neural_acceptance[3, 1] == 1, "none were given"


def test_a_step_without_drafts_is_learnt_from_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has such steps for large batches (num_speculative_tokens_per_batch_size)."""
    monkeypatch.setattr(RowLookup, "has_request_data", True)  # as the plugin leaves the runner
    state = State()
    speculator, beside = _beside(state, sizes="ladder", min_draft_probability=0.1, store="live")
    for token in (1, 2, 3):
        state.sample(3, [token])
        drafts = step(speculator, [3], [1], 0, num_speculative_tokens=0)
        assert drafts.tolist() == [[-1] * K]
    assert beside.index is not None
    assert beside.shared_store is not None
    beside.index.check_integrity({3: np.array([*TWICE, 1, 2, 3], np.int32)})
    assert beside.shared_store.contents.statistics.tokens_entered == 3


def test_a_step_that_verified_no_drafts_says_nothing_about_them() -> None:
    state = State()
    speculator, beside = _beside(state)
    for _ in range(20):
        step(speculator, [3], [1], 0)
    assert beside.neural_acceptance[3].tolist() == [K << 16, 1 + K]


def test_a_dummy_run_is_the_speculators_own() -> None:
    state = State()
    speculator, beside = _beside(state)
    before = beside.neural_acceptance.clone()
    assert torch.equal(step(speculator, [3], [1], dummy_run=True), NEURAL[:1])
    assert torch.equal(beside.neural_acceptance, before)


def test_a_replaced_rows_logits_are_certain_of_its_tokens() -> None:
    state = State()
    speculator, _ = _beside(state, probabilistic=True)
    _measured(speculator, state, [3, 1])
    speculator.draft_logits.copy_(torch.rand(R, K, VOCAB))
    before = speculator.draft_logits.clone()
    drafts = step(speculator, [3, 1], [1, 1])
    assert drafts.tolist() == [NEXT, NEURAL[1].tolist()]
    logits = speculator.draft_logits
    assert logits.shape == (R, K, VOCAB)
    assert torch.equal(logits[3].softmax(-1), torch.nn.functional.one_hot(drafts[0], VOCAB).float())
    others = [row for row in range(R) if row != 3]
    assert torch.equal(logits[others], before[others])


def test_a_step_is_one_lookup_and_one_merge() -> None:
    """And two small calls of torch; nothing reads from the device, or copies there."""
    state = State()
    speculator, _ = _beside(state)
    step(speculator, [3, 1], [1, 1])
    batch = batch_of([3, 1])
    counts = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with TorchCalls() as seen:
        speculator.propose(batch, *[None] * 4, *counts, *[None] * 4)
    assert [name for name in seen.names if "slice" not in name] == [
        "ngram_npu.ngram_propose",
        "aten.add.Tensor",
        "aten.sub_.Tensor",
        "ngram_npu.merge_drafts_",
    ]


class TestAdaptiveVerification:
    def test_the_estimator_learns_from_its_own_drafts_alone(self) -> None:
        state = State()
        speculator, _ = _beside(state, adaptive=True)
        speculator.draft_token_confidence_probs[:] = 0.01
        step(speculator, [3, 1], [1, 1])
        rows = torch.tensor([1, 3])
        speculator.observe_verification(rows, torch.tensor([2, 3]), torch.tensor([1, 2]))
        assert speculator.observed == [([2, 0], [1, 0])]

    def test_a_row_is_as_likely_as_its_costs_say(self) -> None:
        state = State()
        speculator, _ = _beside(state, adaptive=True)
        speculator.draft_token_confidence_probs[:] = 0.01
        drafts = step(speculator, [1, 3], [1, 1])
        assert drafts.tolist() == [NEURAL[0].tolist(), NEXT]
        probs = speculator.draft_token_confidence_probs
        assert torch.equal(probs[[0, 2]], torch.full((2, K), 0.01))
        costs = torch.from_numpy(default_match_costs()[12 : 12 + K].copy())
        assert torch.allclose(probs[1], 2 ** (costs / -16))

    def test_by_cost_where_the_lookup_knows(self) -> None:
        state = State()
        options = {"lookup": "1-16", "min_draft_probability": 0.1}
        speculator, beside = _beside(state, adaptive=True, **options)
        speculator.draft_token_confidence_probs[:] = 0.01
        assert step(speculator, [1, 3], [1, 1])[1].tolist() == NEXT
        costs = beside._draft_costs[1]
        assert torch.allclose(speculator.draft_token_confidence_probs[1], 2 ** (costs / -16))

    def test_the_drafters_confidence_decides_where_its_drafts_are_greedy(self) -> None:
        for probabilistic in (False, True):
            state = State()
            speculator, _ = _beside(state, adaptive=True, probabilistic=probabilistic)
            speculator.draft_token_confidence_probs[:] = 0.01
            first = step(speculator, [3], [1]).tolist()
            assert first == [NEURAL[0].tolist() if probabilistic else NEXT]
            speculator.draft_token_confidence_probs[:] = 0.999
            if not probabilistic:
                assert step(speculator, [3], [1]).tolist() == [NEURAL[0].tolist()]

    def test_no_estimator_is_left_alone(self) -> None:
        speculator, _ = _beside(State())
        assert speculator.observe_verification.__self__ is speculator


def test_both_kinds_of_drafts_are_counted() -> None:
    state = State()
    speculator, beside = _beside(state, metrics=True)
    _measured(speculator, state, [3, 1])
    assert beside._stats is not None
    tally = beside._stats
    tally.end_interval()
    step(speculator, [3, 1, 0], [1, 1, 0])  # ours, theirs, and a prefill that goes on
    assert (tally._sums["rows"], tally._sums["drafts"], tally._sums["tokens"]) == (2, 1, K)
    tally.end_interval()


class _Rows:
    """vLLM's ``StagedWriteTensor``."""

    def __init__(
        self, size: Any, dtype: Any, device: Any, max_concurrency: Any = None, uva: bool = False
    ) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.dtype, self.device = dtype, device
        self.write_contents = object() if uva else None


def test_rows_in_the_hosts_memory_become_the_devices_own() -> None:
    state: Any = SimpleNamespace(all_token_ids=_Rows((R, 9), torch.int32, CPU, uva=True))
    beside._make_dense(state)
    dense = state.all_token_ids
    assert dense.write_contents is None
    assert (dense.gpu.shape, dense.gpu.dtype, dense.device) == ((R, 9), torch.int32, CPU)
    beside._make_dense(state)
    assert state.all_token_ids is dense


def test_the_lines_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    _beside(State(), beside_threshold=0.5)
    first, second = caplog.messages
    assert "(method draft_model, V2 runner, beside its drafts): prompt_lookup_min=2" in first
    assert "match_policy=latest overlap=True" in first
    assert "the one of StandaloneARSpeculator where it promises more" in second
    assert "at least 0.5 (beside_threshold)" in second


@pytest.mark.parametrize(
    ("device", "options", "dense"),
    [
        ("cpu", {}, False),
        ("meta", {}, True),
        ("meta", {"dense_rows": False}, False),
        ("meta", {"draft_on": "host"}, False),
    ],
)
def test_rows_are_dense_only_if_the_lookup_runs_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, device: str, options: Any, dense: bool
) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(beside, "_make_dense", changed.append)
    monkeypatch.setattr(beside.RowLookup, "__init__", _stop)
    state, given = State(), config(**options)
    arguments = given, read_options(given, "beside"), torch.device(device), state
    with pytest.raises(InterruptedError):
        Beside(*arguments, StandaloneARSpeculator())
    assert changed == [state] * dense


def _stop(*_: Any) -> None:
    raise InterruptedError


def test_cost_of_a_neural_token_is_sixteen_times_its_negative_logarithm() -> None:
    speculator, lookup = _beside(State(), adaptive=True)
    speculator.draft_token_confidence_probs[0] = torch.tensor([1.0, 0.5, 0.25, 1e-9])
    costs = lookup._neural_draft_costs(NEURAL[:1])
    assert costs is not None
    assert costs.dtype == torch.uint8
    assert costs.tolist() == [[0, 16, 32, 255]]
