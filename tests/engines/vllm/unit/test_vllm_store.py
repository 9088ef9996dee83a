"""The store behind vLLM's methods: what requests share, its scopes, and who saves it."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import GPUModelRunner, RequestState, batch_of, config
from ngram_npu import scope_of
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer, admission, plugin, v1_device, v2
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.sharing import scope_of_request
from ngram_npu.engines.vllm.v2 import RowLookup
from residence import resident_share

CPU = torch.device("cpu")
R, S, K = 6, 400, 4
LADDER: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.01}
WORDS = list(range(50, 90))


def config_of(rank: int = 0, store: str | None = "live", ranks: int = 1, **options: Any) -> Any:
    given = {**LADDER, **({} if store is None else {"store": store}), **options}
    return config(rank=rank, ranks=ranks, k=K, rows=R, length=S, vocabulary=1000, **given)


# Options.


def test_options() -> None:
    off = read_options(config_of(store=None), "v2")
    assert (off.ngram.store, off.store_tokens, off.store_file) == (None, None, "")
    on = read_options(config_of(store_tokens=5000, store_file="/x/y", store_seed="/s"), "v2")
    assert (on.ngram.store, on.store_tokens, on.store_file) == ("live", 5000, "/x/y")
    assert (on.store_seed, on.store_save_minutes, on.scope) == ("/s", 1, "shared")
    for method in ("v2", "ngram_gpu", "beside"):
        assert read_options(config_of(scope="required"), method).scope == "required"
    parallel = config_of(store_file="/x/y")
    parallel.parallel_config.data_parallel_index = 2
    assert read_options(parallel, "v2").store_file == "/x/y.2"


def test_few_tokens_are_refused_at_the_start_and_enough_are_the_default() -> None:
    with pytest.raises(ValueError, match=r"store_tokens: expected at least 12288, .* 12 slots"):
        NgramProposer(config_of(store_tokens=12287))
    many = config_of()
    for requests, capacity in ((1024, 1 << 24), (16384, 2048 * 16384)):
        many.scheduler_config.max_num_seqs = requests
        shared = NgramProposer(many).shared_store
        assert shared is not None
        assert shared.contents.token_capacity == capacity
        assert resident_share(shared.contents.tensor) == 1


# Scopes.


def lora(number: int, name: str) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=name)


def params(**extra: Any) -> Any:
    nothing = dict.fromkeys(("stop_token_ids", "eos_token_id", "repetition_detection"))
    return SimpleNamespace(extra_args=extra or None, max_tokens=1 << 20, **nothing)


def test_scopes_of_requests() -> None:
    assert scope_of_request(None, None, None) == scope_of_request(None, params(), "") == 0
    assert scope_of_request(None, params(ngram_npu_scope=7, other=1), None) == 7
    assert scope_of_request(None, params(ngram_npu_scope="a"), None) == scope_of("a")
    assert scope_of_request(lora(1, "x"), None, None) == scope_of('ngram_npu: [[1, "x"], null]')
    marked = ('ngram_npu: [[1, "x"], null]', 'ngram_npu: [null, null, "a"]')
    different = [
        scope_of_request(
            adapter, params(**({} if named is None else {"ngram_npu_scope": named})), salt
        )
        for adapter in (None, lora(1, "x"), lora(2, "x"), lora(1, "y"))
        for named in (None, 7, "7", "a", "b", -1, 1.5, ["a"], ["a", "b"], *marked)
        for salt in (None, "a", "b", "7", "null", *marked)
    ]
    assert len(set(different)) == len(different)
    assert all(0 <= scope < 2**63 for scope in different)


# The V1 runner, synchronous.


class Rows:
    """A runner's buffer, in which requests keep their rows."""

    def __init__(self) -> None:
        self.tokens = np.zeros((R, S), np.int32)
        self.lengths = np.zeros(R, np.int32)

    def begin(self, row: int, *prompt: int) -> None:
        self.lengths[row] = len(prompt)
        self.tokens[row, : len(prompt)] = prompt

    def step(self, proposers: list[Any], said: dict[int, list[int]]) -> list[list[int]]:
        sampled = [said.get(row, []) for row in range(R)]
        for row, tokens in said.items():
            at = self.lengths[row]
            self.tokens[row, at : at + len(tokens)] = tokens
            self.lengths[row] += len(tokens)
        found = [proposer.propose(sampled, self.lengths, self.tokens) for proposer in proposers]
        assert all(drafts == found[0] for drafts in found)
        return found[0]


