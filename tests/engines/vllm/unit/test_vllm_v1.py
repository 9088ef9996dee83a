"""The asynchronous drafter as V1's runner calls it, on CPU tensors; and how it is installed, with a
stand-in of a few lines for vLLM's runner."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import config
from fresh_index import drafts_of
from ngram_npu import NgramConfig
from ngram_npu.engines.vllm import plugin, v1_device, v2
from ngram_npu.ops import workspace_size
from ops import reference
from torch_calls import TorchCalls
from v2_state import RandomState, propose

K = 3
VOCABULARY = 100


class Runner:
    """Requests that arrive, end, are preempted and return; rows that move."""

    def __init__(self, seed: int, rows: int = 6, capacity: int = 120) -> None:
        self._random = random.Random(seed)
        self.requests: dict[str, list[int]] = {}  # alive
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, vocab_size=VOCABULARY)
        self.token_ids = torch.zeros((rows, capacity), dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self._rows, self._started = rows, 0
        self._num_valid_draft_tokens_event = "event"

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(5) for _ in range(count)]

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled tokens [B, K + 1], and which rows continue their prefill [rows]."""
        here, draw = self.input_batch.req_ids, self._random.random
        for name in list(self.requests):
            if len(self.requests[name]) > self.token_ids.shape[1] - 10 or draw() < 0.03:
                del self.requests[name]
        here[:] = [name for name in here if name in self.requests and draw() > 0.1]
        away = [name for name in self.requests if name not in here]
        while len(here) < self._rows and draw() < 0.7:
            if away and draw() < 0.5:
                here.append(away.pop())
                continue
            self._started += 1
            name = f"request {self._started}"
            self.requests[name] = self._tokens(self._random.randrange(1, 60))
            here.append(name)
        if draw() < 0.3:
            self._random.shuffle(here)
        self.input_batch.num_reqs = len(here)
        sampled = torch.full((len(here), K + 1), -1, dtype=torch.int32)
        discard = torch.zeros(self._rows, dtype=torch.bool)
        for row, name in enumerate(here):
            tokens = self.requests[name]
            self.token_ids[row, : len(tokens)] = torch.tensor(tokens)
            self.lengths[row] = len(tokens)
            new = self._tokens(self._random.randrange(1, K + 2))
            sampled[row, : len(new)] = torch.tensor(new)
            discard[row] = draw() < 0.1
            if not discard[row]:
                tokens += new
        return sampled, discard


_config = functools.partial(config, k=K, rows=6, length=120, vocabulary=VOCABULARY)


def _drafter(runner: Any, **options: Any) -> v1_device.AsyncNgramProposer:
    return v1_device.AsyncNgramProposer(_config(**options), torch.device("cpu"), runner)


def _step(drafter: v1_device.AsyncNgramProposer, runner: Runner, k: int = K) -> tuple[Any, ...]:
    """The step's arguments as numpy, the results of both calls, and the rows afterwards."""
    sampled, discard = runner.step()
    batch = runner.input_batch.num_reqs
    token_ids, lengths = runner.token_ids.clone(), runner.lengths.clone()
    given = (token_ids[:batch].numpy().copy(), lengths[:batch].numpy().copy(), sampled.numpy())
    following, counts, valid = drafter.update_token_ids_ngram(
        sampled, runner.input_batch, token_ids, lengths, discard
    )
    drafts, num_drafts = drafter.propose(k, lengths[:batch], token_ids[:batch], valid, counts)
    assert torch.equal(lengths, runner.lengths)
    expected = reference.ngram_step_(
        given[0], given[1], given[2], discard[:batch].numpy(), None, False, VOCABULARY, 2, 4, K,
        0, False, 120, None,
    )  # fmt: skip
    assert following.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()
    assert np.array_equal(token_ids[:batch].numpy(), given[0])
    assert drafts.dtype == torch.int32
    return expected, drafts, num_drafts


