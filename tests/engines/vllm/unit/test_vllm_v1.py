"""Tests what only the drafters of V1's runners do: limits of drafts, number of tokens indexed per
step, memory of an index, and RowRecognizer, which finds out to which request each row of a step
belongs. V1, V1Async and Ascend are fake engines with these runners."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
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
    make_config,
    run_random_steps,
)
from ngram_npu import _C, num_threads
from ngram_npu._C import RowRecognizer
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer, v1_device
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer
from ngram_npu.index import NgramIndex
from ops.guard_pages import make_guarded_copy


@pytest.mark.parametrize("length", [7, 9, 64])
def test_draft_ends_at_max_model_len(length: int) -> None:
    engine = V1(bounds=(2, 2), length=length)
    engine.begin(Request("a", [1, 2, 3, 4, 5, 1]))
    assert engine.step({"a": [2]})["a"] == [3, 4, 5, 1][: length - 7]


@pytest.mark.parametrize(("engine", "op"), [("scan", "ngram_propose"), ("index", "RowRecognizer")])
def test_empty_buffer_is_accepted_and_invalid_buffer_raises(engine: str, op: str) -> None:
    proposer = NgramProposer(make_config(method="custom_class", engine=engine))
    buffer = np.empty((2, 0), np.int32)
    assert proposer.propose([[1], []], np.zeros(2, np.int32), buffer) == [[], []]
    assert proposer.propose([], np.zeros(2, np.int32), np.zeros((2, 4), np.int32)) == []
    with pytest.raises(ValueError, match=f"{op}: token_ids: expected"):
        proposer.propose([[1]], np.ones(1, np.int32), np.ones((1, 4), np.int64))
    for arguments in (buffer, np.zeros(2, np.int32)), (np.zeros(2, np.int32), [3]), ([3], buffer):
        with pytest.raises(ValueError, match="propose: expected num_tokens_no_spec of rank 1 and"):
            proposer.propose([[1], []], *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", [StockNgramProposer, v1_device.AscendNgramProposer])
def test_drafter_with_stock_signature_limits_drafts_to_argument_k(drafter: Any) -> None:
    arguments = (object(),) if drafter is v1_device.AscendNgramProposer else ()
    proposer = drafter(make_config(method="ngram", bounds=(2, 2)), *arguments)
    rows, lengths = np.array([[1, 2, 3, 4, 1, 2]], np.int32), np.array([6], np.int32)
    drafts = [proposer.propose(k, [[2]], lengths, rows, slot_mappings={}) for k in (0, 1, 2, 9)]
    assert drafts == [[[]], [[3]], [[3, 4]], [[3, 4, 1, 2]]]
    assert proposer.load_model(object()) is None
    assert not arguments or proposer.dummy_run(1, with_prefill=True) is None


@pytest.mark.parametrize("engine", ["scan", "index"])
def test_recurrent_model_gets_a_draft_for_every_sampled_row(engine: str) -> None:
    """If nothing matches, the newest token is the draft, except in rows that sampled nothing and in
    full rows."""
    token_ids = np.arange(5 * 64, dtype=np.int32).reshape(5, 64)
    token_ids[0, :5] = [1, 2, 3, 1, 2]
    lengths = np.array([5, 5, 5, 64, 63], np.int32)
    samples = [[2], [7, 68], [], [255], [318]]
    vllm_config = make_config(method="custom_class", engine=engine, length=64, rows=5)
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(samples, lengths, token_ids)[1:] == [[], [], [], []]
    vllm_config.model_config.is_hybrid = True
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(samples, lengths, token_ids) == [[3, 1, 2], [68], [], [], [318]]
    vllm_config = make_config(method="ngram", engine=engine, length=64, rows=5, keep_drafting=True)
    assert StockNgramProposer(vllm_config).propose(0, samples, lengths, token_ids) == [[]] * 5


def test_number_of_threads_is_one_by_default(
    plugin_log: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    V1()
    assert num_threads() == 1
    V1(num_threads=2)
    assert num_threads() == 2
    assert caplog.messages[-1].startswith("ngram_npu: num_threads=2 has no effect beyond OMP_NUM")


def test_table_of_draft_lengths_is_logged_as_unused(caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = make_config(method="custom_class")
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 8, 4]]
    NgramProposer(vllm_config)
    assert "num_speculative_tokens_per_batch_size has no effect" in caplog.messages[-1]


# The index of the synchronous runner.


def test_index_catch_up_with_arbitrary_lengths_and_slots_keeps_index_consistent() -> None:
    index = NgramIndex(2, 1000, min_n=2, max_n=4)
    token_ids = np.zeros((5, 20), np.int32)
    slots = np.array([-1, 2, 2**31 - 1, 0, 1], np.int32)
    lengths = np.array([-5, 2**31 - 1, 7, -(2**31), 9], np.int32)
    counts = np.array([2**31 - 1, -(2**31), -3, 1, 0], np.int32)
    options = 2, 4, 0, False, False, 1  # min_n, max_n, match_policy, ladder, outcomes, steps
    for words in (index.tensor, np.zeros(3, np.int32)):
        rows = INDEX_POLICY, token_ids, lengths, words, slots, counts
        lookup_slots, _ = _C.index_catch_up(*rows, *options)
        assert set(lookup_slots.tolist()) <= {-1, *slots.tolist()}
    index.check_integrity({0: token_ids[3, :0]})
    with pytest.raises(
        ValueError, match=r"^index_catch_up: token_ids: expected 5 rows or more, got 4 rows"
    ):
        _C.index_catch_up(rows[0], token_ids[:4], *rows[2:], *options)


def test_steps_with_few_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INDEX_POLICY, "max_scan_tokens", 1280)
    token_ids = np.zeros((2, 1300), np.int32)
    for length, is_scanned in ((640, True), (641, False)):
        engine = V1(engine="index", length=1300)
        engine.drafter.propose([[1]] * 2, np.full(2, length, np.int32), token_ids)
        assert (engine.index is None) == is_scanned


@pytest.mark.parametrize("match_policy", ["earliest", "latest"])
def test_drafts_equal_those_of_a_scan_while_prompts_are_indexed(match_policy: str) -> None:
    token_ids = np.random.default_rng(1).integers(0, 12, (4, 4000), np.int32)
    lengths = np.array([3000, 2000, 1500, 2500], np.int32)
    index, scan = (V1(length=4000, engine=e, match_policy=match_policy) for e in ("index", "scan"))
    num_tokens, num_indexed_rows = lengths.sum(), []
    for _ in range(800):
        lengths += 1
        arguments = [[1]] * 4, lengths, token_ids
        assert index.drafter.propose(*arguments) == scan.drafter.propose(*arguments)
        num_indexed_rows.append(index.index.statistics.rows_indexed)
    steps = np.diff(num_indexed_rows, prepend=0)
    assert steps[0] == 0
    assert steps[-1] == 4
    assert (np.diff(steps) >= 0).all()  # the rows are indexed one after the other
    # A step's budget is at least 16 tokens (min_index_budget). It increases as rows are indexed.
    assert num_tokens / 32 < np.argmax(steps == 4) < num_tokens / 12 + 10


def test_memory_of_absent_requests_is_freed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter frees memory in every step, not only when a new request arrives."""
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)

    def create_proposer(blocks: int) -> Any:
        vllm_config = make_config(method="custom_class", engine="index", rows=8, length=6000)
        vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=4)
        vllm_config.parallel_config.decode_context_parallel_size = 4
        return NgramProposer(vllm_config)

    proposer = create_proposer(1500)  # 24,000 tokens
    assert proposer.engine.index is None, "expected the index only after the first draft"
    token_ids = np.random.default_rng(0).integers(0, 9999, (8, 6000), np.int32)
    proposer.propose([[1]] * 3, np.full(3, 5990, np.int32), token_ids[:3])
    first_statistics = proposer.engine.index.statistics
    assert 0.3 < proposer.engine.index.share_in_use < 0.5
    lengths = np.full(5, 20, np.int32)
    for _ in range(145):
        lengths += 40
        proposer.propose([[1] * 40] * 5, lengths, token_ids[3:])
    statistics = proposer.engine.index.statistics
    assert first_statistics.pages_in_use + statistics.pages_in_use > statistics.num_pages
    assert statistics.rows_scanned_full == 0
    other_proposer = create_proposer(10**6)  # has never had the absent requests
    other_proposer.propose([[1] * 40] * 5, lengths, token_ids[3:])
    num_pages = other_proposer.engine.index.statistics.pages_in_use
    assert statistics.pages_in_use == num_pages, "expected no pages of the three absent requests"