def test_v1_sync_drafts_what_others_said() -> None:
    rows, shared, alone = Rows(), NgramProposer(config_of()), NgramProposer(config_of(store=None))
    for row in range(R):
        rows.begin(row, row, row)
    for at in range(0, 40, 4):
        drafts = rows.step([shared], {0: WORDS[at : at + 4]})
    assert not drafts[1]
    assert rows.step([shared], {1: WORDS[:3]})[1][0] == WORDS[3]
    assert alone.propose([[]] * R, rows.lengths, rows.tokens) == [[]] * R
    assert shared.engine.store.contents.statistics.drafts == 1  # type: ignore[union-attr]


def test_v1_sync_at_finish_takes_the_absent_for_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INDEX_POLICY, "patience", 4)
    rows, proposer = Rows(), NgramProposer(config_of(store="finish"))
    rows.begin(0, 9)
    rows.begin(1, 1)
    for at in range(0, 40, 4):
        rows.step([proposer], {0: WORDS[at : at + 4], 1: [2 + at]})
    held = proposer.engine.store.contents  # type: ignore[union-attr]
    assert held.statistics.tokens_entered == 0
    rows.lengths[:2] = rows.lengths[1::-1]  # the last request has the first row now
    rows.tokens[0] = rows.tokens[1]
    for at in range(9):
        end = int(rows.lengths[0])
        rows.tokens[0, end], rows.lengths[0] = 200 + at, end + 1
        proposer.propose([[200 + at]], rows.lengths[:1], rows.tokens[:1])
    assert held.statistics.tokens_entered == 40


def test_v1_sync_stores_what_a_row_says_whose_prompt_is_not_indexed_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(INDEX_POLICY, "least_tokens", 1)
    rows, proposer = Rows(), NgramProposer(config_of())
    rows.begin(0, *range(100, 400))
    rows.begin(1, 1)
    for at in range(0, 40, 4):
        rows.step([proposer], {0: WORDS[at : at + 4]})
    engine = proposer.engine
    assert engine._num_behind > 0  # type: ignore[union-attr]
    assert engine.store.contents.statistics.tokens_entered == 40  # type: ignore[union-attr]
    assert rows.step([proposer], {1: WORDS[:3]})[1][0] == WORDS[3]


# The V1 runner, asynchronous.


def request(extra: Any = None, adapter: Any = None, salt: str | None = None) -> Any:
    """What the scheduler says of a new request."""
    given = {} if extra is None else {"ngram_npu_scope": extra}
    return SimpleNamespace(lora_request=adapter, sampling_params=params(**given), cache_salt=salt)


class Async(GPUModelRunner):
    """A runner with one proposer; requests keep their rows."""

    def __init__(self, store: str, config: Any = config_of, **requests: Any) -> None:
        super().__init__()
        self.begin(**requests)
        self.input_batch = SimpleNamespace(req_ids=list(requests))
        self.tokens = torch.zeros((R, S), dtype=torch.int32)
        self.lengths = torch.ones(R, dtype=torch.int32)
        self.proposer = v1_device.AsyncNgramProposer(
            config(store=store, drafts="trimmed"), CPU, self
        )
        self.held = self.proposer._drafting.store

    def begin(self, **requests: Any) -> None:
        for name, new in requests.items():
            new.req_id = name
        self._update_states(SimpleNamespace(scheduled_new_reqs=list(requests.values())))

    def step(self, said: dict[str, list[int]]) -> dict[str, list[int]]:
        names = self.input_batch.req_ids
        sampled = torch.full((len(names), K + 1), -1, dtype=torch.int32)
        for row, name in enumerate(names):
            new = said.get(name, [])
            sampled[row, : len(new)] = torch.tensor(new, dtype=torch.int32)
        here = slice(len(names))
        counts = (sampled >= 0).sum(1).int()
        drafts, found = self.proposer.propose(
            K, self.lengths[here], self.tokens[here], sampled, counts
        )
        self.lengths[here] += counts
        assert found is not None
        cut = zip(names, drafts.tolist(), found.tolist(), strict=True)
        return {name: draft[:n] for name, draft, n in cut}


