"""Behaviour specific to the V1 runners' drafters: documented drafts, the number of tokens indexed
per step, and the memory of an index."""

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
    V1,
    VOCABULARY,
    Ascend,
    K,
    Request,
    V1Async,
    config,
    random_steps,
)
from ngram_npu import _C, num_threads
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer, v1_device, v1_sync
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer
from ngram_npu.index import NgramIndex


@pytest.mark.parametrize("length", [7, 9, 64])
def test_draft_ends_at_max_model_len(length: int) -> None:
    engine = V1(bounds=(2, 2), length=length)
    engine.begin(Request("a", [1, 2, 3, 4, 5, 1]))
    assert engine.step({"a": [2]})["a"] == [3, 4, 5, 1][: length - 7]


@pytest.mark.parametrize(("engine", "op"), [("scan", "ngram_propose"), ("index", "RowRecognizer")])
def test_invalid_buffer_raises_and_empty_one_is_accepted(engine: str, op: str) -> None:
    proposer = NgramProposer(config(method="custom_class", engine=engine))
    buffer = np.empty((2, 0), np.int32)
    assert proposer.propose([[1], []], np.zeros(2, np.int32), buffer) == [[], []]
    assert proposer.propose([], np.zeros(2, np.int32), np.zeros((2, 4), np.int32)) == []
    with pytest.raises(ValueError, match=f"{op}: token_ids: expected"):
        proposer.propose([[1]], np.ones(1, np.int32), np.ones((1, 4), np.int64))


@pytest.mark.parametrize("kind", [StockNgramProposer, v1_device.AscendNgramProposer])
def test_stock_signature_lowers_k(kind: Any) -> None:
    arguments = (object(),) if kind is v1_device.AscendNgramProposer else ()
    proposer = kind(config(method="ngram", bounds=(2, 2)), *arguments)
    rows, lengths = np.array([[1, 2, 3, 4, 1, 2]], np.int32), np.array([6], np.int32)
    drafts = [proposer.propose(k, [[2]], lengths, rows, slot_mappings={}) for k in (0, 1, 2, 9)]
    assert drafts == [[[]], [[3]], [[3, 4]], [[3, 4, 1, 2]]]
    assert proposer.load_model(object()) is None
    assert not arguments or proposer.dummy_run(1, with_prefill=True) is None


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_recurrent_model_gets_a_draft_for_every_sampled_row(engine: str) -> None:
    """The newest token is drafted if nothing matches, except in unsampled or complete rows."""
    token_ids = np.arange(5 * 64, dtype=np.int32).reshape(5, 64)
    token_ids[0, :5] = [1, 2, 3, 1, 2]
    lengths = np.array([5, 5, 5, 64, 63], np.int32)
    sampled = [[2], [7, 68], [], [255], [318]]
    vllm_config = config(method="custom_class", engine=engine, length=64, rows=5)
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(sampled, lengths, token_ids)[1:] == [[], [], [], []]
    vllm_config.model_config.is_hybrid = True
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(sampled, lengths, token_ids) == [[3, 1, 2], [68], [], [], [318]]
    vllm_config = config(method="ngram", engine=engine, length=64, rows=5, keep_drafting=True)
    assert StockNgramProposer(vllm_config).propose(0, sampled, lengths, token_ids) == [[]] * 5


def test_number_of_threads_is_one_by_default(
    info: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    V1()
    assert num_threads() == 1
    V1(num_threads=2)
    assert num_threads() == 2
    assert caplog.messages[-1].startswith("ngram_npu: num_threads=2 has no effect beyond OMP_NUM")


def test_schedule_of_k_is_reported_as_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = config(method="custom_class")
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 8, 4]]
    NgramProposer(vllm_config)
    assert "num_speculative_tokens_per_batch_size has no effect" in caplog.messages[-1]


# The index of the synchronous runner.


def test_catch_up_accepts_any_lengths_and_slots() -> None:
    index = NgramIndex(2, 1000, min_n=2, max_n=4)
    token_ids = np.zeros((5, 20), np.int32)
    slots = np.array([-1, 2, 2**31 - 1, 0, 1], np.int32)
    lengths = np.array([-5, 2**31 - 1, 7, -(2**31), 9], np.int32)
    counts = np.array([2**31 - 1, -(2**31), -3, 1, 0], np.int32)
    for words in (index.tensor, np.zeros(3, np.int32)):
        rows = INDEX_POLICY, token_ids, lengths, words, slots, counts
        looked_up, _ = _C.index_catch_up(*rows, 2, 4, 0, False, False, 1)
        assert set(looked_up.tolist()) <= {-1, *slots.tolist()}
    index.check_integrity({0: token_ids[3, :0]})
    with pytest.raises(ValueError, match=r"^index_catch_up: token_ids: expected 5 rows, got 4"):
        _C.index_catch_up(rows[0], token_ids[:4], *rows[2:], 2, 4, 0, False, False, 1)


