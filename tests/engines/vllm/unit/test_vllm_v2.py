"""Tests what only the V2 runner's speculators do: they accept rows out of range, leave runners with
an unknown state unchanged, and choose between n-gram drafts and neural drafts."""

from __future__ import annotations

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
    V2,
    K,
    OperatorRecorder,
    Request,
    RequestState,
    V2Neural,
    make_config,
)
from ngram_npu import NgramConfig
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.engines.vllm import neural, v2


@pytest.mark.parametrize("options", [{}, STORE])
def test_rows_out_of_range_get_no_draft_and_other_rows_do(options: dict[str, Any]) -> None:
    """Row -1 pads a batch. vLLM-Ascend's own speculator also gives it -1 as draft tokens."""
    runner = V2(**options)
    for row in range(ROWS):
        runner.begin(Request(f"{row}", [1, 2, 3, 9, 1, 2]))
    runner.step({"0": [3]})
    row = runner.get_row("1")
    runner.req_states.append_tokens(row, [3])
    samples = {"1": [3], "padding": [3, 9], "beyond": [3]}
    assert runner.propose([row, -1, ROWS], samples).tolist() == [[9, 1, 2, 3], [-1] * K, [-1] * K]
    if options:
        contents = [runner.store.slots.copy(), runner.store.text.copy()]
        for _ in range(2):  # text is stored one step later
            assert runner.propose([-1, ROWS], {"padding": [3], "beyond": [3]}).eq(-1).all()
        assert np.array_equal(runner.store.slots, contents[0])
        assert np.array_equal(runner.store.text, contents[1])


def test_metrics_count_only_tokens_that_the_runner_verifies() -> None:
    runner = V2(metrics=True)
    runner.begin(Request("a", [1, 2, 3, 4, 5, 6, 1, 2]))
    runner.step({"a": [3]}, num_speculative_tokens=2)
    runner.step({"a": [4, 5, 6]}, num_speculative_tokens=K)
    runner.step({"a": [1]}, num_speculative_tokens=0)
    stats = runner.drafter.stats
    assert stats is not None
    assert stats._sums["tokens"] == 2 + K
    stats.end_interval()


@pytest.mark.parametrize("engine_class", [V2, V2Neural])
def test_dummy_run_calls_no_lookup(engine_class: Any) -> None:
    engine = engine_class()
    engine.begin(Request("a", [1, 2, 1]))
    with OperatorRecorder() as recorder:
        drafts = engine.propose([engine.get_row("a")], {"a": [2]}, dummy_run=True)
    assert not any(name.startswith("ngram_npu") for name in recorder.names)
    assert drafts.tolist() == ([[1, 2, 3, 4]] if engine_class is V2Neural else [[0] * K])
    assert engine.step({}) == {}


def test_adaptive_verification_gets_probabilities_of_the_cost_table() -> None:
    engine = V2(adaptive=True)
    engine.begin(Request("a", [1, 2, 3, 9, 8, 1, 2]), Request("b", [4]))
    drafts = engine.step({"b": [5], "a": [3]})
    assert drafts["a"] == [9, 8, 1, 2]
    assert engine.speculator.enable_adaptive_verification
    confidence = engine.speculator.draft_token_confidence_probs
    assert (confidence.dtype, confidence.shape) == (torch.float32, (ROWS, K))
    counts, match_len = torch.tensor([0, K]), torch.tensor([0, 3])
    expected = DraftCosts(NgramConfig(k=K)).compute_probabilities(match_len, counts)
    assert torch.equal(confidence[:2], expected)
    assert not hasattr(V2().speculator, "draft_token_confidence_probs")


def test_store_with_fewer_slots_than_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"store: expected at most {ROWS - 1} rows"):
        V2(**STORE, rows=ROWS - 1)


