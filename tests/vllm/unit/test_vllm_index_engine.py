"""The index behind the proposer gives the scan's drafts, whatever the runner does with its rows."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fresh_index import drafts_of
from ngram_npu.vllm import NgramProposer
from ngram_npu.vllm import engines as engines_module
from ngram_npu.vllm.engines import IndexEngine, ScanEngine
from ngram_npu.vllm.options import read_options
from ngram_npu.vllm.proposer import StockNgramProposer
from test_vllm_rows import WIDTH, Runner
from vllm_config import vllm_config

K = 4


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are indexed by their first draft, even if a scan of them would be cheap."""
    monkeypatch.setattr(engines_module, "LEAST_TOKENS_PER_STEP", 32768)


def _proposer(
    engine: str,
    *,
    low: int = 2,
    high: int = 4,
    rows: int = 8,
    max_model_len: int = WIDTH,
    **more: Any,
) -> Any:
    section = {"prompt_lookup_min": low, "prompt_lookup_max": high, "engine": engine, **more}
    config = vllm_config(
        additional_config={"ngram_npu": section},
        max_model_len=max_model_len,
        max_num_seqs=rows,
        k=K,
    )
    return NgramProposer(config)


def _index_engine(proposer: NgramProposer) -> IndexEngine:
    engine = proposer.engine
    assert isinstance(engine, IndexEngine)
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


def test_a_ladder_is_caught_up_with_by_tokens_that_fit_its_slots() -> None:
    """A few tokens per step; until all are indexed, the row is scanned."""
    proposer = _ladder(min_draft_probability=0.177)
    token_ids = np.random.default_rng(0).integers(0, 4, (1, WIDTH), np.int32)
    for length in range(200, WIDTH):
        num_tokens = np.array([length], np.int32)
        (draft,) = proposer.propose([[1]], num_tokens, token_ids)
        assert len(draft) <= K
    index = _index_engine(proposer).index
    index.check_integrity({0: token_ids[0]})
    assert index.statistics.rebuilds_options == 0
    assert index.statistics.rows_indexed > 50


@pytest.mark.usefixtures("at_once")
def test_a_moved_request_is_not_indexed_anew() -> None:
    token_ids = np.random.default_rng(0).integers(0, 50, (4, WIDTH), np.int32)
    lengths = np.array([200, 210, 220, 230], np.int32)
    proposer = _proposer("index")
    engine = _index_engine(proposer)
    slots = []
    for _ in range(5):
        proposer.propose([[1]] * 4, lengths, token_ids)
        slots.append(engine._rows.row_slots.tolist())
        token_ids, lengths = np.roll(token_ids, 1, axis=0), np.roll(lengths + 1, 1)
    assert slots[1] == np.roll(slots[0], 1).tolist() != slots[0]
    statistics = engine.index.statistics
    assert statistics.rebuilds_rewritten == statistics.rebuilds_shorter == 0
    assert statistics.rows_indexed == 20


def test_prompts_are_indexed_while_they_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number of tokens per step, in row order; then a step only appends, also for a
    request that was preempted and prefills again."""
    monkeypatch.setattr(engines_module, "PROMPT_TOKENS_PER_STEP", 150)
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


def _follows_a_match(draft: list[int], row: list[int], low: int, high: int) -> bool:
    """Whether the row holds the draft after an earlier occurrence of one of its own suffixes."""
    return any(
        row[at : at + n] == row[-n:] and row[at + n : at + n + len(draft)] == draft
        for n in range(low, high + 1)
        for at in range(len(row) - n)
    )


def test_requests_that_are_mixed_up_cost_drafts_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows agree at every place that is checked, and swap places unnoticed by the recogniser:
    one index then describes the other row's tokens."""
    monkeypatch.setattr(engines_module, "LEAST_TOKENS_PER_STEP", 10**9)
    generator = np.random.default_rng(3)
    rows = generator.integers(0, 6, (2, WIDTH), np.int32)
    looked_at = [4**i for i in range(5)]
    rows[1, looked_at] = rows[0, looked_at]
    rows[1, 285:] = rows[0, 285:]
    assert (rows[0, :285] != rows[1, :285]).mean() > 0.5
    proposer, scan = _proposer("index"), _proposer("scan")
    lengths, differing = np.full(2, 300, np.int32), 0
    slots = []
    for step in range(40):
        drafts = proposer.propose([[1], [1]], lengths, rows)
        slots.append(_index_engine(proposer)._rows.row_slots.tolist())
        for draft, row, length in zip(drafts, rows, lengths, strict=True):
            assert not draft or _follows_a_match(draft, row[:length].tolist(), 2, 4)
        differing += drafts != scan.propose([[1], [1]], lengths, rows)
        if step == 20:
            rows = rows[::-1].copy()
        lengths = lengths + 1
    assert slots[0] == slots[-1]  # fooled
    assert differing > 0  # the only case that is not recognised
    assert _index_engine(proposer).index.statistics.rebuilds_rewritten == 0


class AtRandom:
    """A recogniser that assigns slots without comparing tokens."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def assign(self, token_ids: Any, num_tokens: Any, num_sampled: Any) -> Any:
        slots = self._generator.permutation(16)[: len(num_tokens)].astype(np.int32)
        return slots, np.zeros(0, np.int64)

    def forget_absent(self, steps: int) -> Any:
        return np.zeros(0, np.int32)


def test_slots_that_belong_to_no_one_reach_nothing_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recogniser that assigns at random: drafts are still pieces of the row they are for."""
    runner = Runner(5, rows=8, vocabulary=5)
    proposer = _proposer("index")
    engine = _index_engine(proposer)
    monkeypatch.setattr(engine, "_rows", AtRandom())
    drafted = 0
    for sampled, lengths, token_ids in _steps(runner, 150):
        for draft, row, length in zip(
            proposer.propose(sampled, lengths, token_ids), token_ids, lengths, strict=True
        ):
            assert not draft or _follows_a_match(draft, row[:length].tolist(), 2, 4)
            drafted += bool(draft)
        if engine.index is not None:  # a step without rows does not make it
            engine.index.check_integrity()
    assert drafted > 100


