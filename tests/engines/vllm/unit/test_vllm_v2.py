"""Behaviour that only the V2 runner's speculators have: rows out of range, unknown states of the
runner, and the choice between n-gram drafts and neural drafts."""

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
    Request,
    RequestState,
    StandaloneARSpeculator,
    TorchCalls,
    V2Neural,
    config,
    input_batch,
)
from ngram_npu.config import default_match_costs
from ngram_npu.engines.vllm import v2
from ngram_npu.engines.vllm.options import read_options


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_rows_out_of_range_get_no_draft_and_others_do(engine: str) -> None:
    runner = V2(engine=engine)
    for row in range(ROWS):
        runner.begin(Request(f"{row}", [1, 2, 3, 9, 1, 2]))
    runner.step({"0": [3]})
    rows = [runner.row("0"), -1, ROWS, runner.row("1")]
    runner.req_states.append(rows[3], [3])
    drafts, counts, _ = runner.speculator._look_up(
        input_batch(rows), torch.tensor([1, 2, 1, 1], dtype=torch.int32), int64=True
    )
    assert drafts[1:3].eq(-1).all()
    assert counts[1:3].tolist() == [0, 0]
    assert drafts[3].tolist() == [9, 1, 2, 3]


def test_draft_may_exceed_the_models_length_like_the_stock_one() -> None:
    engine = V2()
    engine.begin(Request("full", [*([1, 2, 3] * LENGTH)][: LENGTH - 1]))
    drafts = engine.step({"full": [([1, 2, 3] * LENGTH)[LENGTH - 1]]})
    assert drafts["full"] == [1, 2, 3, 3]


@pytest.mark.parametrize("options", [{}, {"draft_on": "host"}, {"method": "eagle"}])
def test_dummy_run_and_warm_up_do_no_lookup(options: dict[str, str]) -> None:
    kind = V2Neural if "method" in options else V2
    engine = kind(**options) if kind is V2 else kind()
    engine.begin(Request("a", [1, 2, 1]))
    rows = [engine.row("a")]
    for names, more in ((["a"], {"dummy_run": True}), (["_warmup_0_"], {})):
        with TorchCalls() as seen:
            drafts = engine.propose(rows, {name: [2] for name in names}, **more)
        called = {name for name in seen.names if name.startswith("ngram_npu")}
        assert called <= {"ngram_npu.gather_sampled_tokens_"}
        assert drafts.tolist() == ([[1, 2, 3, 4]] if kind is V2Neural else [[0] * K])
    assert engine.step({}) == {}


class Stock:
    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states

    def hook(self) -> Any:
        """A member that the replacement does not define."""
        return self.vllm_config, self.device, self.req_states


def make(state: Any, device: torch.device = CPU, **options: Any) -> tuple[Any, list[str]]:
    reasons: list[str] = []
    return v2.in_place_of(Stock, reasons.append)(config(**options), device, state), reasons


def test_replacement_inherits_members_and_has_the_constructors_attributes() -> None:
    state = RequestState()
    speculator, reasons = make(state)
    assert isinstance(speculator, v2.NgramSpeculator)
    assert reasons == []
    vllm_config, device, req_states = speculator.hook()  # the stock constructor did not run
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
        ("add_request", None, "add_request takes no all_token_ids, max_tokens, prompt_len, req_id"),
    ],
)
def test_stock_speculator_is_created_for_an_unknown_state(
    name: str, value: Any, reason: str
) -> None:
    state: Any = RequestState()
    if value is not None:
        setattr(state, name, SimpleNamespace(gpu=value))
    elif name == "add_request":
        state.add_request = lambda request: None
    else:
        delattr(state, name)
    speculator, (line,) = make(state)
    assert isinstance(speculator, Stock)
    assert speculator.req_states is state
    assert reason in line


def test_stock_speculator_is_created_without_kernels() -> None:
    speculator, reasons = make(RequestState(), torch.device("xpu"))
    assert isinstance(speculator, Stock)
    assert reasons == ["no kernels for xpu"]


# N-gram drafts with a neural drafter.

