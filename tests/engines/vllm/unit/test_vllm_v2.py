"""The speculator for vLLM's V2 runner, with a stand-in of a few tensors for the runner's state."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import config
from fresh_index import drafts_of
from ngram_npu import NgramConfig
from ngram_npu.engines.vllm import v2
from ops.reference.drafting import draft_for
from torch_calls import TorchCalls
from v2_state import RandomState, batch_of, propose

CPU = torch.device("cpu")
R, S, K = 6, 96, 4
STORE = {
    "sizes": "ladder",
    "min_draft_probability": 0.177,
    "store": "live",
    "store_tokens": 8192,
}


_State = functools.partial(RandomState, R, S, K + 1)


def _speculator(state: RandomState, engine: str = "scan", **options: Any) -> v2.NgramSpeculator:
    made = v2.NgramSpeculator(_config(engine=engine, **options), CPU, state)
    state.fill()
    return made


_config = functools.partial(config, k=K, rows=R, length=S)


def _expected(
    state: RandomState,
    rows: list[int],
    sampled: list[int],
    match_policy: int = 1,
    overlap: bool = False,
) -> list[list[int]]:
    expected = []
    for row, count in zip(rows, sampled, strict=True):
        tokens = state.all_token_ids.gpu[row, : state.total_len.gpu[row]].tolist()
        draft = draft_for(tokens, 2, 4, K, match_policy, overlap, 2 * S)[0] if count else []
        newest = int(state.last_sampled_tokens[row])
        expected.append(draft + [newest] * (K - len(draft)))
    return expected


@pytest.mark.parametrize("engine", ["scan", "index"])
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({"match_policy": "earliest"}, {"match_policy": 0}),
        ({"overlap": True}, {"overlap": True}),
    ],
)
def test_drafts_are_the_references_and_the_newest_token_fills_them(
    engine: str, options: Any, arguments: Any
) -> None:
    state = _State()
    speculator = _speculator(state, engine, **options)
    filled = 0
    for rows, sampled in state.steps(R):
        drafts = propose(speculator, state, rows, sampled)
        assert drafts.tolist() == _expected(state, rows, sampled, **arguments)
        filled += int((drafts == state.last_sampled_tokens[rows]).all(1).sum())
    assert filled >= 10


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_speculator_with_rows_out_of_range_drafts_for_the_others(engine: str) -> None:
    state = _State()
    speculator = _speculator(state, engine)
    state.sample(1, [7, 8, 9, 7, 8])
    state.sample(R - 1, [1, 2, 1])
    rows, sampled = [1, -1, R, R - 1], [5, 2, 1, 3]
    expected = _expected(state, [1, R - 1], [1, 1])
    found, counts, _ = speculator._look_up(
        batch_of(rows), torch.tensor(sampled, dtype=torch.int32), int64=True
    )
    assert found[[0, 3]].tolist() == expected
    assert found[1:3].eq(-1).all()
    assert counts[1:3].tolist() == [0, 0]


def _ladder(state: RandomState, adaptive: bool, probability: float | None) -> v2.NgramSpeculator:
    given = _config(sizes="ladder", min_draft_probability=probability)
    given.speculative_config.enable_adaptive_verification = adaptive
    made = v2.NgramSpeculator(given, CPU, state)
    state.fill()
    return made


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_ladder_drafts_what_a_fresh_index_does_and_says_how_likely_it_is(adaptive: bool) -> None:
    """Where all tokens are verified, no draft ends early; behind one that does its text goes on."""
    state = _State()
    speculator = _ladder(state, adaptive, 0.177)
    assert speculator.enable_adaptive_verification == adaptive
    whole = NgramConfig(k=K, sizes="ladder")
    ngram = NgramConfig(k=K, sizes="ladder", min_draft_probability=0.177) if adaptive else whole
    lengths = []
    for rows, sampled in state.steps(R):
        got = propose(speculator, state, rows, sampled)
        token_ids, grown = state.all_token_ids.gpu[rows].numpy(), state.total_len.gpu[rows].numpy()
        rows_now = token_ids, grown, np.array(sampled, np.int32)
        drafts, costs = drafts_of(ngram, *rows_now)
        for i, draft in enumerate(drafts_of(whole, *rows_now)[0]):
            newest = int(state.last_sampled_tokens[rows[i]])
            assert got[i].tolist() == draft + [newest] * (K - len(draft))
        if adaptive:
            confidence = speculator.draft_token_confidence_probs
            assert (confidence.dtype, confidence.shape) == (torch.float32, (R, K))
            expected = 2 ** (np.array(costs) / -16)
            assert confidence[: len(rows)].numpy() == pytest.approx(expected, rel=1e-5)
        lengths += [len(draft) for draft in drafts if draft]
    assert len(lengths) > 100
    assert max(lengths) == K
    assert (min(lengths) < K) == adaptive


@pytest.mark.parametrize(("adaptive", "probability"), [(False, 0.177), (True, None)])
def test_how_likely_drafts_are_is_said_where_it_is_asked_and_known(
    adaptive: bool, probability: float | None
) -> None:
    state = _State()
    speculator = _ladder(state, adaptive, probability)
    assert not speculator.enable_adaptive_verification
    propose(speculator, state, [3, 1], [1, 1])
    assert not hasattr(speculator, "draft_token_confidence_probs")


def test_a_draft_may_pass_the_models_length_as_the_stock_ones_do() -> None:
    state = _State()
    speculator = _speculator(state)
    state.begin_one("full", 0, S)
    state.sample(1, [7, 8, 9, 7, 8])
    drafts = propose(speculator, state, [0, 1], [1, 1])
    assert drafts.tolist() == _expected(state, [0, 1], [1, 1])
    assert drafts[0].tolist() != state.last_sampled_tokens[0].expand(K).tolist()


def test_a_step_on_the_device_is_one_lookup() -> None:
    """So nothing reads from the device or copies to it."""
    state = _State()
    speculator = _speculator(state)
    num_sampled = torch.ones(2, dtype=torch.int32)
    rest = (None, None, None, None, num_sampled, None, state.last_sampled_tokens)
    batch = batch_of([3, 1])
    with TorchCalls() as seen:
        speculator.propose(batch, *rest)
    called = [name.partition(".")[2] for name in seen.names]
    assert [name for name in called if not name.startswith("empty")] == ["ngram_propose_"]


def test_a_dummy_run_looks_nothing_up() -> None:
    state = _State()
    with TorchCalls() as seen:
        drafts = propose(_speculator(state), state, [0, 1], [1, 1], dummy_run=True)
    assert not any(name.startswith("ngram_npu") for name in seen.names)
    assert drafts.tolist() == [[0] * K] * 2


def test_dummy_run_before_an_end_is_known_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ended in the step before its last one, which only the next step says."""
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)  # as the plugin leaves the runner
    given = _config(**STORE)
    given.max_concurrent_batches = 2
    given.speculative_config.enable_adaptive_verification = True
    state = _State()
    speculator = v2.NgramSpeculator(given, CPU, state)
    state.begin("ended", 0, [1, 2, 3])
    state.sample(0, [7, 8])
    propose(speculator, state, [0], [2])
    propose(speculator, state, [0], [1], dummy_run=True)
    state.remove_request("ended")
    state.begin("next", 1, [4])
    state.sample(1, [5])
    propose(speculator, state, [1], [1])
    assert speculator.shared_store is not None
    assert speculator.shared_store.contents.statistics.tokens_entered == 0