def test_v1_async_scopes_are_the_requests() -> None:
    runner = Async(
        "live",
        a=request("t"),
        b=request("t"),
        c=request("u"),
        d=request("t", lora(1, "x")),
        f=request("t", None, "salt"),
    )
    for at in range(0, 40, 4):
        runner.step({"a": WORDS[at : at + 4]})
    found = runner.step(dict.fromkeys("bcdf", WORDS[:3]))
    assert [found[name][:1] for name in "bcdf"] == [[WORDS[3]], [], [], []]
    runner.begin(e=request("v"))  # in the row and the slot of b
    del runner.requests["b"]
    runner.input_batch.req_ids[1], runner.lengths[1] = "e", 1
    assert runner.step({"e": WORDS[:3]})["e"] == []
    runner.held.check_integrity()


def test_v1_async_tells_the_finished_from_the_preempted() -> None:
    runner = Async("finish", a=request(), b=request())
    runner.tokens[1] = 7
    for at in range(0, 40, 4):
        runner.step({"a": WORDS[at : at + 4]})
    tokens, length = runner.tokens[0].clone(), runner.lengths[0].clone()
    runner.input_batch.req_ids = ["b"]  # a is preempted
    runner.tokens[0], runner.lengths[0] = 7, 1
    runner.step({"b": [3]})
    assert runner.held.statistics.open_slots == 2
    runner.input_batch.req_ids = ["b", "a"]
    runner.tokens[1], runner.lengths[1] = tokens, length
    runner.step({"a": [90, 91]})
    assert runner.held.statistics.tokens_entered == 0
    runner.input_batch.req_ids = ["b"]
    del runner.requests["a"]
    runner.step({"b": [4]})
    assert runner.held.statistics.tokens_entered == 42, "all that a said, in one piece"


def test_v1_store_in_unknown_runner_raises() -> None:
    class Unknown:
        def _update_states(self, output: Any) -> None: ...

    admission.install_v1(SimpleNamespace(GPUModelRunner=Unknown))
    for runner in (Unknown(), None):
        with pytest.raises(ValueError, match=r"store: expected a runner .*_update_states"):
            v1_device.AsyncNgramProposer(config_of(), CPU, runner)


# The V2 runner.


class V2Runner:
    def __init__(self, store: str, batches: int = 1) -> None:
        self.req_states: Any = RequestState(R, S)
        given = config_of(store=store)
        given.max_concurrent_batches = batches
        self.speculator = v2.NgramSpeculator(given, CPU, self.req_states)
        self.held: Any = self.speculator.shared_store.contents  # type: ignore[union-attr]

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.req_states.remove_request(new.req_id)
            self.req_states.add_request(
                req_id=new.req_id,
                prompt_len=len(new.prompt),
                all_token_ids=new.prompt,
                num_computed_tokens=0,
                max_tokens=new.sampling_params.max_tokens,
            )

    def step(self, said: dict[str, list[int]]) -> dict[str, list[int]]:
        states = self.req_states
        rows = [states.req_id_to_index[name] for name in said]
        for row, tokens in zip(rows, said.values(), strict=True):
            states.append(row, tokens)
        counts = [len(tokens) for tokens in said.values()]
        drafts: torch.Tensor = self.speculator.propose(
            batch_of(rows, list(said)),
            *[None] * 4,
            torch.tensor(counts, dtype=torch.int32),
            None,
            states.last_sampled_tokens,
            *[None] * 3,
        )
        return dict(zip(said, drafts.tolist(), strict=True))


