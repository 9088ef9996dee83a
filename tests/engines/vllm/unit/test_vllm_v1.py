"""Behaviour specific to the V1 runners' drafters: limits of drafts, the number of tokens indexed
per step, the memory of an index, and the requests that RowRecognizer finds."""

from __future__ import annotations

import copy
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
    config,
    random_steps,
)
from ngram_npu import _C, num_threads
from ngram_npu._C import RowRecognizer
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer, v1_device
from ngram_npu.engines.vllm.v1_sync import StockNgramProposer
from ngram_npu.index import NgramIndex
from ops.guard_pages import guarded


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
    for wrong in (buffer, np.zeros(2, np.int32)), (np.zeros(2, np.int32), [3]), ([3], buffer):
        with pytest.raises(ValueError, match="propose: expected num_tokens_no_spec of rank 1 and"):
            proposer.propose([[1], []], *wrong)  # type: ignore[arg-type]


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


def test_schedule_of_k_is_reported_as_ineffective(caplog: pytest.LogCaptureFixture) -> None:
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
    with pytest.raises(
        ValueError, match=r"^index_catch_up: token_ids: expected 5 rows or more, got 4 rows"
    ):
        _C.index_catch_up(rows[0], token_ids[:4], *rows[2:], 2, 4, 0, False, False, 1)


def test_steps_with_few_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INDEX_POLICY, "max_scan_tokens", 1280)
    token_ids = np.zeros((2, 1300), np.int32)
    for length, is_scanned in ((640, True), (641, False)):
        engine = V1(engine="index", length=1300)
        engine.drafter.propose([[1]] * 2, np.full(2, length, np.int32), token_ids)
        assert (engine.index is None) == is_scanned


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
    """Memory is freed in every step, not only when a new request arrives."""
    monkeypatch.setattr(INDEX_POLICY, "min_index_budget", 32768)

    def create(blocks: int) -> Any:
        vllm_config = config(method="custom_class", engine="index", rows=8, length=6000)
        vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=4)
        vllm_config.parallel_config.decode_context_parallel_size = 4
        return NgramProposer(vllm_config)

    proposer = create(1500)  # 24,000 tokens
    assert proposer.engine.index is None, "expected the index only after the first draft"
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
    assert last.pages_in_use == pages, "expected all three absent requests to lose their pages"


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
    assert statistics.slots_disabled == 0
    assert statistics.pages_in_use == 2  # one page per slot


# Assignment of the synchronous runner's rows to requests.


def _assign_row(recognizer: RowRecognizer, row: np.ndarray, length: int) -> Any:
    """Returns the slot of a step with one row, and whether the slot is new."""
    slots, new = recognizer.assign(row, np.array([length], np.int32), np.ones(1, np.int32))
    return int(slots[0]), len(new) == 1


def _row(first: int = 0, length: int = 100) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)[None].copy()