def test_index_is_updated_while_no_drafts_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)
    token_ids = np.random.default_rng(0).integers(0, 9, (2, 400), np.int32)
    lengths = np.array([200, 210], np.int32)
    proposer: Any = StockNgramProposer(make_config(method="ngram", engine="index", length=400))
    for k in (2, 0, 0, 2, 2):
        lengths += 1
        drafts = proposer.propose(k, [[1]] * 2, lengths, token_ids)
        assert max(map(len, drafts)) == k
    statistics = proposer.engine.index.statistics
    assert statistics.rows_indexed == 10
    assert statistics.rebuilds_shorter == statistics.rebuilds_rewritten == 0
    assert statistics.slots_disabled == 0
    assert statistics.pages_in_use == 2  # one page per slot


# Assignment of the synchronous runner's rows to requests.


def _assign_row(recognizer: RowRecognizer, row: np.ndarray, length: int) -> Any:
    """Returns the slot of a step with one row, and whether the slot is new."""
    slots, new = recognizer.assign(row, np.array([length], np.int32), np.ones(1, np.int32))
    return int(slots[0]), len(new) == 1


def _make_row(first: int = 0, length: int = 100) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)[None].copy()


def _yield_random_steps(seed: int, vocabulary: int) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yields the requests of each step and the arguments of ``assign``. Requests end, are preempted
    and resume, move and grow."""
    engine = V1()
    for samples, _ in run_random_steps(engine, seed, 120, vocabulary):
        counts = np.array([*map(len, samples.values())], np.int32)
        batch = len(samples)
        yield list(samples), [engine.buffer[:batch], engine.lengths[:batch], counts]


def test_strided_rows_get_the_slots_of_contiguous_rows() -> None:
    rows = np.arange(800, dtype=np.int32).reshape(2, 400)[:, 50:150]
    lengths, ones = np.array([50, 60], np.int32), np.ones(2, np.int32)
    recognizer = RowRecognizer(num_slots=4)
    slots, _ = recognizer.assign(rows, lengths, ones)
    moved_slots, new = recognizer.assign(rows[::-1].copy(), lengths[::-1] + 1, ones)
    assert moved_slots.tolist() == slots.tolist()[::-1]
    assert len(new) == 0


@pytest.mark.parametrize(("num_slots", "vocabulary"), [(ROWS, 1000), (256, 1000), (16, 2)])
@pytest.mark.parametrize("seed", range(15))
def test_request_keeps_its_slot_in_random_steps(seed: int, num_slots: int, vocabulary: int) -> None:
    """With odd seeds, the recognizer misses some steps, in which rows grow, move, leave and resume.
    With as many slots as rows, a preempted request may get a new slot, which is reported as new.
    With a vocabulary of two tokens, most rows are equal at all compared positions, so a slot may go
    to another request with equal tokens. Two rows of a step never share a slot."""
    rng, recognizer = random.Random(seed), RowRecognizer(num_slots)
    requests: dict[int, tuple[str, list[int]]] = {}
    slots_of_requests: dict[str, int] = {}
    num_continued = 0
    for names, arguments in _yield_random_steps(seed, vocabulary):
        if seed % 2 and rng.random() < 0.4:
            continue
        slots, new = recognizer.assign(*arguments)
        token_ids, lengths, counts = arguments
        assert len(set(slots.tolist())) == len(names)
        for row, (name, slot) in enumerate(zip(names, slots.tolist(), strict=True)):
            tokens, is_new = token_ids[row, : lengths[row]].tolist(), row in new
            if not is_new:
                earlier, known_tokens = requests[slot]
                assert earlier == name or vocabulary == 2
                assert len(known_tokens) <= lengths[row] - counts[row]
                end = len(known_tokens)  # the recognizer compares the last six tokens
                assert known_tokens[-6:] == tokens[:end][-6:]
            if num_slots == 256:
                assert is_new == (name not in slots_of_requests)
                assert slots_of_requests.setdefault(name, slot) == slot
            requests[slot] = name, tokens
            num_continued += not is_new
    assert num_continued > 100


def test_row_continues_the_longest_matching_request() -> None:
    """A conversation's turn begins with the text of the previous turn, so two requests match."""
    recognizer = RowRecognizer(num_slots=8)
    row, other_row = _make_row(), _make_row(500)
    steps = (row, 50), (other_row, 7), (row, 40), (other_row, 7), (row, 90)
    first, _, second, _, last = (_assign_row(recognizer, *step)[0] for step in steps)
    assert last == first != second


