"""The drafters' counts: acceptance by match and position, intervals, Prometheus' counters."""

from __future__ import annotations

import functools
import gc
import logging
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import config
from ngram_npu.engines.vllm import NgramProposer, v1_device, v2
from ngram_npu.engines.vllm import stats as stats_module
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.engines.vllm.stats import Stats, AcceptanceCounts
from ops.reference.drafting import draft_for
from v2_state import RequestState, propose

CPU = torch.device("cpu")
B, S, K, LOW, HIGH = 5, 160, 3, 2, 4
VOCABULARY = 100


class _Loop:
    """Requests whose drafts are verified against a text that repeats itself, and the outcomes.

    A request ends when its row is full, and another begins there. Now and then a counted request
    moves to another row, in place of one that ended.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.token_ids = torch.zeros(B, S, dtype=torch.int32)
        self.lengths = torch.zeros(B, dtype=torch.int32)
        self.texts = [self._text() for _ in range(B)]
        self.drafts: list[tuple[list[int], int]] = [([], 0)] * B
        self.begun = list(range(B))
        # As AcceptanceCounts.take: [verified, accepted][length of the match][position].
        self.expected = np.zeros((2, HIGH + 1, K), np.int64)
        self.rows = 0

    def _text(self) -> list[int]:
        words = [self.rng.integers(0, 6, 5).tolist() for _ in range(3)]
        return [t for _ in range(S) for t in words[self.rng.integers(3)]][: S + K + 1]

    def step(self) -> list[list[int]]:
        """Each row's sampled tokens, which are not in the rows yet."""
        sampled = []
        self.begun = []
        for row, text in enumerate(self.texts):
            length = int(self.lengths[row])
            if length == 0 or length + K + 1 >= S:
                self.texts[row] = text = self._text()
                length = int(self.rng.integers(8, 40))
                self.token_ids[row, :length] = torch.tensor(text[:length])
                self.lengths[row] = length
                self.drafts[row] = [], 0
                self.begun.append(row)
                sampled.append([] if self.rng.random() < 0.5 else [text[length]])
                continue
            draft, match_len = self.drafts[row]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[length + accepted]:
                accepted += 1
            self.expected[0, match_len, : len(draft)] += 1
            self.expected[1, match_len, :accepted] += 1
            sampled.append(text[length : length + accepted + 1])
        for row, tokens in enumerate(sampled):
            length = int(self.lengths[row])
            text = self.texts[row][: length + len(tokens)]
            draft, match_len = draft_for(text, LOW, HIGH, K, self.policy, False, S)[:2]
            self.drafts[row] = (draft, match_len) if tokens else ([], 0)
        self.rows += sum(map(bool, sampled))
        return sampled

    policy = 0

    def append(self, sampled: list[list[int]]) -> None:
        for row, tokens in enumerate(sampled):
            length = int(self.lengths[row])
            self.token_ids[row, length : length + len(tokens)] = torch.tensor(tokens)
            self.lengths[row] += len(tokens)


_config = functools.partial(
    config, k=K, rows=B, length=S, lookup=(LOW, HIGH), vocabulary=VOCABULARY, metrics=True
)


def _synchronous(engine: str, loop: _Loop) -> Any:
    drafter = NgramProposer(_config(method="custom_class", engine=engine))
    for _ in range(120):
        sampled = loop.step()
        loop.append(sampled)
        drafter.propose(sampled, loop.lengths.numpy(), loop.token_ids.numpy())
    return drafter


def _asynchronous(engine: str, loop: _Loop) -> Any:
    names = [f"{row}" for row in range(B)]
    batch = SimpleNamespace(req_ids=names, num_reqs=B, vocab_size=VOCABULARY)
    runner = SimpleNamespace(input_batch=batch, requests=dict.fromkeys(names))
    drafter = v1_device.AsyncNgramProposer(_config(engine=engine), CPU, runner)
    for _ in range(120):
        sampled = loop.step()
        for row in loop.begun:
            runner.requests.pop(names[row])
            names[row] += "'"
            runner.requests[names[row]] = None
        matrix = torch.tensor([[*s, *[-1] * (K + 1 - len(s))] for s in sampled]).int()
        rest = loop.token_ids, loop.lengths, torch.zeros(B, dtype=torch.bool)
        _, counts, valid = drafter.update_token_ids_ngram(matrix, batch, *rest)
        drafter.propose(K, loop.lengths, loop.token_ids, valid, counts)
        loop.append(sampled)
    return drafter