def _texts_of_one_request(batches: int, prompt: list[int], sampled: list[int]) -> list[list[int]]:
    """What the store of an engine with ``batches`` in flight has of a request that samples one
    token per step. The scheduler then ends it, and another request takes a step."""
    given = _config(**STORE)
    given.max_concurrent_batches = batches
    state = _State()
    speculator = v2.NgramSpeculator(given, CPU, state)
    state.begin("one", 0, prompt)
    for token in sampled:
        state.sample(0, [token])
        propose(speculator, state, [0], [1])
    state.remove_request("one")
    state.begin("next", 1, [4])
    state.sample(1, [5])
    propose(speculator, state, [1], [0])
    assert speculator.shared_store is not None
    return [text.tolist() for _, text in speculator.shared_store.contents._texts()]


@pytest.mark.parametrize(("batches", "stored"), [(1, [7, 8, 9]), (2, [7, 8]), (3, [7])])
def test_text_of_steps_that_ran_after_an_unseen_end_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, batches: int, stored: list[int]
) -> None:
    """Such as a stop string, which is found elsewhere: the scheduler ends the request up to
    ``batches - 1`` steps later."""
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)
    assert _texts_of_one_request(batches, [1, 2, 3], [7, 8, 9]) == [stored]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_request_cut_by_max_model_len_is_stored_up_to_its_last_token(
    monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)
    prompt = list(range(S - 3))
    assert _texts_of_one_request(batches, prompt, [7, 8, 9]) == [[7, 8, 9]]