@pytest.mark.parametrize("engine", ["scan", "index"])
@pytest.mark.parametrize("seed", range(5))
def test_trimmed_drafts_are_the_contract_s(seed: int, engine: str) -> None:
    runner = Runner(seed)
    drafter = _drafter(runner, drafts="trimmed", engine=engine)
    drafter.load_model(object())
    assert runner._num_valid_draft_tokens_event == "event"
    found = 0
    for _ in range(80):
        (_, _, drafts, counts, _), got, num_drafts = _step(drafter, runner)
        assert got.tolist() == drafts.tolist()
        assert num_drafts is not None
        assert num_drafts.tolist() == counts.tolist()
        found += int(counts.sum())
    assert found > 200


@pytest.mark.parametrize("engine", ["scan", "index"])
@pytest.mark.parametrize("seed", range(5))
def test_padded_drafts_go_on_with_the_newest_token(seed: int, engine: str) -> None:
    """Drafts of any requested length, without the number of tokens found."""
    runner = Runner(seed)
    drafter = _drafter(runner, engine=engine)
    drafter.load_model(object())
    assert runner._num_valid_draft_tokens_event is None
    padded = 0
    for step in range(80):
        k = (3, 1, 0, 2, 5)[step % 5]
        (newest, _, drafts, _, _), got, num_drafts = _step(drafter, runner, k)
        filled = np.where(drafts < 0, newest[:, None], drafts)[:, :k]
        assert got.tolist() == filled.tolist()
        assert num_drafts is None
        padded += int((drafts < 0).sum())
    assert padded > 200


@pytest.mark.parametrize("drafts", ["padded", "trimmed"])
@pytest.mark.parametrize("probability", [None, 0.177])
def test_a_ladder_drafts_what_a_fresh_index_does(drafts: str, probability: float | None) -> None:
    runner = Runner(4)
    options = {"sizes": "ladder", "min_draft_probability": probability}
    drafter = _drafter(runner, drafts=drafts, **options)
    if drafts == "padded":  # no draft ends early, since what fills it up is verified too
        options["min_draft_probability"] = None
    ngram = NgramConfig(k=K, max_len=120, **options)
    lengths = []
    for _ in range(80):
        (newest, sampled, *_), got, num_drafts = _step(drafter, runner)
        token_ids, grown = _grown(runner, sampled)
        expected = drafts_of(ngram, token_ids, grown, sampled)[0] if len(grown) else []
        for i, draft in enumerate(expected):
            filling = -1 if drafts == "trimmed" else newest[i]
            assert got[i].tolist() == draft + [filling] * (K - len(draft))
            assert num_drafts is None or num_drafts[i] == len(draft)
        lengths += [len(draft) for draft in expected if draft]
    assert len(lengths) > 100
    assert (min(lengths) < K) == (probability is not None and drafts == "trimmed")
    assert drafter._slots is not None
    drafter._drafting.index.check_integrity()