PASSAGE = list(range(10, 30))
NEXT = PASSAGE[12 : 12 + K]
NEURAL = (torch.arange(ROWS * K).reshape(ROWS, K) + 1).tolist()
LOOKUPS = pytest.mark.parametrize(
    "options",
    [
        {"engine": "scan"},
        {"lookup": "1-16", "min_draft_probability": 0.1},
        {"lookup": "1-16", "min_draft_probability": 1},  # has no effect: all tokens are verified
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)


def make_neural(**options: Any) -> V2Neural:
    """Returns an engine with a request that repeats a passage, and one without repetition."""
    engine = V2Neural(**options)
    engine.begin(Request("twice", [*PASSAGE, *PASSAGE[:12]]), Request("once", [*range(32, 60)]))
    return engine


def propose(engine: V2Neural, names: str, counts: list[int], *arguments: Any, **more: Any) -> Any:
    """Runs a step whose sampled tokens are already in the rows."""
    sampled = {name: [0] * n for name, n in zip(names.split(), counts, strict=True)}
    rows = [engine.row(name) for name in sampled]
    return engine.propose(rows, sampled, *arguments, **more).tolist()


def reject(engine: V2Neural, names: str, steps: int = 20) -> None:
    """Runs steps in which no neural token was accepted."""
    for _ in range(steps):
        propose(engine, names, [1] * len(names.split()))


@LOOKUPS
def test_ngram_draft_replaces_a_neural_one_that_achieves_less(options: Any) -> None:
    engine = make_neural(**options)
    assert propose(engine, "twice once", [1, 1]) == NEURAL[:2], "trusted until it was measured"
    reject(engine, "twice once")
    assert propose(engine, "twice once", [1, 1]) == [NEXT, NEURAL[1]]
    rows = [engine.row("twice"), engine.row("once")]
    assert engine.drafter.neural_acceptance[rows, 1].tolist() == [1, 1 + K]


@LOOKUPS
def test_neural_drafts_are_kept_while_they_are_accepted(options: Any) -> None:
    engine = make_neural(**options)
    for _ in range(20):
        assert propose(engine, "twice once", [K + 1, K + 1]) == NEURAL[:2]


def test_new_request_begins_with_the_highest_mean() -> None:
    engine = make_neural()
    reject(engine, "twice")
    assert propose(engine, "twice", [1]) == [NEXT]
    before = engine.drafter.neural_acceptance.clone()
    assert propose(engine, "twice", [0]) == NEURAL[:1], "nothing was sampled"
    assert torch.equal(engine.drafter.neural_acceptance, before)
    row = engine.row("twice")
    engine.end("twice")
    engine.begin(Request("twice", [*PASSAGE, *PASSAGE[:12]]))
    assert engine.row("twice") == row
    assert propose(engine, "twice", [1]) == NEURAL[:1]
    assert engine.drafter.neural_acceptance[row].tolist() == [K << 16, 1 + K]


def test_threshold_keeps_the_neural_draft() -> None:
    engine = make_neural(beside_threshold=float(K))
    reject(engine, "twice")
    assert propose(engine, "twice", [1]) == NEURAL[:1]
    fraction = make_neural(beside_threshold=K - 0.5)
    assert fraction.drafter._threshold == (2 * K - 1) << 15


def test_step_that_verified_no_drafts_changes_no_mean() -> None:
    engine = make_neural()
    for _ in range(20):
        propose(engine, "twice", [1], 0)
    acceptance = engine.drafter.neural_acceptance[engine.row("twice")]
    assert acceptance.tolist() == [K << 16, 1 + K]


def test_fewer_draft_tokens_leave_positions_empty() -> None:
    engine = make_neural()
    acceptance = engine.drafter.neural_acceptance[engine.row("twice")]
    for _ in range(30):  # the only draft token is accepted: the highest mean
        drafts = propose(engine, "twice", [2], 1, num_speculative_tokens=1)
        assert drafts == [[NEURAL[0][0], *[-1] * (K - 1)]]
        assert acceptance[1] == 2
    assert engine.speculator.num_speculative_tokens == 1
    propose(engine, "twice", [1], 1, num_speculative_tokens=0)
    assert acceptance[1] == 1, "no neural token was drafted"


def test_step_without_drafts_updates_index_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has such steps for large batches (num_speculative_tokens_per_batch_size)."""
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)
    engine = make_neural(**STORE)
    for token in (1, 2, 3):
        drafts = engine.step({"twice": [token]}, 0, 0, num_speculative_tokens=0)
        assert drafts["twice"] == [-1] * K
    text = np.array(engine.alive["twice"].tokens, np.int32)
    engine.index.check_integrity({engine.row("twice"): text})
    assert engine.store.statistics.tokens_inserted == 3


@pytest.mark.parametrize("options", [{}, STORE], ids=["scan", "store"])
@pytest.mark.parametrize("arguments", [{"num_speculative_tokens": 0}, {"skip_drafts": True}])
def test_step_without_drafts_does_no_lookup(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)
    engine = V2(**options)
    engine.begin(Request("a", [1, 2, 3, 1, 2]))
    rows, addresses = [engine.row("a")], set()
    for token in (3, 1, 2):
        engine.alive["a"].tokens.append(token)
        engine.req_states.append(rows[0], [token])
        with TorchCalls() as seen:
            drafts = engine.propose(rows, {"a": [token]}, **arguments)
        called = {name for name in seen.names if name.startswith("ngram_npu")}
        assert called <= {"ngram_npu.gather_sampled_tokens_"}
        assert drafts.shape == (1, K)
        drafts[:, 0:] = -1  # as vLLM does
        addresses.add(drafts.data_ptr())
    assert len(addresses) == 1, "each step reuses the buffer"
    if options:
        engine.index.check_integrity({rows[0]: np.array(engine.alive["a"].tokens, np.int32)})
        assert engine.store.statistics.tokens_inserted == 3
        assert engine.store.statistics.lookups == 0
    assert engine.step({"a": [3]})["a"][:2] == [1, 2], "a later step drafts as usual"


def test_ngram_drafts_have_probability_one_in_the_logits() -> None:
    engine = make_neural(probabilistic=True)
    reject(engine, "twice once")
    logits = engine.speculator.draft_logits
    logits.copy_(torch.rand(logits.shape))
    before, row = logits.clone(), engine.row("twice")
    drafts = propose(engine, "twice once", [1, 1])
    assert drafts == [NEXT, NEURAL[1]]
    assert logits.shape == (ROWS, K, 64)
    one_hot = torch.nn.functional.one_hot(torch.tensor(NEXT), 64)
    assert torch.equal(logits[row].softmax(-1), one_hot.float())
    others = [other for other in range(ROWS) if other != row]
    assert torch.equal(logits[others], before[others])


def make_adaptive(confidence: float = 0.01, **options: Any) -> V2Neural:
    engine = make_neural(adaptive=True, **options)
    engine.speculator.draft_token_confidence_probs[:] = confidence
    return engine


def test_estimator_observes_its_own_drafts_only() -> None:
    engine = make_adaptive()
    propose(engine, "twice once", [1, 1])
    rows = torch.tensor([engine.row("once"), engine.row("twice")])
    engine.speculator.observe_verification(rows, torch.tensor([2, 3]), torch.tensor([1, 2]))
    assert engine.speculator.observed == [([2, 0], [1, 0])]
    plain = make_neural().speculator
    assert plain.observe_verification.__self__ is plain


@pytest.mark.parametrize("options", [{}, {"lookup": "1-16", "min_draft_probability": 0.1}])
def test_confidence_of_an_ngram_draft_follows_from_its_costs(options: Any) -> None:
    engine = make_adaptive(**options)
    assert propose(engine, "once twice", [1, 1]) == [NEURAL[0], NEXT]
    confidence = engine.speculator.draft_token_confidence_probs
    assert torch.equal(confidence[[0, 2]], torch.full((2, K), 0.01))
    costs = torch.from_numpy(default_match_costs()[12 : 12 + K].copy())
    if options:
        costs = engine.drafter._draft_costs[1]
    assert torch.allclose(confidence[1], 2 ** (costs / -16))


def test_costs_of_neural_tokens_decide_unless_they_are_sampled() -> None:
    """The cost of a token is -16 times the binary logarithm of its probability."""
    for probabilistic in (False, True):
        engine = make_adaptive(probabilistic=probabilistic)
        assert propose(engine, "twice", [1]) == [NEURAL[0] if probabilistic else NEXT]
        engine.speculator.draft_token_confidence_probs[:] = 0.999
        assert probabilistic or propose(engine, "twice", [1]) == [NEURAL[0]]
        engine.speculator.draft_token_confidence_probs[0] = torch.tensor([1.0, 0.5, 0.25, 1e-9])
        costs = engine.drafter._neural_draft_costs(torch.tensor(NEURAL[:1]))
        if probabilistic:
            assert costs is None
        else:
            assert costs.dtype == torch.uint8
            assert costs.tolist() == [[0, 16, 32, 255]]


def test_both_kinds_of_drafts_are_counted() -> None:
    engine = make_neural(metrics=True)
    engine.begin(Request("prefilling", [1]))
    reject(engine, "twice once")
    stats = engine.drafter._stats
    stats.end_interval()
    propose(engine, "twice once prefilling", [1, 1, 0])
    assert (stats._sums["rows"], stats._sums["drafts"], stats._sums["tokens"]) == (2, 1, K)
    stats.end_interval()


class StagedWriteTensor:
    """vLLM's rows, in host memory with ``uva``."""

    def __init__(self, size: Any, dtype: Any, device: Any, uva: bool = False) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
        self.dtype, self.device = dtype, device
        self.write_contents = object() if uva else None


@pytest.mark.parametrize(
    ("device", "options", "is_dense"),
    [
        ("cpu", {}, False),
        ("meta", {}, True),
        ("meta", {"dense_rows": False}, False),
        ("meta", {"draft_on": "host"}, False),
    ],
)
def test_rows_are_moved_to_an_accelerator_that_looks_them_up(
    monkeypatch: pytest.MonkeyPatch, device: str, options: Any, is_dense: bool
) -> None:
    monkeypatch.delattr(v2.RowLookup, "__init__")  # the constructor needs the device's kernels
    rows = StagedWriteTensor((ROWS, 9), torch.int32, CPU, uva=True)
    state = SimpleNamespace(all_token_ids=rows)
    vllm_config = config(method="draft_model", beside=True, **options)
    arguments = vllm_config, read_options(vllm_config, "beside"), torch.device(device), state
    for _ in range(2):
        with pytest.raises(TypeError, match=r"object\.__init__"):
            v2.NeuralDrafterWrapper(*arguments, StandaloneARSpeculator())
        moved = state.all_token_ids
        assert (moved is rows) != is_dense
        assert (moved.write_contents is None) == is_dense
        assert (moved.gpu.shape, moved.gpu.dtype, moved.device) == ((ROWS, 9), torch.int32, CPU)