def _second_runner(engine: str, loop: _Loop) -> Any:
    loop.policy = 1
    rows = [4, 2, 0, 1, 3]
    state = RequestState(B, S)
    speculator = v2.NgramSpeculator(_config(engine=engine), CPU, state)
    for _ in range(120):
        sampled = loop.step()
        for i in loop.begun:
            state.begin(f"{i}", rows[i], loop.token_ids[i, : loop.lengths[i]].tolist())
        loop.append(sampled)
        for row, tokens in zip(rows, sampled, strict=True):
            if tokens:
                state.sample(row, tokens)
        propose(speculator, state, rows, list(map(len, sampled)))
    return speculator


@pytest.mark.parametrize("engine", ["scan", "index"])
@pytest.mark.parametrize("drive", [_synchronous, _asynchronous, _second_runner])
def test_acceptance_by_match_and_position(drive: Any, engine: str) -> None:
    loop = _Loop(0)
    drafter = drive(engine, loop)
    stats = drafter._stats
    assert stats._sums["rows"] == loop.rows
    assert stats.rows_indexed > 0.9 * loop.rows if engine == "index" else stats.rows_indexed == 0
    tokens = stats.acceptance.read_and_reset()
    assert tokens.tolist() == loop.expected.tolist()
    verified, accepted = tokens.sum(axis=(1, 2))
    assert verified > accepted > 100
    assert (tokens[1].sum(axis=1) > 0).sum() >= 2  # lengths of matches
    assert stats.acceptance.read_and_reset().sum() == 0


def test_who_moved_or_came_anew_is_not_counted() -> None:
    verdicts = AcceptanceCounts(4, HIGH, K)

    def step(lengths: list[int], num_sampled: list[int]) -> list[int]:
        batch = slice(len(lengths))
        values = np.array([lengths, num_sampled, [3] * len(lengths), [2] * len(lengths)], np.int32)
        verdicts.observe(batch, values)
        return verdicts.read_and_reset()[:, 3].sum(axis=1).tolist()

    assert step([10, 20, 30], [1, 1, 0]) == [0, 0]
    # Accepted 1 of 2; another request; the earlier prompt continues.
    assert step([12, 40, 31], [2, 1, 1]) == [2, 1]
    assert step([40, 43], [1, 3]) == [2, 2]  # only the second is in its old row
    assert step([41, 47], [1, 4]) == [4, 2]  # 0 accepted; 2 of 2 and a filling token


def test_without_the_option() -> None:
    assert v1_device.AsyncNgramProposer(_config(metrics=False), CPU)._stats is None
    drafter = NgramProposer(_config(method="custom_class", metrics=False))
    assert drafter._stats.acceptance is None


class _Event:
    """A GPU that is a few steps behind."""

    arrived = 0
    recorded = 0

    def record(self) -> None:
        _Event.recorded += 1
        self.number = _Event.recorded

    def query(self) -> bool:
        return self.number <= _Event.arrived


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "recorded", 0)
    given = _config()
    options = read_options(given, "ngram_gpu")
    drafter = v1_device.AsyncNgramProposer(given, CPU)
    drafter.device = torch.device("cuda")
    stats: Any = stats_module.DeviceStats(drafter, given, options, None)
    for step, arrived in enumerate([0, 0, 1, 1, 4, 6]):
        monkeypatch.setattr(_Event, "arrived", arrived)
        values = torch.tensor([[10 + step], [1], [3], [2]], dtype=torch.int32)
        stats.observe_tensors(time.perf_counter(), slice(1), *values)
        assert stats._sums["proposals"] == arrived
    assert stats.acceptance.read_and_reset()[0, 3].tolist() == [5, 5, 0]


class _Engine:
    def __init__(self, method: Any = "custom_class", **options: Any) -> None:
        given = _config(method="custom_class", **options)
        self.stats = Stats(self, given, read_options(given, method))

    def observe(self, *, sampled: int = 1, length: int = 10) -> None:
        values = np.array([[length, 9], [sampled, 0], [3, 0], [2, 0]], np.int32)
        self.stats.observe(0.001, slice(2), values, None)