def begins(name: str, prompt: list[int], *owner: Any) -> Any:
    described = request(*owner)
    described.req_id, described.prompt = name, prompt
    return described


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[V2Runner]:
    """The runner's class as the plugin leaves it."""
    module = ModuleType(plugin.V2_RUNNER)
    module.GPUModelRunner = V2Runner  # type: ignore[attr-defined]
    monkeypatch.setattr(V2Runner, "add_requests", V2Runner.add_requests)
    monkeypatch.setattr(RowLookup, "has_request_data", False)
    plugin.install_request_data(module)
    assert RowLookup.has_request_data
    return V2Runner


def test_v2_scopes_are_the_requests(told: type[V2Runner], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ngram_npu")
    runner = told("live")
    whose = "requests of one cache_salt, LoRA adapter and extra_args['ngram_npu_scope'] draft"
    assert whose in caplog.text
    new = [
        begins("a", [1], "t"),
        begins("b", [2], "t"),
        begins("c", [3]),
        begins("d", [4], "t", lora(1, "x")),
        begins("e", [5], "t", None, "salt"),
    ]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new))
    for at in range(0, 40, 4):
        runner.step({"a": WORDS[at : at + 4]})
    found = runner.step(dict.fromkeys("bcde", WORDS[:3]))
    newest = WORDS[2]
    assert [found[name][0] for name in "bcde"] == [WORDS[3], *[newest] * 3]
    runner.held.check_integrity()


def test_v2_what_leaves_has_finished(told: type[V2Runner]) -> None:
    runner = told("finish")
    new = [begins("a", [1]), begins("b", [2])]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new))
    for at in range(0, 40, 4):
        runner.step({"a": WORDS[at : at + 4]})
    runner.req_states.remove_request("a")
    assert runner.step({"b": [3]})["b"] == [3] * K
    assert runner.held.statistics.tokens_entered == 40
    assert runner.step({"b": WORDS[:3]})["b"][0] == WORDS[3]
    # The store's own drafts are filled up too: vLLM's model reads every place.
    assert runner.step({"b": WORDS[37:39]})["b"] == [WORDS[39]] + [WORDS[38]] * (K - 1)
    assert runner.req_states.remove_request("nobody") is None


def test_v2_text_of_last_request_is_stored_without_another_step(
    told: type[V2Runner],
) -> None:
    runner = told("finish")
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[begins("a", [1])]))
    for at in range(0, 40, 4):
        runner.step({"a": WORDS[at : at + 4]})
    runner.req_states.remove_request("a")
    assert runner.held.statistics.tokens_entered == 40


@pytest.mark.parametrize(("longest", "stored"), [(S, 4), (9, 8), (7, 6)])
def test_v2_asynchronous_request_is_stored_to_its_end_and_no_further(
    told: type[V2Runner], longest: int, stored: int
) -> None:
    """The last step may have run behind the end, unless max_model_len is known to be the end."""
    runner = told("live", batches=2)
    runner.req_states.max_model_len = longest
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[begins("a", [1])]))
    for at in (0, 4):
        runner.step({"a": WORDS[at : at + 4]})
    runner.req_states.remove_request("a")
    assert [text.tolist() for _, text in runner.held._texts()] == [WORDS[:stored]]


def test_v2_store_in_unknown_runner_raises() -> None:
    with pytest.raises(
        ValueError, match=r"store: expected a runner .* GPUModelRunner.add_requests"
    ):
        V2Runner("live")


def test_v2_another_runner_is_left_alone() -> None:
    class Other:
        def add_requests(self, output: Any) -> None: ...

    module, stays = ModuleType(plugin.V2_RUNNER), Other.add_requests
    module.GPUModelRunner = Other  # type: ignore[attr-defined]
    plugin.install_request_data(module)
    assert Other.add_requests is stays
    assert not RowLookup.has_request_data