class Stock:
    """Takes the place of vLLM's own speculator."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states

    def get_arguments(self) -> Any:
        """Returns the arguments of the constructor. The replacement does not define this method."""
        return self.vllm_config, self.device, self.req_states


def replace_stock(state: Any, device: Any = CPU, **options: Any) -> tuple[Any, list[str]]:
    """Returns the speculator and the reasons for using the stock speculator."""
    reasons: list[str] = []
    speculator_class = v2.make_replacement(Stock, reasons.append)
    return speculator_class(make_config(**options), device, state), reasons


def test_replacement_inherits_methods_and_has_attributes_of_the_stock_constructor() -> None:
    state = RequestState()
    speculator, reasons = replace_stock(state)
    assert isinstance(speculator, v2.NgramSpeculator)
    assert reasons == []
    vllm_config, device, req_states = speculator.get_arguments()
    assert (vllm_config.speculative_config, device) == (speculator.speculative_config, CPU)
    assert req_states is state
    assert speculator.num_speculative_steps == K
    assert (speculator.max_num_reqs, speculator.max_model_len) == (ROWS, LENGTH)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("all_token_ids", torch.zeros(9, 9, dtype=torch.int64), "is (2, torch.int64, 'cpu', 1)"),
        ("all_token_ids", torch.zeros(9, 6, dtype=torch.int32).t(), "'cpu', 6), expected (2, tor"),
        ("total_len", torch.zeros(9, 1, dtype=torch.int32), "total_len.gpu (rank, dtype, device"),
        ("total_len", np.zeros(9, np.int32), "the runner's state has no total_len.gpu"),
        ("req_id_to_index", None, "the runner's state has no req_id_to_index"),
    ],
)
def test_stock_speculator_is_created_for_an_unknown_state(
    name: str, value: Any, reason: str
) -> None:
    state: Any = RequestState()
    if value is not None:
        setattr(state, name, SimpleNamespace(gpu=value))
    else:
        delattr(state, name)
    speculator, (line,) = replace_stock(state)
    assert isinstance(speculator, Stock)
    assert speculator.req_states is state
    assert reason in line


# N-gram drafts with a neural drafter.

PASSAGE = list(range(10, 30))
NGRAM_DRAFT = PASSAGE[12 : 12 + K]
NEURAL_DRAFTS = (torch.arange(ROWS * K).reshape(ROWS, K) + 1).tolist()


def make_engine(**options: Any) -> V2Neural:
    """Returns an engine with a request "twice", which repeats a passage, and a request "once"."""
    engine = V2Neural(**options)
    engine.begin(Request("twice", [*PASSAGE, *PASSAGE[:12]]), Request("once", [*range(32, 60)]))
    return engine


def propose(engine: V2Neural, names: str, counts: list[int], *args: Any, **kwargs: Any) -> Any:
    """Runs a step in which the requests sampled `counts` tokens, which the rows contain."""
    samples = {name: [0] * n for name, n in zip(names.split(), counts, strict=True)}
    rows = [engine.get_row(name) for name in samples]
    return engine.propose(rows, samples, *args, **kwargs).tolist()


def reject_neural_drafts(engine: V2Neural, names: str, steps: int = 20) -> None:
    """Runs steps in which no neural token was accepted."""
    for _ in range(steps):
        propose(engine, names, [1] * len(names.split()))


def test_positions_beyond_requested_draft_tokens_are_empty() -> None:
    engine = make_engine()
    acceptance = engine.drafter.neural_acceptance[engine.get_row("twice")]
    for _ in range(30):  # the only draft token is accepted, so the acceptance stays the highest
        drafts = propose(engine, "twice", [2], 1, num_speculative_tokens=1)
        assert drafts == [[NEURAL_DRAFTS[0][0], *[-1] * (K - 1)]]
        assert acceptance[1] == 2
    assert engine.speculator.num_speculative_tokens == 1
    propose(engine, "twice", [1], 1, num_speculative_tokens=0)
    assert acceptance[1] == 1, "expected no neural draft token"


@pytest.mark.parametrize("options", [{}, STORE], ids=["scan", "store"])
@pytest.mark.parametrize("arguments", [{"num_speculative_tokens": 0}, {"skip_drafts": True}])
def test_step_without_drafts_calls_no_lookup(
    options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    engine = V2(**options)
    engine.begin(Request("a", [1, 2, 3, 1, 2]))
    rows, addresses = [engine.get_row("a")], set()
    for token in (3, 1, 2):
        engine.alive["a"].tokens.append(token)
        engine.req_states.append_tokens(rows[0], [token])
        with OperatorRecorder() as recorder:
            drafts = engine.propose(rows, {"a": [token]}, **arguments)
        called = {name for name in recorder.names if name.startswith("ngram_npu")}
        assert called == ({"ngram_npu.store_append_"} if options else set())
        assert drafts.shape == (1, K)
        drafts[:, 0:] = -1  # as vLLM does
        addresses.add(drafts.data_ptr())
    assert len(addresses) == 1, "expected the same buffer in each step"
    assert engine.step({"a": [3]})["a"][:2] == [1, 2], "expected a draft in a later step"


def test_ngram_drafts_have_probability_one_in_the_logits_until_they_are_verified() -> None:
    """A speculator may write only some tokens' logits, and expects the others to be -inf."""
    engine = make_engine(probabilistic=True)
    reject_neural_drafts(engine, "twice once")
    logits, row = engine.speculator.draft_logits, engine.get_row("twice")
    logits.fill_(float("-inf"))
    old_logits = logits.clone()
    assert propose(engine, "twice once", [1, 1]) == [NGRAM_DRAFT, NEURAL_DRAFTS[1]]
    one_hot = torch.nn.functional.one_hot(torch.tensor(NGRAM_DRAFT), 64)
    assert torch.equal(logits[row].softmax(-1), one_hot.float())
    other_rows = [other for other in range(ROWS) if other != row]
    assert torch.equal(logits[other_rows], old_logits[other_rows])
    engine.end("twice")
    engine.begin(Request("other", [1]))
    assert engine.get_row("other") == row
    assert propose(engine, "other", [1]) == NEURAL_DRAFTS[:1]
    assert torch.equal(logits, old_logits)


