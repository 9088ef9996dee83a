"""Behaviour specific to the V1 runners' drafters: documented drafts, the number of tokens indexed
per step, and the memory of an index."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize(
    ("bounds", "k", "context", "draft"),
    [
        pytest.param((2, 2), 4, [11, 12, 13, 14, 15], [], id="no-earlier-occurrence"),
        pytest.param((4, 4), 4, [11, 12, 13, 14, 11, 12, 13], [], id="occurrence-too-short"),
        pytest.param((2, 3), 2, [2, 3, 9, 8, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7], id="longest"),
        pytest.param((2, 2), 2, [2, 3, 9, 8, 1, 2, 3, 6, 7, 1, 2, 3], [9, 8], id="earliest"),
        pytest.param((2, 2), 1, [1, 2, 3, 4, 1, 2], [3], id="at-most-k-tokens"),
        pytest.param((2, 2), 9, [1, 2, 3, 4, 1, 2], [3, 4, 1, 2], id="up-to-the-end"),
    ],
)
def test_drafts_follow_the_documentation_of_vllm(
    bounds: tuple[int, int], k: int, context: list[int], draft: list[int]
) -> None:
    """The longest suffix within [min, max] that occurred before, the earliest such occurrence, and
    up to k tokens that followed it."""
    engine = V1(bounds=bounds, k=k)
    engine.begin(Request("a", context[:-1]))
    result = engine.step({"a": context[-1:]})["a"]
    assert result == draft
    assert {type(token) for token in result} <= {int}


@pytest.mark.parametrize("length", [7, 8, 9, 64])
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
created = time.process_time()
assert len(proposer.propose([[1]] * 32, lengths, token_ids)[31]) == 4
print(created - started, time.process_time() - created)
"""


