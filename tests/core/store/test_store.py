"""Tests NgramStore: sizes, scopes, drafts from other requests, statistics, locks and forks."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from core.store.requests import Request
from ngram_npu import _C, IntegrityError, NgramStore, scope_of
from residence import compute_resident_share

TEXT = list(range(100, 140))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "num_slots: expected at least 1, got 0"),
        (
            {"num_slots": 4, "token_capacity": 3840},
            "token_capacity: expected at least 4096, 1024 for each of 4 slots, got 3840",
        ),
        ({"token_capacity": -1}, "token_capacity: expected at least 1024, .* got -1"),
        ({"token_capacity": 2**29}, "token_capacity: too large, got 536870912"),
        ({"visibility": "late"}, "visibility: expected 'live' or 'finish', got 'late'"),
        ({"kind": "jax"}, "kind: expected 'numpy' or 'torch', got 'jax'"),
    ],
)
def test_store_with_invalid_argument_is_rejected(changes: dict[str, object], message: str) -> None:
    arguments = {"num_slots": 1, "token_capacity": 4096, **changes}
    with pytest.raises(ValueError, match=f"NgramStore: {message}"):
        NgramStore(**arguments)  # type: ignore[arg-type]


def test_store_sizes_follow_from_token_capacity() -> None:
    store = NgramStore()
    statistics = store.statistics
    assert (statistics.num_slots, statistics.num_blocks, statistics.line_bits) == (256, 3907, 18)
    assert 21_000_000 < store.nbytes < 22_000_000
    assert store.token_capacity == 3907 * 256
    assert store.visibility == statistics.visibility == "live"
    assert store.tensor.ctypes.data % (2 << 20) == 0, "the tensor must start at a huge page"
    assert NgramStore(1, 3841).statistics.num_blocks == 16


def test_memory_is_committed_before_the_first_step(tmp_path: Path) -> None:
    store = NgramStore(2, 1 << 20)
    assert compute_resident_share(store._words) == 1
    store.save(tmp_path / "store")
    loaded_store = NgramStore.load(tmp_path / "store")
    merged_store = NgramStore.load(tmp_path / "store", token_capacity=1 << 19, kind="torch")
    assert [compute_resident_share(s._words) for s in (loaded_store, merged_store)] == [1, 1]


def test_live_text_is_drafted_for_other_requests() -> None:
    store = NgramStore(2, 4096)
    assert Request(store, 0).append(TEXT) == []
    assert Request(store, 1, prompt=[9]).append(TEXT[:5]) == TEXT[5:9]
    stats = store.statistics
    assert (stats.lookups, stats.hits, stats.drafts, stats.draft_tokens) == (2, 1, 1, 4)
    assert stats.draft_share == 0.5
    assert (stats.tokens_inserted, stats.tokens_held) == (45, 45)
    assert (stats.blocks_in_use, stats.open_slots) == (2, 2)


def test_visibility_finish_drafts_text_only_after_its_request_ends() -> None:
    store = NgramStore(2, 4096, visibility="finish")
    request = Request(store, 0)
    request.append(TEXT)
    assert Request(store, 1).append(TEXT[:5]) == []
    assert store.statistics.tokens_inserted == 0
    request.finish()
    assert Request(store, 1).append(TEXT[:5]) == TEXT[5:9]
    assert store.statistics.open_slots == 1


def test_oldest_text_is_overwritten() -> None:
    store = NgramStore(1, 1024)
    Request(store, 0).append(TEXT)
    rng = np.random.default_rng(3)
    for _ in range(8):
        Request(store, 0).append(rng.integers(1000, 9000, 200).tolist())
    assert Request(store, 0).append(TEXT[:5]) == []
    statistics = store.statistics
    assert statistics.blocks_in_use == statistics.num_blocks == 4
    assert statistics.tokens_held <= 1024
    assert statistics.entries_evicted > 0
    store.check_integrity()


def test_scope_of_maps_names_to_distinct_integers() -> None:
    assert scope_of(None) == scope_of(0) == 0
    assert scope_of(np.int64(7)) == 7  # type: ignore[arg-type]
    assert scope_of(2**62 - 1) == 2**62 - 1
    scopes = {scope_of(name) for name in ("", "a", "b", "7", "\ud800", "ä")}
    assert len(scopes) == 6
    assert all(2**62 <= scope < 2**63 and scope_of(scope) == scope for scope in scopes)
    assert scope_of("tenant") == 8007596991872918313, "saved files contain this scope"
    for value in (-1, 2**62):
        with pytest.raises(ValueError, match=r"scope_of: name: expected 0 to 2\*\*62 - 1"):
            scope_of(value)
    for name in (True, 1.5, b"a"):
        with pytest.raises(TypeError, match="scope_of: name: expected str, int or None"):
            scope_of(name)  # type: ignore[arg-type]


def test_warm_adds_texts_to_a_scope() -> None:
    store = NgramStore(2, 8192, visibility="finish")
    store.warm([TEXT, np.arange(1000, 1700), []], scope="jobs")
    assert store.statistics.tokens_inserted == 740
    assert store.statistics.open_slots == 0
    request = Request(store, 0, scope=scope_of("jobs"))
    assert request.append([1400, 1401]) == [1402, 1403, 1404, 1405]
    for invalid in ([[1.5]], [[[1, 2]]], [[-1]], [[2**31]]):
        with pytest.raises(ValueError, match="NgramStore: warm: expected"):
            store.warm(invalid)  # type: ignore[arg-type]
    store.check_integrity()


def test_appended_rows_continue_the_text_of_their_slots() -> None:
    store = NgramStore(3, 8192)
    rows = np.arange(20, dtype=np.int32).reshape(2, 10)
    slots, scopes = np.array([2, 0], np.int32), np.array([5, 0], np.int64)
    for count in (4, 6):
        lengths = np.full(2, count, np.int32)
        new = np.full(2, min(count, 4), np.int32)  # tokens of both calls overlap
        store.append_rows(rows, lengths, new, slot_indices=slots, scopes=scopes)
    assert [(scope, text.tolist()) for scope, text in store.texts()] == [
        (5, [0, 1, 2, 3, 4, 5]),
        (0, [10, 11, 12, 13, 14, 15]),
    ]
    assert store.statistics.tokens_inserted == 12
    store.close_slots(slots)
    assert store.statistics.open_slots == 0


def test_clear_erases_one_scope_or_all_scopes() -> None:
    store = NgramStore(2, 8192)
    store.warm([TEXT * 20], scope="a")
    store.warm([TEXT], scope="b")
    store.clear("a")
    assert store.statistics.tokens_held == len(TEXT)
    assert Request(store, 0, scope=scope_of("a")).append(TEXT[:5]) == []
    assert Request(store, 0, scope=scope_of("b")).append(TEXT[:5]) == TEXT[5:9]
    store.check_integrity()
    store.clear()
    assert store.statistics.tokens_held == 0
    assert not np.isin(store.tensor[64:], TEXT).any()
    request = Request(store, 0, scope=scope_of("b"))
    assert request.append(TEXT[:5]) == []
    # A request that was not finished continues after a clear.
    store.clear()
    request.append([7, 8, 9])
    assert store.statistics.tokens_held == 3
    assert Request(store, 1, scope=scope_of("b")).append([7]) == [8, 9]
    store.check_integrity()


def test_store_pack_rejects_small_buffer_and_piece_out_of_range() -> None:
    store, size = NgramStore(1, 4096), _C.STORE_PIECE_WORDS
    buffer = np.full(size, 7, np.int32)
    with pytest.raises(ValueError, match=f"^store_pack: to: expected size {size}, got size "):
        _C.store_pack(store.tensor, 0, buffer[1:])
    for piece in (-1, _C.store_pieces(store.tensor)):
        with pytest.raises(ValueError, match=f"^store_pack: piece: expected 0 to 2, got {piece}"):
            _C.store_pack(store.tensor, piece, buffer)
    assert (buffer == 7).all()


def test_integrity_check_detects_corruption() -> None:
    store = NgramStore(1, 4096)
    store.warm([TEXT])
    store.check_integrity()
    store.tensor[64 + 4 + 8] = 99  # the serial number of the second block
    with pytest.raises(IntegrityError, match=r"NgramStore: a block is not at the index .* \(1\)"):
        store.check_integrity()


def test_store_cannot_be_copied_or_pickled() -> None:
    store = NgramStore(1, 4096)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="NgramStore: a store cannot be copied or pickled"):
            duplicate(store)


def test_warm_waits_for_the_lock_and_steps_skip_the_store() -> None:
    store = NgramStore(2, 4096)
    assert _C.store_lock(store.tensor)
    warm_thread = threading.Thread(target=store.warm, args=([TEXT],))
    warm_thread.start()
    while store.statistics.calls_skipped == 0:
        pass
    assert Request(store, 0).append(TEXT[:5]) == []
    _C.store_unlock(store.tensor)
    warm_thread.join()
    assert store.statistics.calls_skipped > 1
    assert store.statistics.tokens_inserted == len(TEXT)


def test_lock_that_is_never_released_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngram_npu.store.store._LOCK_TIMEOUT_S", 0.05)
    store = NgramStore(1, 4096)
    assert _C.store_lock(store.tensor)
    for call in (store.clear, store.check_integrity, lambda: store.warm([TEXT])):
        with pytest.raises(RuntimeError, match=r"NgramStore: in use by another call for 0\.05"):
            call()  # type: ignore[operator]


def test_threads_step_warm_and_save_concurrently(tmp_path: Path) -> None:
    """All warmed texts are in the store, and every saved file is valid."""
    store, path = NgramStore(4, 65536), tmp_path / "store"
    texts = [list(range(1000 * i, 1000 * i + 50)) for i in range(1, 40)]
    is_done = threading.Event()

    def save_repeatedly() -> None:
        while not is_done.is_set():
            store.save(path)
            NgramStore.load(path)

    def run_steps() -> None:
        request = Request(store, 0)
        for token in range(400):
            request.append([token % 7])

    with ThreadPoolExecutor(2) as pool:
        save_result, step_result = pool.submit(save_repeatedly), pool.submit(run_steps)
        try:
            store.warm(texts)
            step_result.result()
        finally:
            is_done.set()
        save_result.result()
    store.check_integrity()
    for text in texts:
        assert Request(store, 1).append(text[:3]) == text[3:7]


def test_concurrent_warm_calls_lose_no_text() -> None:
    store, interval = NgramStore(4, 1 << 18), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda i: store.warm([[i]] * 300, scope=i), (1, 2)))
    finally:
        sys.setswitchinterval(interval)
    assert store.scopes == {1: 300, 2: 300}


def count_tokens_in_forked_process(store: NgramStore) -> int:
    """Returns the number of tokens that a forked process finds in the store; 99 if the process
    cannot use the store."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(60)
    status = 99
    try:
        num_tokens = store.statistics.tokens_held
        store.check_integrity()
        has_draft = Request(store, 0, scope=1).append(TEXT[:3]) == TEXT[3:7]
        store.warm([TEXT], scope=2)
        has_new_draft = Request(store, 1, scope=2).append(TEXT[:3]) == TEXT[3:7]
        if has_draft == bool(num_tokens) and has_new_draft:
            status = num_tokens
    finally:
        os._exit(status)


def test_fork_empties_a_store_that_another_thread_uses() -> None:
    store = NgramStore(4, 65536)
    store.warm([TEXT], scope=1)
    is_locked, is_done = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with store._locked():
            is_locked.set()
            is_done.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold_lock)
        is_locked.wait()
        try:
            assert count_tokens_in_forked_process(store) == 0
        finally:
            is_done.set()
    assert count_tokens_in_forked_process(store) == len(TEXT)
    store._words[_C.STORE_WORDS["lock"]] = 2  # the value while store_pack copies
    assert count_tokens_in_forked_process(store) == len(TEXT)
