"""The proposer as vLLM's runner calls it, and vLLM's documented n-gram behaviour, without vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from ngram_npu import _C, num_threads
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer
from vllm_config import vllm_config


def _proposer(low: int, high: int, **options: object) -> NgramProposer:
    section = {"prompt_lookup_min": low, "prompt_lookup_max": high}
    return NgramProposer(vllm_config(additional_config={"ngram_npu": section}, **options))


def _propose(
    proposer: NgramProposer, contexts: list[list[int]], sampled: list[list[int]] | None = None
) -> list[list[int]]:
    """Like the runner: buffers of all rows, of which the first are live."""
    token_ids = np.full((8, 64), 3, np.int32)
    lengths = np.full(8, 5, np.int32)
    for row, context in enumerate(contexts):
        token_ids[row, : len(context)] = context
        lengths[row] = len(context)
    if sampled is None:
        sampled = [context[-1:] for context in contexts]
    return proposer.propose(sampled, lengths, token_ids, slot_mappings=None)


@pytest.mark.parametrize(
    ("lookup", "k", "context", "draft"),
    [
        pytest.param((2, 2), 4, [11, 12, 13, 14, 15], [], id="no-earlier-occurrence"),
        pytest.param((4, 4), 4, [11, 12, 13, 14, 11, 12, 13], [], id="too-short-an-occurrence"),
        pytest.param((2, 3), 2, [2, 3, 9, 8, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7], id="the-longest"),
        pytest.param((2, 2), 2, [2, 3, 9, 8, 1, 2, 3, 6, 7, 1, 2, 3], [9, 8], id="the-earliest"),
        pytest.param((2, 2), 1, [1, 2, 3, 4, 1, 2], [3], id="at-most-k-tokens"),
        pytest.param((2, 2), 9, [1, 2, 3, 4, 1, 2], [3, 4, 1, 2], id="no-more-than-there-are"),
    ],
)
def test_documented_behaviour(
    lookup: tuple[int, int], k: int, context: list[int], draft: list[int]
) -> None:
    """What vLLM documents of its `ngram`: the longest suffix within [min, max] that occurred
    before, the earliest such place, and the up to k tokens that followed it there."""
    assert _propose(_proposer(*lookup, k=k), [context]) == [draft]


def test_rows_do_not_mix_and_one_that_sampled_nothing_gets_no_draft() -> None:
    contexts = [[1, 2, 3, 1, 2], [4, 5, 6], [7, 8, 9, 7, 8], [1, 2, 3, 1, 2], []]
    expected = [[3, 1, 2], [], [9, 7, 8], [], []]
    assert _propose(_proposer(2, 2), contexts, [[2], [6], [7, 8], [], []]) == expected


@pytest.mark.parametrize(("length", "draft"), [(7, []), (8, [3]), (9, [3, 4]), (64, [3, 4, 5, 1])])
def test_max_model_len(length: int, draft: list[int]) -> None:
    assert _propose(_proposer(2, 2, max_model_len=length), [[1, 2, 3, 4, 5, 1, 2]]) == [draft]


def test_lists_of_plain_integers_come_back() -> None:
    drafts = _propose(_proposer(2, 2), [[1, 2, 3, 1, 2], [4]])
    assert [type(draft) for draft in drafts] == [list, list]
    assert {type(token) for token in drafts[0]} == {int}


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_a_buffer_without_columns_gets_empty_drafts(engine: str) -> None:
    proposer = NgramProposer(vllm_config(additional_config={"ngram_npu": {"engine": engine}}))
    buffer = np.empty((2, 0), np.int32)
    assert proposer.propose([[1], []], np.zeros(2, np.int32), buffer) == [[], []]


def test_what_comes_in_is_not_changed() -> None:
    token_ids = np.tile(np.array([1, 2, 3, 1, 2, 9], np.int32), (4, 1))
    lengths = np.full(4, 5, np.int32)
    sampled = [[2], [], [1, 2]]
    kept = token_ids.copy(), lengths.copy()
    _proposer(2, 2, max_model_len=6).propose(sampled, lengths, token_ids)
    assert np.array_equal(token_ids, kept[0])
    assert np.array_equal(lengths, kept[1])
    assert sampled == [[2], [], [1, 2]]


def test_no_requests() -> None:
    assert _propose(_proposer(2, 2), []) == []


@pytest.mark.parametrize(("engine", "op"), [("scan", "ngram_propose"), ("index", "RowRecognizer")])
def test_wrong_arrays_are_named(engine: str, op: str) -> None:
    proposer = NgramProposer(vllm_config(additional_config={"ngram_npu": {"engine": engine}}))
    with pytest.raises(ValueError, match=f"{op}: token_ids: expected"):
        proposer.propose([[1]], np.ones(1, np.int32), np.ones((1, 4), np.int64))


def test_the_stock_signature_lowers_k() -> None:
    proposer = StockNgramProposer(vllm_config(prompt_lookup_min=2, prompt_lookup_max=2))
    rows = np.array([[1, 2, 3, 4, 1, 2]], np.int32)
    lengths = np.array([6], np.int32)
    drafts = [proposer.propose(k, [[2]], lengths, rows, slot_mappings={}) for k in (0, 1, 2, 9)]
    assert drafts == [[[]], [[3]], [[3, 4]], [[3, 4, 1, 2]]]


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_a_draft_for_everybody_where_layers_keep_a_state(engine: str) -> None:
    """The newest token if nothing is found; no draft without a sampled token or without room."""
    token_ids = np.arange(5 * 64, dtype=np.int32).reshape(5, 64)
    token_ids[0, :5] = [1, 2, 3, 1, 2]
    lengths = np.array([5, 5, 5, 64, 63], np.int32)
    sampled = [[2], [7, 68], [], [255], [318]]
    config = vllm_config(additional_config={"ngram_npu": {"engine": engine}}, max_num_seqs=5)
    assert NgramProposer(config).propose(sampled, lengths, token_ids)[1:] == [[], [], [], []]
    config.model_config.is_hybrid = True
    given = NgramProposer(config).propose(sampled, lengths, token_ids)
    assert given == [[3, 1, 2], [68], [], [], [318]]


def test_one_thread_unless_asked() -> None:
    _proposer(2, 2)
    assert num_threads() == 1
    NgramProposer(vllm_config(additional_config={"ngram_npu": {"num_threads": 2}}))
    assert num_threads() == 2


@pytest.mark.usefixtures("info")
class TestLog:
    def test_one_line_at_start_up(self, caplog: pytest.LogCaptureFixture) -> None:
        NgramProposer(vllm_config(k=3))
        (line,) = caplog.messages
        assert line.startswith(f"ngram_npu {_C.__version__} drafts for this engine (method custom_")
        assert "prompt_lookup_min=2 prompt_lookup_max=5 num_speculative_tokens=3" in line
        assert "engine=scan device=cpu num_threads=1" in line
        assert line.endswith("options from the defaults")

    def test_other_ranks_are_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        NgramProposer(vllm_config(rank=1, tensor_parallel_size=2))
        assert caplog.messages == []
        NgramProposer(vllm_config(rank=2, tensor_parallel_size=2))  # the next pipeline stage
        assert len(caplog.messages) == 1

    def test_more_threads_than_omp_allows(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        NgramProposer(vllm_config(additional_config={"ngram_npu": {"num_threads": 4}}))
        assert caplog.messages[-1].startswith("ngram_npu: num_threads=4 has no effect beyond OMP_")

    def test_a_schedule_of_k_that_a_class_is_not_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        NgramProposer(vllm_config(num_speculative_tokens_per_batch_size=[[1, 8, 4]]))
        assert "num_speculative_tokens_per_batch_size has no effect" in caplog.messages[-1]

    def test_counters_when_the_engine_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        proposer = _proposer(2, 2)
        _propose(proposer, [[1, 2, 3, 1, 2], [4, 5, 6], [1]], [[2], [6], []])
        del proposer
        pattern = r"ngram_npu metrics: last .* s: 1 proposals, .* ms each, 1 of 2 rows drafted "
        assert re.match(pattern + r"\(50\.0%\), 3\.00 tokens per draft$", caplog.messages[-1])

    @pytest.mark.parametrize("interval", ["-1", "0"])
    def test_no_line_before_the_interval(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, interval: str
    ) -> None:
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", interval)  # vLLM takes 10 s for these
        proposer = _proposer(2, 2)
        caplog.clear()
        _propose(proposer, [[1, 2, 3, 1, 2]])
        assert caplog.messages == []


INERT = """
import importlib.metadata, os, sys
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ngram_npu")
before = set(sys.modules)
entry.load()()
new = sorted(set(sys.modules) - before)
assert new == ["ngram_npu_vllm_plugin"], new
"""


@pytest.mark.parametrize("wish", [None, "", "0"])
def test_installed_but_not_enabled_imports_nothing(wish: str | None) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "NGRAM_NPU_VLLM"}
    if wish is not None:
        environment["NGRAM_NPU_VLLM"] = wish
    environment["NGRAM_NPU_VLLM_ENGINE"] = "no option that would be accepted"
    subprocess.run([sys.executable, "-c", INERT], env=environment, check=True)


def test_neither_on_nor_off_is_one_line_and_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ngram_npu_vllm_plugin

    monkeypatch.setenv("NGRAM_NPU_VLLM", "yes")
    ngram_npu_vllm_plugin.register()
    assert caplog.messages == ["ngram_npu: not enabled: NGRAM_NPU_VLLM: expected 0 or 1, got 'yes'"]


FIRST_CALL = """
import sys
import time
sys.path[:] = sys.argv[2:]
import numpy as np
from ngram_npu.engines.vllm import NgramProposer
from vllm_config import vllm_config

token_ids = np.tile(np.arange(50, dtype=np.int32), (32, 40))
lengths = np.full(32, 2000, np.int32)
started = time.process_time()
options = {"ngram_npu": {"engine": sys.argv[1]}}
proposer = NgramProposer(
    vllm_config(additional_config=options, max_model_len=2048, max_num_seqs=32)
)
made = time.process_time()
assert len(proposer.propose([[1]] * 32, lengths, token_ids)[31]) == 4
print(made - started, time.process_time() - made)
"""


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_the_first_call_compiles_nothing(engine: str) -> None:
    """CPU time, so that other load does not matter; vLLM's class takes 1.1 s."""
    command = [sys.executable, "-c", FIRST_CALL, engine, *sys.path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    made, first_call = map(float, done.stdout.split())
    assert first_call < 0.05
    assert made < 1.0
