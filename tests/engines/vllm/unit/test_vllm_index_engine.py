"""The index behind the proposer gives the scan's drafts, whatever the runner does with its rows."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from configs import config
from fresh_index import drafts_of
from ngram_npu.engines.vllm import NgramProposer, v1_sync
from ngram_npu.engines.vllm.v1_sync import IndexedRows, ScannedRows, StockNgramProposer
from test_vllm_rows import WIDTH, Runner
from vllm_config import vllm_config

K = 4


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are indexed by their first draft, even if a scan of them would be cheap."""
    monkeypatch.setattr(v1_sync, "MIN_TOKENS_PER_STEP", 32768)


def _proposer(engine: str, *, high: int = 4, length: int = WIDTH, **more: Any) -> Any:
    more |= {"engine": engine, "lookup": (2, high), "length": length, "k": K}
    return NgramProposer(config(method="custom_class", **more))


def _index_engine(proposer: NgramProposer) -> IndexedRows:
    engine = proposer.engine
    assert isinstance(engine, IndexedRows)
    return engine


def _steps(runner: Runner, count: int) -> Any:
    """The arguments of `propose`, step by step."""
    for _ in range(count):
        token_ids, lengths, counts = runner.step()
        ends = zip(token_ids, lengths.tolist(), counts.tolist(), strict=True)
        yield [row[n - c : n].tolist() for row, n, c in ends], lengths, token_ids


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("match_policy", ["earliest", "latest"])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_the_scans(seed: int, match_policy: str) -> None:
    """Twelve tokens: matches everywhere, look-alikes nowhere."""
    runner = Runner(seed, rows=8, vocabulary=12)
    index = _proposer("index", match_policy=match_policy)
    scan = _proposer("scan", match_policy=match_policy)
    drafted = 0
    for arguments in _steps(runner, 150):
        kept = arguments[2].copy()
        drafts = index.propose(*arguments)
        assert drafts == scan.propose(*arguments)
        assert np.array_equal(arguments[2], kept)
        drafted += sum(map(bool, drafts))
    assert drafted > 200
    statistics = _index_engine(index).index.statistics
    assert statistics.rows_indexed > 0.9 * drafted
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0


def _ladder(**more: Any) -> Any:
    section = {"sizes": "ladder", **more}
    config = vllm_config(additional_config={"ngram_npu": section}, max_model_len=WIDTH, k=K)
    return NgramProposer(config)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("probability", [None, 0.177])
@pytest.mark.parametrize("seed", range(3))
def test_a_ladder_drafts_what_a_fresh_index_does(seed: int, probability: float | None) -> None:
    runner = Runner(seed, rows=8, vocabulary=4)
    proposer = _ladder(min_draft_probability=probability)
    lengths = []
    for sampled, num_tokens, token_ids in _steps(runner, 60):
        counts = np.array([len(row) for row in sampled], np.int32)
        expected = []
        if len(counts):
            expected = drafts_of(proposer.options.ngram, token_ids, num_tokens, counts)[0]
        drafts = proposer.propose(sampled, num_tokens, token_ids)
        assert drafts == expected
        lengths += [len(draft) for draft in drafts if draft]
    assert len(lengths) > 100
    assert (min(lengths) < K) == (probability is not None)
    index = _index_engine(proposer).index
    index.check_integrity()
    assert index.statistics.rebuilds_options == 0


def test_prompts_are_indexed_while_they_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number of tokens per step, in row order; then a step only appends, also for a
    request that was preempted and prefills again."""
    monkeypatch.setattr(v1_sync, "PROMPT_TOKENS_PER_STEP", 150)
    token_ids = np.random.default_rng(0).integers(0, 9, (2, WIDTH), np.int32)
    lengths = np.array([200, 170], np.int32)
    proposer, scan = _proposer("index"), _proposer("scan")
    engine = _index_engine(proposer)
    for first, second in ((150, 0), (200, 100), (200, 170), (200, 170)):
        assert proposer.propose([[], []], lengths, token_ids) == [[], []]
        live = {0: token_ids[0, :first], 1: token_ids[1, :second]}
        slots = engine._rows.row_slots
        engine.index.check_integrity({int(slots[row]): live[row] for row in live})
    for grown in ([1, 2], [1, 1], [0, 3]):
        lengths = lengths + np.array(grown, np.int32)
        sampled = [[1] * n for n in grown]
        expected = scan.propose(sampled, lengths, token_ids)
        assert proposer.propose(sampled, lengths, token_ids) == expected
    statistics = engine.index.statistics
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0
    assert statistics.rows_scanned_catching_up == 0


def test_a_slot_of_a_request_that_is_gone_keeps_nothing_of_it() -> None:
    """Else the prompt of the slot's next request would count as indexed."""
    proposer = _proposer("index", rows=1)
    prompts = np.random.default_rng(0).integers(0, 9, (3, 1, WIDTH), np.int32)
    pages = []
    for prompt in prompts:  # two slots
        proposer.propose([[]], np.array([200], np.int32), prompt)
        pages.append(_index_engine(proposer).index.statistics.pages_in_use)
    assert pages == [1, 2, 2]