class TestIntervals:
    @pytest.fixture(autouse=True)
    def _level(self, caplog: pytest.LogCaptureFixture) -> None:
        gc.collect()  # engines of the tests above log their counts when they end
        caplog.set_level(logging.INFO, "vllm.ngram_npu")

    def test_begins_with_the_first_work_and_ends_without_more(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
        engine = _Engine(metrics=False)
        for _ in range(2):
            time.sleep(0.5)  # starting up, then idle
            caplog.clear()
            began = time.monotonic()
            engine.observe()
            engine.observe()
            while not caplog.messages and time.monotonic() < began + 30:
                time.sleep(0.01)
            (line,) = caplog.messages
            found = re.match(r"ngram_npu metrics: last (\S+) s: 2 proposals, 1.000 ms each", line)
            assert found
            assert 0.2 <= float(found[1]) <= time.monotonic() - began + 0.1

    def test_the_rest_when_the_engine_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = _Engine()
        engine.observe()
        engine.observe(sampled=2, length=12)
        engine.observe(sampled=3, length=15)
        assert caplog.messages == []
        del engine
        assert re.match(
            r"ngram_npu metrics: last 0\.\d s: 3 proposals, 1\.000 ms each, 3 of 3 rows drafted "
            r"\(100\.0%\), 2\.00 tokens per draft$",
            caplog.messages[0],
        )
        assert caplog.messages[1:] == [
            "ngram_npu acceptance: by match length 3: 75% of 4; by position 0: 100% of 2, "
            "1: 50% of 2; rows from index: 0, scan: 3"
        ]

    def test_beside_a_neural_drafter_both_are_told_apart(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = _Engine("beside")
        for sampled, length in ((1, 10), (2, 12), (3, 15)):  # row 0 from n-grams, row 1 is neural
            values = [[length] * 2, [sampled] * 2, [3, 0], [2, 2]]
            engine.stats.observe(0.001, slice(2), np.array(values, np.int32), None)
        del engine
        assert "3 of 6 rows drafted (50.0%), 2.00 tokens per draft" in caplog.messages[0]
        assert caplog.messages[1:] == [
            "ngram_npu acceptance: by match length neural: 75% of 4, 3: 75% of 4; by position "
            "0: 100% of 4, 1: 50% of 4; rows from ngram: 3, neural: 3"
        ]

    def test_nothing_where_nothing_was(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = _Engine()
        del engine
        assert caplog.messages == []


class _Counter:
    """Of prometheus_client."""

    values: dict[tuple[str, ...], float]

    def __init__(self, name: str, text: str, names: tuple[str, ...]) -> None:
        self.name, self.names = name, names

    def labels(self, **labels: str) -> Any:
        assert tuple(labels) == self.names
        assert (labels.pop("model_name"), labels.pop("engine")) == ("model", "0")
        key = self.name, *labels.values()
        return SimpleNamespace(inc=lambda amount: self._inc(key, amount))

    def _inc(self, key: tuple[str, ...], amount: float) -> None:
        self.values[key] = self.values.get(key, 0) + amount


def test_the_counters_of_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # engines of earlier tests count when they end
    monkeypatch.setattr(_Counter, "values", {}, raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=_Counter))
    monkeypatch.setattr(stats_module, "_registered", {})
    engine = _Engine()
    engine.observe()
    engine.observe(sampled=2, length=12)
    assert _Counter.values == {
        ("ngram_npu_proposals",): 2,
        ("ngram_npu_rows",): 2,
        ("ngram_npu_drafts",): 2,
        ("ngram_npu_draft_tokens",): 4,
        ("ngram_npu_propose_seconds",): 0.002,
    }
    _Counter.values.clear()
    del engine
    assert _Counter.values == {
        ("ngram_npu_source_rows", "index"): 0,
        ("ngram_npu_source_rows", "scan"): 2,
        ("ngram_npu_verified_tokens", "3", "0"): 1,
        ("ngram_npu_verified_tokens", "3", "1"): 1,
        ("ngram_npu_accepted_tokens", "3", "0"): 1,
    }