def test_free_absent_slots_frees_requests_absent_for_more_steps_than_its_argument() -> None:
    recognizer = RowRecognizer(num_slots=8)
    slots = [_assign_row(recognizer, _make_row(100 * i), 10)[0] for i in range(4)]
    for length in range(11, 30):  # a row that grows is recognized without a search
        assert _assign_row(recognizer, _make_row(300), length) == (slots[3], False)
    assert recognizer.free_absent_slots(21).tolist() == slots[:1]
    assert recognizer.free_absent_slots(0).tolist() == slots[1:3]
    assert recognizer.free_absent_slots(0).tolist() == []
    is_new = [_assign_row(recognizer, _make_row(100 * i), 30)[1] for i in range(4)]
    assert is_new == [True, True, True, False]


@pytest.mark.parametrize("capacity", [0, 1, 3, 40])
@pytest.mark.parametrize("at_end", [False, True])
def test_arbitrary_lengths_cause_no_out_of_bounds_read(capacity: int, at_end: bool) -> None:
    """The rows are in memory directly before or after a guard page."""
    generator = np.random.default_rng(0)
    recognizer = RowRecognizer(num_slots=8)
    rows = make_guarded_copy(np.zeros((8, capacity), np.int32), at_end=at_end, writable=True)
    for _ in range(300):
        rows[:] = generator.integers(0, 2, rows.shape)
        lengths = generator.integers(-2, capacity + 3, 8).astype(np.int32)
        counts = generator.integers(-2, 4, 8).astype(np.int32)
        slots, _ = recognizer.assign(rows, lengths, counts)
        assert sorted(slots.tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((1, 4), np.int64), [1], [1]), "token_ids: expected int32, got int64"),
        ((np.zeros((1, 8), np.int32)[:, ::2], [1], [1]), "token_ids: expected a contiguous inner"),
        (
            (np.zeros((1, 4), np.int32), [1, 1], [1, 1]),
            "token_ids: expected 2 rows or more, got 1 rows",
        ),
        ((np.zeros((2, 4), np.int32), [1, 1], [1]), "num_sampled: expected size 2, got size 1"),
    ],
)
def test_row_recognizer_with_invalid_array_raises(arguments: tuple[Any, ...], message: str) -> None:
    token_ids, lengths, counts = arguments
    with pytest.raises(ValueError, match=f"^RowRecognizer: {re.escape(message)}"):
        RowRecognizer(num_slots=4).assign(
            token_ids, np.array(lengths, np.int32), np.array(counts, np.int32)
        )