@pytest.mark.usefixtures("at_once")
def test_memory_that_runs_low_is_taken_from_requests_that_are_gone() -> None:
    proposer = _proposer("index", rows=2)
    engine = _index_engine(proposer)
    generator = np.random.default_rng(0)
    one = np.array([WIDTH - 1], np.int32)
    pages = []
    for _ in range(12):
        proposer.propose([[1]], one, generator.integers(0, 9999, (1, WIDTH), np.int32))
        pages.append(engine.index.statistics.pages_in_use)
    statistics = engine.index.statistics
    assert pages[0] < pages[1]
    assert max(pages) <= statistics.num_pages / 2 + pages[0]
    assert statistics.rows_scanned_full == 0


@pytest.mark.usefixtures("at_once")
def test_memory_is_taken_from_requests_that_are_gone_while_others_grow() -> None:
    """Not only when a new request arrives."""
    proposer = _proposer("index", rows=8, max_model_len=6000)
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


@pytest.mark.usefixtures("at_once")
def test_requests_that_take_turns_keep_their_memory() -> None:
    """Like a pipeline's micro-batches, all of them running, in memory that is more than half
    full."""
    proposer = _proposer("index", rows=8, max_model_len=6000)
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
def test_rows_that_grew_in_a_step_without_drafts_are_not_indexed_anew() -> None:
    """vLLM leaves the drafter out where any request is within k tokens of its limit."""
    proposer, scan = _proposer("index", max_model_len=3000), _proposer("scan", max_model_len=3000)
    token_ids = np.random.default_rng(0).integers(0, 50, (3, 3000), np.int32)
    lengths = np.array([2000, 2100, 2200], np.int32)
    engine = _index_engine(proposer)
    begun = []
    for order in ([0, 1, 2], [0, 1, 2], [2, 1]):  # grown in place, then also moved
        rows, ends = token_ids[order], lengths[order]
        assert proposer.propose([[1]] * len(order), ends, rows) == scan.propose(
            [[1]] * len(order), ends, rows
        )
        begun.append(engine.index.statistics.page_splits)
        lengths += 3
    assert begun[0] > 10
    assert begun[2] - begun[0] <= 2


@pytest.mark.usefixtures("at_once")
def test_requests_are_followed_while_no_drafts_are_asked_for() -> None:
    token_ids = np.random.default_rng(0).integers(0, 9, (2, WIDTH), np.int32)
    lengths = np.array([200, 210], np.int32)
    proposer = StockNgramProposer(
        vllm_config(
            additional_config={"ngram_npu": {"engine": "index"}},
            max_model_len=WIDTH,
            prompt_lookup_min=2,
            prompt_lookup_max=4,
        )
    )
    for k in (2, 0, 0, 2, 2):
        lengths += 1
        drafts = proposer.propose(k, [[1]] * 2, lengths, token_ids)
        assert max(map(len, drafts)) == k
    engine = proposer.engine
    assert isinstance(engine, IndexEngine)
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
    section = {"ngram_npu": {"engine": "index"}}
    config = vllm_config(max_model_len=WIDTH, additional_config=section)
    config.cache_config = cache
    config.parallel_config.decode_context_parallel_size = context_ranks
    proposer = NgramProposer(config)
    made = []
    real = engines_module.make_index
    monkeypatch.setattr(
        engines_module, "make_index", lambda *a, **kw: made.append(a[1:]) or real(*a, **kw)
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
        made = _proposer("auto", high=high, max_model_len=max_model_len).engine
    assert type(made) is {"index": IndexEngine, "scan": ScanEngine}[engine]
    assert f" engine={engine} " in caplog.messages[0]


def test_a_ladder_is_the_index_however_short_the_rows_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "vllm.ngram_npu"):
        proposer = _ladder(min_draft_probability=0.177)
    assert isinstance(proposer.engine, IndexEngine)
    (line,) = caplog.messages
    assert "): lookup=ladder min_draft_probability=0.177 num_speculative_tokens=4 " in line
    assert " engine=index " in line
    assert "prompt_lookup" not in line


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ({"sizes": "ladder"}, "sizes: expected 'consecutive' on cuda, got 'ladder'"),
        ({"sizes": "ladder", "engine": "index"}, "sizes: expected 'consecutive' on cuda"),
        ({"engine": "index"}, "engine: expected 'auto' or 'scan' on cuda, got 'index'"),
    ],
)
def test_an_index_on_another_device_is_refused(section: dict[str, str], option: str) -> None:
    options = read_options(vllm_config(additional_config={"ngram_npu": section}), "custom_class")
    with pytest.raises(ValueError, match=f"^ngram_npu: {option}.*: the index is in host memory$"):
        engines_module.takes_index(options, "cuda")


@pytest.mark.parametrize(
    ("engine", "device_type", "index"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("scan", "cpu", False)],
)
def test_auto_is_the_scan_on_a_gpu(engine: str, device_type: str, index: bool) -> None:
    config = vllm_config(max_model_len=8193, additional_config={"ngram_npu": {"engine": engine}})
    options = read_options(config, "custom_class")
    assert engines_module.takes_index(options, device_type) == index