def test_first_call_compiles_nothing() -> None:
    """CPU time, so that other load does not matter; vLLM's class takes 1.1 s."""
    command = [sys.executable, "-c", FIRST_CALL, "index", *sys.path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    creation, first_call = map(float, done.stdout.split())
    assert first_call < 0.05
    assert creation < 1.0


# The index of the synchronous runner.


def catch_up(
    index: NgramIndex, rows: tuple[Any, ...], minimum: int, prompt: int, steps: int = 1
) -> tuple[list[int], int, list[int]]:
    """Returns the results of ``index_catch_up``, and each slot's number of tokens afterwards."""
    token_ids, lengths, slots, counts = rows
    policy = _C.IndexPolicy()
    policy.min_index_budget, policy.prefill_index_budget = minimum, prompt
    arguments = policy, token_ids, lengths, index.tensor, slots, counts
    looked_up, behind = _C.index_catch_up(*arguments, 2, 4, 0, False, False, steps)
    header, slot_words, length = 64, 48, 1
    indexed = [int(index.tensor[header + slot * slot_words + length]) for slot in slots]
    return looked_up.tolist(), behind, indexed


def test_catch_up_is_limited_to_a_share_of_a_scan() -> None:
    """One token is indexed per 768 scanned, plus what looked-up rows save."""
    index = NgramIndex(4, 10**6, min_n=2, max_n=4)
    token_ids = np.random.default_rng(0).integers(0, 50, (3, 60000), np.int32)
    lengths, one = np.array([50000, 30000, 51200], np.int32), np.ones(3, np.int32)
    slots = np.array([2, 0, 1], np.int32)
    rows = token_ids, lengths, slots, one
    allowed = (131200 // 32) // 768
    assert catch_up(index, rows, 0, 7) == ([-1, -1, -1], 3, [allowed, 0, 0])
    assert catch_up(index, rows, 100, 7, 3)[2] == [allowed + 300, 0, 0]
    index.append(token_ids, lengths - 65, row_indices=np.array([2]), slot_indices=slots[2:])
    more = (131200 // 32 + 51200 - 2048) // 768
    expected = [-1, -1, 1], 2, [allowed + 300 + more, 0, 51200 - 65]
    assert catch_up(index, rows, 0, 7) == expected
    none, mixed = np.zeros(2, np.int32), np.array([1, 0], np.int32)
    short = token_ids[:2], np.array([500, 300], np.int32), np.array([2, 3], np.int32)
    index = NgramIndex(4, 10**6, min_n=2, max_n=4)
    assert catch_up(index, (*short, none), 50, 600) == ([2, -1], 1, [500, 100]), "all prefill"
    assert catch_up(index, (*short, mixed), 50, 600) == ([2, -1], 1, [500, 150])


def test_catch_up_accepts_any_lengths_and_slots() -> None:
    index = NgramIndex(2, 1000, min_n=2, max_n=4)
    token_ids = np.zeros((5, 20), np.int32)
    slots = np.array([-1, 2, 2**31 - 1, 0, 1], np.int32)
    lengths = np.array([-5, 2**31 - 1, 7, -(2**31), 9], np.int32)
    counts = np.array([2**31 - 1, -(2**31), -3, 1, 0], np.int32)
    rest = 2, 4, 0, False, False, 1
    for words in (index.tensor, np.zeros(3, np.int32)):
        looked_up, _ = _C.index_catch_up(
            INDEX_POLICY, token_ids, lengths, words, slots, counts, *rest
        )
        assert set(looked_up.tolist()) <= {-1, *slots.tolist()}
    index.check_integrity({0: token_ids[3, :0]})
    for message, position, wrong in (
        ("token_ids: expected 5 rows, got 4", 1, token_ids[:4]),
        ("num_tokens: expected size 5, got size 2", 2, lengths[:2]),
        ("index: expected int32", 3, index.tensor.astype(np.int64)),
        ("min_n: expected", 6, 9),
        ("steps: expected 1 to", 11, 0),
    ):
        arguments: list[Any] = [
            INDEX_POLICY,
            token_ids,
            lengths,
            index.tensor,
            slots,
            counts,
            *rest,
        ]
        arguments[position] = wrong
        with pytest.raises(ValueError, match=f"^index_catch_up: {message}"):
            _C.index_catch_up(*arguments)


def test_steps_with_few_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens in total or per row are scanned. A ladder is not, because its scan differs."""
    monkeypatch.setattr(INDEX_POLICY, "max_scan_tokens", 1280)
    token_ids = np.random.default_rng(0).integers(0, 9, (200, 1300), np.int32)
    for rows, length, is_scanned in (
        (1, 1280, True),
        (1, 1281, False),
        (2, 640, True),
        (2, 641, False),
        (200, 10, True),
        (200, 11, False),
    ):
        drafts = []
        for name in ("index", "scan"):
            engine = V1(engine=name, rows=200, length=1300)
            arguments = [[1]] * rows, np.full(rows, length, np.int32), token_ids
            drafts.append(engine.drafter.propose(*arguments))
            if name == "index":
                assert (engine.index is None) == is_scanned
        assert drafts[0] == drafts[1]
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


def test_prompts_are_indexed_while_they_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of tokens per step, in row order. After that a step only appends, also for a
    request that was preempted and prefills again."""
    monkeypatch.setattr(INDEX_POLICY, "prefill_index_budget", 150)
    tokens = np.random.default_rng(0).integers(0, 9, (2, 400)).tolist()
    engine, scan = (V1(length=400, engine=name) for name in ("index", "scan"))
    for each in engine, scan:
        each.begin(Request("a", tokens[0][:200]), Request("b", tokens[1][:170]))
    for first, second in ((150, 0), (200, 100), (200, 170), (200, 170)):
        assert engine.step({"a": [], "b": []}) == {"a": [], "b": []}
        slots = engine.drafter.engine._rows.row_slots
        live = {int(slots[0]): tokens[0][:first], int(slots[1]): tokens[1][:second]}
        engine.index.check_integrity({slot: np.array(t, np.int32) for slot, t in live.items()})
    for first, second in ((1, 2), (1, 1), (0, 3)):
        sampled = {"a": [1] * first, "b": [1] * second}
        assert engine.step(sampled) == scan.step(sampled)
    statistics = engine.index.statistics
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0
    assert statistics.rows_scanned_catching_up == 0


def test_slot_of_an_absent_request_is_cleared_for_the_next_one() -> None:
    proposer = NgramProposer(config(method="custom_class", engine="index", rows=1, length=400))
    prompts = np.random.default_rng(0).integers(0, 9, (3, 1, 400), np.int32)
    pages = []
    for prompt in prompts:  # two slots
        proposer.propose([[]], np.array([200], np.int32), prompt)
        pages.append(proposer.engine.index.statistics.pages_in_use)  # type: ignore[union-attr]
    assert pages == [1, 2, 2]


def long_proposer(blocks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)
    vllm_config = config(method="custom_class", engine="index", rows=8, length=6000)
    vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
    return NgramProposer(vllm_config)


def test_absent_requests_lose_memory_while_others_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when a new request arrives."""
    proposer = long_proposer(1500, monkeypatch)
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
    assert proposer.engine.index.share_in_use == last.pages_in_use / last.num_pages
    alone = long_proposer(10**6, monkeypatch)
    alone.propose([[1] * 40] * 5, lengths, token_ids[3:])
    pages = alone.engine.index.statistics.pages_in_use
    assert last.pages_in_use == pages, "of all three absent requests"


def test_requests_of_alternating_batches_keep_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like micro-batches of a pipeline, with more than half of the memory in use."""
    proposer = long_proposer(1750, monkeypatch)
    token_ids = np.random.default_rng(0).integers(0, 9999, (2, 3, 6000), np.int32)
    lengths = np.full(3, 5000, np.int32)
    splits = []
    for _ in range(100):
        lengths += 1
        for batch in range(2):
            proposer.propose([[1]] * 3, lengths, token_ids[batch])
        splits.append(proposer.engine.index.statistics.page_splits)
    assert 0.5 < proposer.engine.index.share_in_use < 0.9
    assert splits[-1] - splits[0] < splits[0] / 10
    assert proposer.engine.index.statistics.rows_scanned_full == 0


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
    scan, most = V1Async(engine="scan"), 0
    slots: Any = engine.drafter._slots
    for sampled, drafts in random_steps(engine, seed, 120, alive=3 * ROWS):
        most = max(most, len(engine.alive))
        scan.alive, scan.runner.requests = engine.alive, engine.runner.requests
        if sampled:
            assert [*drafts.values()] == scan._propose(sampled, K)
        used = [slot for slot, _ in slots._assigned.values()]
        assert sorted([*used, *slots._free]) == list(range(ROWS))
        engine.index.check_integrity()
    assert most > ROWS
    for name in list(engine.alive):
        engine.end(name)
    engine.begin(Request("last", [1]))
    engine.step({"last": [2]})
    assert slots._assigned.keys() == {"last"}
    assert engine.index.statistics.pages_in_use <= 1


@pytest.mark.parametrize("k", [0, 1, 3, K + 2])
@pytest.mark.parametrize("kind", ["trimmed", "padded"])
def test_asynchronous_drafts_have_the_requested_length(k: int, kind: str) -> None:
    engine = V1Async(drafts=kind)
    engine.begin(Request("a", [1, 2, 3, 9, 9, 9, 9, 1, 2]), Request("b", [4]))
    drafts = engine.step({"a": [3], "b": [5]}, k)
    length = min(k, K)
    rest = [5] * length if kind == "padded" else []
    assert drafts == {"a": [9, 9, 9, 9][:length], "b": rest}


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("kind", [V1Async, Ascend])
def test_trimmed_drafts_of_recurrent_models_are_never_empty(kind: Any, k: int) -> None:
    """Except those of requests that sampled nothing."""
    for keeps in (True, False):
        engine = kind(keep_drafting=keeps)
        engine.begin(Request("a", [1, 2, 1]), Request("b", [4]), Request("c", [5]))
        drafts = engine.step({"a": [2], "b": [], "c": [6]}, k or 1) if k else {}
        if k:
            assert drafts == {"a": [1, 2][:k], "b": [], "c": [6] if keeps else []}
        elif kind is V1Async:
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