def make_adaptive_engine(confidence: float = 0.01, **options: Any) -> V2Neural:
    engine = make_engine(adaptive=True, **options)
    engine.speculator.draft_token_confidence_probs[:] = confidence
    return engine


def test_confidence_and_outcome_of_an_ngram_draft_are_not_those_of_the_neural_drafter() -> None:
    """The confidence is that of the cost table, and the speculator does not learn the outcome."""
    engine = make_adaptive_engine()
    assert propose(engine, "once twice", [1, 1]) == [NEURAL_DRAFTS[0], NGRAM_DRAFT]
    confidence = engine.speculator.draft_token_confidence_probs
    assert torch.equal(confidence[[0, 2]], torch.full((2, K), 0.01))
    costs = DraftCosts(NgramConfig(k=K))
    expected = costs.compute_probabilities(torch.tensor([12]), torch.tensor([K]))
    assert torch.equal(confidence[1:2], expected)
    rows = torch.tensor([*map(engine.get_row, ("once", "twice"))])
    engine.speculator.observe_verification(rows, torch.tensor([2, 3]), torch.tensor([K - 1, K - 2]))
    assert engine.speculator.observed_counts == [([2, 0], [K - 1, 0])]


def test_choice_uses_costs_of_neural_tokens_unless_they_are_sampled() -> None:
    """The cost of a token is -16 times the binary logarithm of its probability."""
    for probabilistic in (False, True):
        engine = make_adaptive_engine(probabilistic=probabilistic)
        assert propose(engine, "twice", [1]) == [NEURAL_DRAFTS[0] if probabilistic else NGRAM_DRAFT]
        engine.speculator.draft_token_confidence_probs[:] = 0.999
        assert probabilistic or propose(engine, "twice", [1]) == [NEURAL_DRAFTS[0]]
        engine.speculator.draft_token_confidence_probs[0] = torch.tensor([1.0, 0.5, 0.25, 1e-9])
        costs = engine.drafter.compute_neural_costs(torch.tensor(NEURAL_DRAFTS[:1]))
        if probabilistic:
            assert costs is None
        else:
            assert costs.dtype == torch.uint8
            assert costs.tolist() == [[0, 16, 32, 255]]


def test_metrics_count_rows_and_ngram_drafts_beside_a_neural_drafter() -> None:
    engine = make_engine(metrics=True)
    engine.begin(Request("prefilling", [1]))
    reject_neural_drafts(engine, "twice once")
    stats = engine.drafter.stats
    stats.end_interval()
    propose(engine, "twice once prefilling", [1, 1, 0])
    assert (stats._sums["rows"], stats._sums["drafts"], stats._sums["tokens"]) == (2, 1, K)
    stats.end_interval()


class StagedWriteTensor:
    """A fake of the tensor with vLLM's rows, which is in host memory if ``uva``."""

    def __init__(self, size: Any, dtype: Any, device: Any, uva: bool = False) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.dtype, self.device = dtype, device
        self.write_contents = object() if uva else None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_in_host_memory_are_moved_to_the_device(device: str) -> None:
    rows = StagedWriteTensor((ROWS, 9), torch.int32, CPU, uva=True)
    state = SimpleNamespace(all_token_ids=rows)
    for _ in range(2):
        neural.move_rows_to_device(state, torch.device(device))
        new_rows = state.all_token_ids
        assert (new_rows is rows) == (device == "cpu")
        assert (new_rows.write_contents is None) == (device != "cpu")
        assert (new_rows.gpu.shape, new_rows.gpu.dtype) == ((ROWS, 9), torch.int32)
        assert new_rows.device == CPU