def test_steps_with_few_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens in total or per row are scanned. A ladder is not, because its scan differs."""
    monkeypatch.setattr(INDEX_POLICY, "max_scan_tokens", 1280)
    token_ids = np.random.default_rng(0).integers(0, 9, (200, 1300), np.int32)
    for rows, length, is_scanned in ((2, 640, True), (2, 641, False), (200, 10, True)):
        arguments = [[1]] * rows, np.full(rows, length, np.int32), token_ids
        index, scan = (V1(engine=name, rows=200, length=1300) for name in ("index", "scan"))
        assert index.drafter.propose(*arguments) == scan.drafter.propose(*arguments)
        assert (index.index is None) == is_scanned
    ladder = V1(sizes="ladder", length=1300)
    ladder.drafter.propose([[1]], np.full(1, 20, np.int32), token_ids)
    assert ladder.index is not None


@pytest.mark.parametrize("match_policy", ["earliest", "latest"])
def test_drafts_equal_those_of_a_scan_while_prompts_are_caught_up(match_policy: str) -> None:
    token_ids = np.random.default_rng(1).integers(0, 12, (4, 4000), np.int32)
    lengths = np.array([3000, 2000, 1500, 2500], np.int32)
    index, scan = (V1(length=4000, engine=e, match_policy=match_policy) for e in ("index", "scan"))
    answered = []
    for _ in range(800):
        lengths += 1
        arguments = [[1]] * 4, lengths, token_ids
        assert index.drafter.propose(*arguments) == scan.drafter.propose(*arguments)
        answered.append(index.index.statistics.rows_indexed)
    steps = np.diff(answered, prepend=0)
    assert steps[0] == 0
    assert steps[-1] == 4
    assert (np.diff(steps) >= 0).all()  # one row after the other
    assert 9000 / 16 / 2 < np.argmax(steps == 4) < 9000 / 12 + 10


def test_absent_requests_lose_memory_while_others_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when a new request arrives."""
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)

    def create(blocks: int) -> Any:
        vllm_config = config(method="custom_class", engine="index", rows=8, length=6000)
        vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
        return NgramProposer(vllm_config)

    proposer = create(1500)
    token_ids = np.random.default_rng(0).integers(0, 9999, (8, 6000), np.int32)
    proposer.propose([[1]] * 3, np.full(3, 5990, np.int32), token_ids[:3])
    first = proposer.engine.index.statistics
    assert 0.3 < proposer.engine.index.share_in_use < 0.5
    lengths = np.full(5, 20, np.int32)
    for _ in range(145):
        lengths += 40
        proposer.propose([[1] * 40] * 5, lengths, token_ids[3:])
    last = proposer.engine.index.statistics
    assert first.pages_in_use + last.pages_in_use > last.num_pages
    assert last.rows_scanned_full == 0
    alone = create(10**6)
    alone.propose([[1] * 40] * 5, lengths, token_ids[3:])
    pages = alone.engine.index.statistics.pages_in_use
    assert last.pages_in_use == pages, "of all three absent requests"


def test_index_is_updated_while_no_drafts_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)
    token_ids = np.random.default_rng(0).integers(0, 9, (2, 400), np.int32)
    lengths = np.array([200, 210], np.int32)
    proposer: Any = StockNgramProposer(config(method="ngram", engine="index", length=400))
    for k in (2, 0, 0, 2, 2):
        lengths += 1
        drafts = proposer.propose(k, [[1]] * 2, lengths, token_ids)
        assert max(map(len, drafts)) == k
    statistics = proposer.engine.index.statistics
    assert statistics.rows_indexed == 10
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0
    assert statistics.slots_given_up == 0
    assert statistics.pages_in_use == 2  # of two slots


@pytest.mark.parametrize(
    ("blocks", "ranks", "tokens"),
    [(None, 4, 8 * 400), (10, 1, 160), (10, 4, 640), (10**6, 1, 8 * 400)],
)
def test_index_has_the_capacity_of_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch, blocks: int | None, ranks: int, tokens: int
) -> None:
    vllm_config = config(method="custom_class", engine="index", rows=8, length=400)
    vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
    vllm_config.parallel_config.decode_context_parallel_size = ranks
    proposer = NgramProposer(vllm_config)
    created: list[Any] = []
    make_index = v1_sync.make_index
    monkeypatch.setattr(
        v1_sync, "make_index", lambda *a, **kw: created.append(a[1:]) or make_index(*a, **kw)
    )
    assert created == []  # the capacity is known at the first draft
    proposer.propose([[1]], np.array([5], np.int32), np.zeros((1, 400), np.int32))
    assert created == [(16, tokens)]