def test_requests_that_the_runner_did_not_announce_share_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not known whose they are, as in a runner with an ``add_requests`` of its own."""
    monkeypatch.setattr(v2.RowLookup, "has_request_data", True)
    state = _State()
    speculator = v2.NgramSpeculator(_config(**STORE), CPU, state)
    for row, name in enumerate(("one", "other")):
        state.begin(name, row, [1, 2, 3])
        state.sample(row, [7, 8])
        propose(speculator, state, [row], [2])
    assert speculator.shared_store is not None
    assert len(speculator.shared_store.contents.scopes.keys() - {0}) == 2


def test_a_row_for_another_request_is_indexed_anew() -> None:
    """A request that equals the previous one at the place that an index itself checks."""
    state = _State()
    speculator = _speculator(state, "index")
    assert speculator.index is not None
    state.begin("before", 2, [5, 6, 7, 8, *range(20, 40)])
    state.sample(2, [5])
    propose(speculator, state, [2], [1])
    state.begin("after", 2, [9, 9, 9, 9, *range(20, 40), 5, 6])
    state.sample(2, [7])
    assert propose(speculator, state, [2], [1]).tolist() == [[7] * K]
    speculator.index.check_integrity({2: state.all_token_ids.gpu[2].numpy()})
    assert speculator.index.statistics.rebuilds_rewritten == 0


@pytest.mark.parametrize(("max_model_len", "index"), [(8192, False), (8193, True)])
def test_auto_is_the_index_where_it_pays(max_model_len: int, index: bool) -> None:
    speculator = v2.NgramSpeculator(_config(length=max_model_len), CPU, _State())
    assert (speculator.index is not None) == index


def test_the_line_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    v2.NgramSpeculator(_config(), CPU, _State())
    (line,) = caplog.messages
    assert "(method ngram_gpu, V2 runner): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert (
        "match_policy=latest overlap=False max_model_len=96 engine=scan device=cpu num_th" in line
    )


class _Stock:
    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.vllm_config, self.device, self.req_states = vllm_config, device, req_states

    def hook(self) -> Any:
        """Of a vLLM that this module does not know."""
        return self.vllm_config, self.device, self.req_states


def _made(state: Any, device: torch.device = CPU) -> tuple[Any, list[str]]:
    said: list[str] = []
    return v2.in_place_of(_Stock, said.append)(_config(), device, state), said


def test_ours_is_made_from_a_state_that_is_known() -> None:
    state = _State()
    made, said = _made(state)
    assert isinstance(made, v2.NgramSpeculator)
    assert said == []
    config, device, states = made.hook()  # inherited; the stock constructor did not run
    assert (config.speculative_config, device, states) == (made.speculative_config, CPU, state)


def _without(state: RandomState, name: str) -> Any:
    parts = ("all_token_ids", "total_len", "add_request", "remove_request", "req_id_to_index")
    return SimpleNamespace(**{part: getattr(state, part) for part in parts if part != name})


@pytest.mark.parametrize(
    ("name", "gpu", "doubt"),
    [
        ("all_token_ids", torch.zeros(R, S, dtype=torch.int64), "is (2, torch.int64, 'cpu', 1)"),
        ("all_token_ids", torch.zeros(S, R, dtype=torch.int32).t(), "'cpu', 6), expected (2, tor"),
        ("total_len", torch.zeros(R, 1, dtype=torch.int32), "total_len.gpu (rank, dtype, device"),
        ("total_len", np.zeros(R, np.int32), "the runner's state has no total_len.gpu"),
        ("req_id_to_index", None, "the runner's state has no req_id_to_index"),
    ],
)
def test_the_stock_one_is_made_from_any_other(name: str, gpu: Any, doubt: str) -> None:
    state = _without(_State(), name)
    if gpu is not None:
        setattr(state, name, SimpleNamespace(gpu=gpu))
    made, said = _made(state)
    assert isinstance(made, _Stock)
    assert made.req_states is state
    assert len(said) == 1
    assert doubt in said[0]


def test_the_stock_one_is_made_where_requests_are_added_otherwise() -> None:
    state = _without(_State(), "add_request")
    state.add_request = lambda request: None
    made, said = _made(state)
    assert isinstance(made, _Stock)
    (line,) = said
    assert line == "add_request takes no all_token_ids, max_tokens, prompt_len, req_id"


@pytest.mark.parametrize("device", ["xpu", "meta"])
def test_the_stock_one_is_made_where_there_are_no_kernels(device: str) -> None:
    made, said = _made(_State(), torch.device(device))
    assert isinstance(made, _Stock)
    assert said == [f"no kernels for {device}"]