def _random_steps(seed: int, vocabulary: int) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yields the requests of each step and the arguments of ``assign``. Requests end, are preempted
    and resume, move and grow."""
    engine = V1()
    for sampled, _ in random_steps(engine, seed, 120, vocabulary):
        counts = np.array([*map(len, sampled.values())], np.int32)
        batch = len(sampled)
        yield list(sampled), [engine.buffer[:batch], engine.lengths[:batch], counts]


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
    """Odd seeds skip steps of the recognizer, in which rows grow, move, leave and resume. With as
    few slots as rows, a preempted request may get a new slot, marked as new. With two tokens, most
    rows are equal at all compared positions, and a slot may go to another request with such tokens.
    Two rows of a step never share a slot."""
    rng, recognizer = random.Random(seed), RowRecognizer(num_slots)
    requests: dict[int, tuple[str, list[int]]] = {}
    slots_of_requests: dict[str, int] = {}
    num_continued = 0
    for names, arguments in _random_steps(seed, vocabulary):
        if seed % 2 and rng.random() < 0.4:
            continue
        slots, new = recognizer.assign(*arguments)
        token_ids, lengths, counts = arguments
        assert len(set(slots.tolist())) == len(names)
        for row, (name, slot) in enumerate(zip(names, slots.tolist(), strict=True)):
            tokens, is_new = token_ids[row, : lengths[row]].tolist(), row in new
            if not is_new:
                earlier, known = requests[slot]
                assert earlier == name or vocabulary == 2
                assert len(known) <= lengths[row] - counts[row]
                assert known[-6:] == tokens[: len(known)][-6:]
            if num_slots == 256:
                assert is_new == (name not in slots_of_requests)
                assert slots_of_requests.setdefault(name, slot) == slot
            requests[slot] = name, tokens
            num_continued += not is_new
    assert num_continued > 100


def test_row_continues_the_longest_matching_request() -> None:
    """Each turn of a conversation starts with the text of the previous turn."""
    recognizer = RowRecognizer(num_slots=8)
    steps = (_row(), 50), (_row(500), 7), (_row(), 40), (_row(500), 7), (_row(), 90)
    first, _, second, _, last = (_assign_row(recognizer, row, n)[0] for row, n in steps)
    assert last == first != second


def test_free_absent_slots_clears_requests_absent_for_longer() -> None:
    recognizer = RowRecognizer(num_slots=8)
    slots = [_assign_row(recognizer, _row(100 * i), 10)[0] for i in range(4)]
    for length in range(11, 30):  # a row that grows is recognized without a search
        assert _assign_row(recognizer, _row(300), length) == (slots[3], False)
    assert recognizer.free_absent_slots(21).tolist() == slots[:1]
    assert recognizer.free_absent_slots(0).tolist() == slots[1:3]
    assert recognizer.free_absent_slots(0).tolist() == []
    assert [_assign_row(recognizer, _row(100 * i), 30)[1] for i in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("capacity", [0, 1, 3, 40])
@pytest.mark.parametrize("at_end", [False, True])
def test_arbitrary_lengths_cause_no_out_of_bounds_read(capacity: int, at_end: bool) -> None:
    """Guard pages precede or follow the rows."""
    generator = np.random.default_rng(0)
    recognizer = RowRecognizer(num_slots=8)
    rows = guarded(np.zeros((8, capacity), np.int32), at_end=at_end, writable=True)
    for _ in range(300):
        rows[:] = generator.integers(0, 2, rows.shape)
        lengths = generator.integers(-2, capacity + 3, 8).astype(np.int32)
        counts = generator.integers(-2, 4, 8).astype(np.int32)
        slots, _ = recognizer.assign(rows, lengths, counts)
        assert sorted(slots.tolist()) == list(range(8))


def test_copied_recognizer_is_independent() -> None:
    first = RowRecognizer(num_slots=4)
    _assign_row(first, _row(), 50)
    second = copy.copy(first)
    _assign_row(first, _row(500), 50)
    assert (first.row_slots.tolist(), second.row_slots.tolist()) == ([1], [0])


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
def test_invalid_array_raises(arguments: tuple[Any, ...], message: str) -> None:
    token_ids, lengths, counts = arguments
    with pytest.raises(ValueError, match=f"^RowRecognizer: {re.escape(message)}"):
        RowRecognizer(num_slots=4).assign(
            token_ids, np.array(lengths, np.int32), np.array(counts, np.int32)
        )


def test_number_out_of_range_raises() -> None:
    three = np.zeros((3, 10), np.int32), np.ones(3, np.int32), np.ones(3, np.int32)
    expected = (
        r"^RowRecognizer: num_tokens: expected at most 2 items \(the number of slots\), got 3$"
    )
    with pytest.raises(ValueError, match=expected):
        RowRecognizer(num_slots=2).assign(*three)
    with pytest.raises(ValueError, match=r"^RowRecognizer: num_slots: expected 0 to "):
        RowRecognizer(num_slots=-1)
    with pytest.raises(ValueError, match=r"^RowRecognizer: steps: expected 0 to "):
        RowRecognizer(num_slots=1).free_absent_slots(-1)


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
        used = [slot for slot, _ in slots._assignments.values()]
        assert sorted([*used, *slots._free_slots]) == list(range(ROWS))
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
    rest = [5] * length if drafts == "padded" else []
    assert engine.step({"a": [3], "b": [5]}, k) == {"a": [9, 9, 9, 9][:length], "b": rest}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", [V1Async, Ascend])
def test_trimmed_drafts_of_recurrent_models_are_never_empty(kind: Any, keeps: bool) -> None:
    """Drafts are only empty for requests that sampled nothing, and if no drafts are requested."""
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
    more = torch.tensor([[2, -1], [4, 5], [8, 8]])  # int64, with an additional row
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
    for option, name in (({"lookup": "ladder"}, "sizes"), ({"engine": "index"}, "engine")):
        with pytest.raises(ValueError, match=rf"^ngram_npu: {name}: expected .* npu"):
            v1_device.AscendNgramProposerNPU(config(**option), CPU, object())