@pytest.mark.usefixtures("at_once")
def test_memory_is_taken_from_requests_that_are_gone_while_others_grow() -> None:
    """Not only when a new request arrives."""
    proposer = _proposer("index", rows=8, length=6000)
    engine = _index_engine(proposer)
    engine._cache_config = SimpleNamespace(num_gpu_blocks=1500, block_size=16)
    token_ids = np.random.default_rng(0).integers(0, 9999, (8, 6000), np.int32)
    proposer.propose([[1]] * 3, np.full(3, 5990, np.int32), token_ids[:3])
    first = engine.index.statistics
    assert 0.3 < engine.index.share_in_use < 0.5
    lengths = np.full(5, 20, np.int32)
    for _ in range(145):
        lengths += 40
        proposer.propose([[1] * 40] * 5, lengths, token_ids[3:])
    last = engine.index.statistics
    assert first.pages_in_use + last.pages_in_use > last.num_pages
    assert last.rows_scanned_full == 0
    assert engine.index.share_in_use == last.pages_in_use / last.num_pages
    alone = _proposer("index", rows=8, length=6000)
    alone.propose([[1] * 40] * 5, lengths, token_ids[3:])
    assert last.pages_in_use == _index_engine(alone).index.statistics.pages_in_use, "of all three"


@pytest.mark.usefixtures("at_once")
def test_requests_that_take_turns_keep_their_memory() -> None:
    """Like a pipeline's micro-batches, all of them running, in memory that is more than half
    full."""
    proposer = _proposer("index", rows=8, length=6000)
    engine = _index_engine(proposer)
    engine._cache_config = SimpleNamespace(num_gpu_blocks=1750, block_size=16)
    token_ids = np.random.default_rng(0).integers(0, 9999, (2, 3, 6000), np.int32)
    lengths = np.full(3, 5000, np.int32)
    splits = []
    for _ in range(100):
        lengths += 1
        for turn in range(2):
            proposer.propose([[1]] * 3, lengths, token_ids[turn])
        splits.append(engine.index.statistics.page_splits)
    assert 0.5 < engine.index.share_in_use < 0.9
    assert splits[-1] - splits[0] < splits[0] / 10
    assert engine.index.statistics.rows_scanned_full == 0


@pytest.mark.usefixtures("at_once")
def test_requests_are_followed_while_no_drafts_are_asked_for() -> None:
    token_ids = np.random.default_rng(0).integers(0, 9, (2, WIDTH), np.int32)
    lengths = np.array([200, 210], np.int32)
    proposer = StockNgramProposer(config(method="ngram", engine="index", length=WIDTH))
    for k in (2, 0, 0, 2, 2):
        lengths += 1
        drafts = proposer.propose(k, [[1]] * 2, lengths, token_ids)
        assert max(map(len, drafts)) == k
    engine = proposer.engine
    assert isinstance(engine, IndexedRows)
    assert engine.index is not None
    statistics = engine.index.statistics
    assert statistics.rows_indexed == 10
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0
    assert statistics.slots_given_up == 0
    assert statistics.pages_in_use == 2  # of two slots


@pytest.mark.parametrize(
    ("cache", "context_ranks", "tokens"),
    [
        (None, 1, 8 * WIDTH),
        (SimpleNamespace(num_gpu_blocks=None, block_size=16), 4, 8 * WIDTH),
        (SimpleNamespace(num_gpu_blocks=10, block_size=16), 1, 160),
        (SimpleNamespace(num_gpu_blocks=10, block_size=16), 4, 640),
        (SimpleNamespace(num_gpu_blocks=10**6, block_size=16), 1, 8 * WIDTH),
    ],
)
def test_size_goes_by_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch, cache: Any, context_ranks: int, tokens: int
) -> None:
    given = config(method="custom_class", engine="index", length=WIDTH)
    given.cache_config = cache
    given.parallel_config.decode_context_parallel_size = context_ranks
    proposer = NgramProposer(given)
    made = []
    real = v1_sync.make_index
    monkeypatch.setattr(
        v1_sync, "make_index", lambda *a, **kw: made.append(a[1:]) or real(*a, **kw)
    )
    assert made == []  # only the first draft reveals it
    proposer.propose([[1]], np.array([5], np.int32), np.zeros((1, WIDTH), np.int32))
    assert made == [(16, tokens)]


@pytest.mark.parametrize(
    ("high", "max_model_len", "engine"),
    [(9, 8193, "index"), (10, 8193, "scan"), (9, 8192, "scan")],
)
def test_auto_is_the_index_where_it_can_be_and_pays(
    caplog: pytest.LogCaptureFixture, high: int, max_model_len: int, engine: str
) -> None:
    with caplog.at_level(logging.INFO, "vllm.ngram_npu"):
        made = _proposer("auto", high=high, length=max_model_len).engine
    assert type(made) is {"index": IndexedRows, "scan": ScannedRows}[engine]
    assert f" engine={engine} " in caplog.messages[0]


def test_a_ladder_is_the_index_however_short_the_rows_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "vllm.ngram_npu"):
        proposer = _ladder(min_draft_probability=0.177)
    assert isinstance(proposer.engine, IndexedRows)
    (line,) = caplog.messages
    assert "): lookup=ladder min_draft_probability=0.177 num_speculative_tokens=4 " in line
    assert " engine=index " in line
    assert "prompt_lookup" not in line