def _grown(runner: Runner, sampled: Any) -> tuple[Any, Any]:
    """A step's rows with its sampled tokens, and their lengths."""
    token_ids = runner.token_ids[: len(sampled)].numpy().copy()
    lengths = runner.lengths[: len(sampled)].numpy() + sampled
    for row, name in enumerate(runner.input_batch.req_ids):
        token_ids[row, : lengths[row]] = runner.requests[name][: lengths[row]]
    return token_ids, lengths.astype(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_more_preempted_requests_than_slots(seed: int) -> None:
    runner = Runner(seed, rows=6)
    drafter = _drafter(runner, rows=3, drafts="trimmed", engine="index")
    slots = drafter._slots
    assert slots is not None
    most = 0
    for _ in range(120):
        (_, _, drafts, _, _), got, _ = _step(drafter, runner)
        assert got.tolist() == drafts.tolist()
        most = max(most, len(runner.requests))
        held = [slot for slot, _ in slots._assigned.values()]
        assert sorted([*held, *slots._free]) == list(range(6))
        drafter._drafting.index.check_integrity()
    assert most > 6


def test_slots_of_finished_requests_are_emptied() -> None:
    runner = Runner(0)
    drafter = _drafter(runner, engine="index")
    for _ in range(60):
        _step(drafter, runner)
    slots = drafter._slots
    assert slots is not None
    runner.requests.clear()
    runner.input_batch.req_ids.clear()
    _step(drafter, runner)
    assert set(slots._assigned) == set(runner.requests)
    assert drafter._drafting.index.statistics.rows_indexed > 100
    assert drafter._drafting.index.statistics.pages_in_use <= len(runner.requests)


def test_trimmed_drafts_are_never_empty_where_asked_for() -> None:
    """And not for requests that sampled nothing."""
    runner = Runner(1)
    drafter = _drafter(runner, drafts="trimmed", keep_drafting=True)
    kept = 0
    for step in range(60):
        k = (3, 1)[step % 2]
        (newest, sampled, drafts, counts, _), got, num_drafts = _step(drafter, runner, k)
        assert num_drafts is not None
        none = (counts == 0) & (sampled > 0)
        drafts[none, 0] = newest[none]
        assert got.tolist() == drafts[:, :k].tolist()
        assert num_drafts.tolist() == np.minimum(counts + none, k).tolist()
        kept += int(none.sum())
    assert kept > 20


@pytest.mark.parametrize("options", [{}, {"engine": "index"}, {"drafts": "trimmed"}])
def test_nothing_waits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    runner = Runner(2)
    drafter = _drafter(runner, **options)
    sampled, discard = runner.step()
    batch = runner.input_batch.num_reqs

    def step() -> None:
        rest = (runner.token_ids, runner.lengths, discard)
        _, counts, valid = drafter.update_token_ids_ngram(sampled, runner.input_batch, *rest)
        drafter.propose(K, runner.lengths[:batch], runner.token_ids[:batch], valid, counts)

    step()

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("called")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    step()


def _second_runner() -> Callable[[], object]:
    state = RandomState(6, 96, K)
    speculator = v2.NgramSpeculator(_config(engine="scan"), torch.device("cpu"), state)
    state.fill()
    return lambda: propose(speculator, state, [3, 1], [1, 1])


def _first_runner() -> Callable[[], object]:
    runner = Runner(3)
    drafter = _drafter(runner, engine="scan")
    return lambda: _step(drafter, runner)


@pytest.mark.parametrize(
    ("module", "made", "op"),
    [(v1_device, _first_runner, "ngram_step_"), (v2, _second_runner, "ngram_propose_")],
)
def test_a_workspace_is_made_once(
    monkeypatch: pytest.MonkeyPatch, module: Any, made: Callable[..., Any], op: str
) -> None:
    asked = []

    REAL = v1_device.make_workspace

    def workspace(op: str, options: Any, device: torch.device) -> Any:
        asked.append(op)
        assert REAL(op, options, device) is None  # the CPU needs none
        found = REAL(op, options, torch.device("meta"))
        assert found.shape == (workspace_size(op, 6),)
        return torch.zeros_like(found, device="cpu")

    monkeypatch.setattr(module, "make_workspace", workspace)
    step = made()
    with TorchCalls() as seen:
        for _ in range(3):
            step()
    assert asked == [op]
    given = [kw["workspace"] for name, kw in seen.calls if name == f"ngram_npu.{op}"]
    assert len(given) == 3
    assert all(tensor is given[0] for tensor in given)


@pytest.mark.parametrize(("length", "index"), [(8192, False), (8193, True)])
def test_auto_is_the_index_where_it_pays(length: int, index: bool) -> None:
    assert (_drafter(Runner(0), length=length)._slots is not None) == index


def test_the_line_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm.ngram_npu"):
        _drafter(Runner(0), engine="index")
    (line,) = caplog.messages
    assert "(method ngram_gpu)" in line
    assert " engine=index " in line
    assert " drafts=padded;" in line


def test_a_limit_that_ends_no_draft_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    limited = {"sizes": "ladder", "min_draft_probability": 0.177}
    with caplog.at_level("INFO", "vllm.ngram_npu"):
        _drafter(Runner(0), drafts="trimmed", **limited)
        _drafter(Runner(0), **limited)
    trimmed, padded, line = (m for m in caplog.messages if "min_draft_probability" in m)
    assert "min_draft_probability=0.177" in trimmed
    assert "min_draft_probability=0.177" in padded
    assert line == (
        "ngram_npu: min_draft_probability=0.177 ends no draft here: vLLM verifies "
        f"num_speculative_tokens={K} tokens of every request, however many are likely"
    )


KNOWN = """
class NgramProposerGPU:
    def __init__(self, vllm_config: "VllmConfig", device: "torch.device", runner=None): ...
    def load_model(self, *args, **kwargs): ...
    def update_token_ids_ngram(
        self, sampled_token_ids, gpu_input_batch, token_ids_gpu, num_tokens_no_spec,
        discard_request_mask,
    ): ...
    def propose(
        self, num_speculative_tokens: int, num_tokens_no_spec, token_ids_gpu,
        valid_sampled_token_ids_gpu, valid_sampled_tokens_count,
    ): ...
STOCK = NgramProposerGPU
calls = []
def update_scheduler_for_invalid_drafts(
    num_valid_draft_tokens_event, num_valid_draft_tokens_cpu, scheduler_output, req_id_to_index
):
    calls.append((num_valid_draft_tokens_event, scheduler_output))
def copy_num_valid_draft_tokens(
    num_valid_draft_tokens_cpu, num_valid_draft_tokens_copy_stream, num_valid_draft_tokens_event,
    num_valid_draft_tokens, batch_size,
): ...
"""

Package = Callable[..., None]


@pytest.fixture
def package(fake_vllm: Path) -> Package:
    """Makes a vLLM with this text for its runner."""
    (fake_vllm / "spec_decode/ngram_proposer.py").touch()

    def make(text: str = KNOWN) -> None:
        (fake_vllm / "worker/gpu_model_runner.py").write_text(text)

    return make


def _module() -> ModuleType:
    return importlib.import_module(plugin.RUNNER)


def test_the_plugin_serves_it(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package()
    plugin.install()
    assert plugin.RUNNER not in sys.modules
    with caplog.at_level("DEBUG", "vllm.ngram_npu"):
        module = _module()
        trim = module.update_scheduler_for_invalid_drafts
        plugin.install()
    assert module.NgramProposerGPU is v1_device.AsyncNgramProposer
    assert module.update_scheduler_for_invalid_drafts is trim
    assert [m for m in caplog.messages if "'ngram_gpu'" in m] == [
        "ngram_npu: enabled for method 'ngram_gpu' of the V1 runner (NGRAM_NPU_VLLM=1)"
    ]
    trim(None, None, "padded", {})
    assert module.calls == []
    trim("event", None, "trimmed", {})
    assert module.calls == [("event", "trimmed")]


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (("valid_sampled_tokens_count", "more"), "NgramProposerGPU.propose takes"),
        (("event, num_valid_draft_tokens_cpu, s", "event_, cpu, s"), "update_scheduler_for_inv"),
        (("def copy_num", "def copied_num"), "there is no copy_num_valid_draft_tokens"),
    ],
)
def test_what_is_unlike_is_left_as_it_is(
    package: Package, caplog: pytest.LogCaptureFixture, change: tuple[str, str], doubt: str
) -> None:
    text = KNOWN.replace(*change)
    assert text != KNOWN
    package(text)
    plugin.install()
    module = _module()
    (said,) = [m for m in caplog.messages if "not enabled for method 'ngram_gpu'" in m]
    assert doubt in said
    assert "\n" not in said
    assert module.NgramProposerGPU is module.STOCK
    assert module.update_scheduler_for_invalid_drafts.__module__ == plugin.RUNNER