def test_row_recognizer_with_number_out_of_range_raises() -> None:
    three_rows = np.zeros((3, 10), np.int32), np.ones(3, np.int32), np.ones(3, np.int32)
    expected = (
        r"^RowRecognizer: num_tokens: expected at most 2 items \(the number of slots\), got 3$"
    )
    with pytest.raises(ValueError, match=expected):
        RowRecognizer(num_slots=2).assign(*three_rows)
    with pytest.raises(ValueError, match=r"^RowRecognizer: num_slots: expected 0 to "):
        RowRecognizer(num_slots=-1)
    with pytest.raises(ValueError, match=r"^RowRecognizer: steps: expected 0 to "):
        RowRecognizer(num_slots=1).free_absent_slots(-1)


# The asynchronous runners.


@pytest.mark.parametrize("seed", range(3))
def test_index_with_more_alive_requests_than_slots_stays_consistent(seed: int) -> None:
    engine = V1Async(rows=ROWS // 2, engine="index")
    scan, max_alive = V1Async(engine="scan"), 0
    slots: Any = engine.drafter._slots
    for samples, drafts in run_random_steps(engine, seed, 120, max_alive=3 * ROWS):
        max_alive = max(max_alive, len(engine.alive))
        scan.alive, scan.runner.requests = engine.alive, engine.runner.requests
        if samples:
            assert [*drafts.values()] == scan._propose(samples, K)
        used_slots = [slot for slot, _ in slots._assignments.values()]
        assert sorted([*used_slots, *slots._free_slots]) == list(range(ROWS))
        engine.index.check_integrity()
    assert max_alive > ROWS
    for name in list(engine.alive):
        engine.end(name)
    engine.begin(Request("last", [1]))
    engine.step({"last": [2]})
    assert slots._assignments.keys() == {"last"}
    assert engine.index.statistics.pages_in_use <= 1


@pytest.mark.parametrize("k", [0, 1, 3, K + 2])
@pytest.mark.parametrize("drafts", ["trimmed", "padded"])
def test_asynchronous_drafts_have_the_requested_length(k: int, drafts: str) -> None:
    engine = V1Async(drafts=drafts)
    engine.begin(Request("a", [1, 2, 3, 9, 9, 9, 9, 1, 2]), Request("b", [4]))
    length = min(k, K)
    padding = [5] * length if drafts == "padded" else []
    assert engine.step({"a": [3], "b": [5]}, k) == {"a": [9, 9, 9, 9][:length], "b": padding}


@pytest.mark.parametrize("keep_drafting", [True, False])
@pytest.mark.parametrize("engine_class", [V1Async, Ascend])
def test_keep_drafting_prevents_empty_drafts(engine_class: Any, keep_drafting: bool) -> None:
    """Drafts are empty only for requests that sampled nothing, or if no drafts are requested."""
    engine = engine_class(keep_drafting=keep_drafting)
    engine.begin(Request("a", [1, 2, 1]), Request("b", [4]), Request("c", [5]))
    drafts = engine.step({"a": [2], "b": [], "c": [6]}, 2)
    assert drafts == {"a": [1, 2], "b": [], "c": [6] if keep_drafting else []}
    if engine_class is V1Async:
        assert engine.step({"a": [2]}, 0) == {"a": []}


def test_ascend_launcher_accepts_lists_additional_rows_and_no_rows() -> None:
    tokens = torch.full((5, LENGTH), 7, dtype=torch.int32)
    tokens[0, :4] = torch.tensor([1, 2, 3, 1])
    tokens[1, :3] = torch.tensor([4, 5, 6])
    lengths, mask = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([False, False])
    lookup = VOCABULARY, 2, 4, K
    sampled_tensor = torch.tensor([[2, -1], [4, 5], [8, 8]])  # int64, with an additional row
    for samples in ([[2], [4, 5]], sampled_tensor):
        rows = tokens.clone()
        results = v1_device.triton_ngram_spec_decode(rows[:2], lengths, samples, mask, *lookup)
        next_tokens, drafts, counts, num_sampled = (result.tolist() for result in results)
        assert (next_tokens, counts, num_sampled) == ([2, 5], [3, 3], [1, 2])
        assert drafts == [[3, 1, 2, -1], [6, 4, 5, -1]]
        assert rows[2:].eq(7).all()
    no_rows = tokens[:0], lengths[:0]
    for samples in ([], sampled_tensor[:0]):
        results = v1_device.triton_ngram_spec_decode(*no_rows, samples, mask[:0], *lookup)
        assert [tuple(result.shape) for result in results] == [(0,), (0, K), (0,), (0,)]


def test_ascend_device_drafter_rejects_an_index() -> None:
    drafter = Ascend().drafter
    assert (drafter.min_n, drafter.max_n, drafter.k) == (2, 4, K)
    drafter.load_model(object())
    drafter.dummy_run(num_tokens=8, with_prefill=True, is_profile=False)
    for options, name in (({"lookup": "ladder"}, "sizes"), ({"engine": "index"}, "engine")):
        with pytest.raises(ValueError, match=rf"^ngram_npu: {name}: expected .* npu"):
            v1_device.AscendNgramProposerNPU(make_config(**options), CPU, object())