# The asynchronous runners.


@pytest.mark.parametrize("seed", range(3))
def test_more_alive_requests_than_slots_keep_the_index_consistent(seed: int) -> None:
    engine = V1Async(rows=ROWS // 2, engine="index")
    scan, max_alive = V1Async(engine="scan"), 0
    slots: Any = engine.drafter._slots
    for sampled, drafts in random_steps(engine, seed, 120, alive=3 * ROWS):
        max_alive = max(max_alive, len(engine.alive))
        scan.alive, scan.runner.requests = engine.alive, engine.runner.requests
        if sampled:
            assert [*drafts.values()] == scan._propose(sampled, K)
        used = [slot for slot, _ in slots._assigned.values()]
        assert sorted([*used, *slots._free]) == list(range(ROWS))
        engine.index.check_integrity()
    assert max_alive > ROWS
    for name in list(engine.alive):
        engine.end(name)
    engine.begin(Request("last", [1]))
    engine.step({"last": [2]})
    assert slots._assigned.keys() == {"last"}
    assert engine.index.statistics.pages_in_use <= 1


@pytest.mark.parametrize("k", [0, 1, 3, K + 2])
@pytest.mark.parametrize("drafts", ["trimmed", "padded"])
def test_asynchronous_drafts_have_the_requested_length(k: int, drafts: str) -> None:
    engine = V1Async(drafts=drafts)
    engine.begin(Request("a", [1, 2, 3, 9, 9, 9, 9, 1, 2]), Request("b", [4]))
    length = min(k, K)
    rest = [5] * length if drafts == "padded" else []
    assert engine.step({"a": [3], "b": [5]}, k) == {"a": [9, 9, 9, 9][:length], "b": rest}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", [V1Async, Ascend])
def test_trimmed_drafts_of_recurrent_models_are_never_empty(kind: Any, keeps: bool) -> None:
    """Except those of requests that sampled nothing, and without drafts."""
    engine = kind(keep_drafting=keeps)
    engine.begin(Request("a", [1, 2, 1]), Request("b", [4]), Request("c", [5]))
    drafts = engine.step({"a": [2], "b": [], "c": [6]}, 2)
    assert drafts == {"a": [1, 2], "b": [], "c": [6] if keeps else []}
    if kind is V1Async:
        assert engine.step({"a": [2]}, 0) == {"a": []}


def test_ascend_launcher_accepts_lists_more_rows_and_no_rows() -> None:
    tokens = torch.full((5, LENGTH), 7, dtype=torch.int32)
    tokens[0, :4] = torch.tensor([1, 2, 3, 1])
    tokens[1, :3] = torch.tensor([4, 5, 6])
    lengths, mask = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([False, False])
    lookup = VOCABULARY, 2, 4, K
    more = torch.tensor([[2, -1], [4, 5], [8, 8]])  # int64, and another row
    for sampled in ([[2], [4, 5]], more):
        rows = tokens.clone()
        results = v1_device.triton_ngram_spec_decode(rows[:2], lengths, sampled, mask, *lookup)
        following, drafts, counts, num_sampled = (result.tolist() for result in results)
        assert (following, counts, num_sampled) == ([2, 5], [3, 3], [1, 2])
        assert drafts == [[3, 1, 2, -1], [6, 4, 5, -1]]
        assert rows[2:].eq(7).all()
    none = tokens[:0], lengths[:0]
    for sampled in ([], more[:0]):
        results = v1_device.triton_ngram_spec_decode(*none, sampled, mask[:0], *lookup)
        assert [tuple(result.shape) for result in results] == [(0,), (0, K), (0,), (0,)]


def test_ascend_device_drafter_rejects_an_index() -> None:
    drafter = Ascend().drafter
    assert (drafter.min_n, drafter.max_n, drafter.k) == (2, 4, K)
    drafter.load_model(object())
    drafter.dummy_run(num_tokens=8, with_prefill=True, is_profile=False)
    with pytest.raises(ValueError, match="max_n"):
        Ascend(bounds=(2, 65))
    for option in ({"sizes": "ladder"}, {"engine": "index"}):
        with pytest.raises(ValueError, match=rf"^ngram_npu: {next(iter(option))}: expected .* npu"):
            v1_device.AscendNgramProposerNPU(config(**option), CPU, object())
