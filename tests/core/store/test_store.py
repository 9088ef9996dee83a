"""NgramStore: sizes, scopes, drafts from other requests' text, statistics, memory."""

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
import torch
from core.store.requests import COSTS, Request, step
from ngram_npu import _C, IntegrityError, NgramStore, scope_of
from ngram_npu.store_statistics import Visibility
from ops import reference
from residence import resident_share

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
def test_errors(changes: dict[str, object], message: str) -> None:
    arguments = {"num_slots": 1, "token_capacity": 4096, **changes}
    with pytest.raises(ValueError, match=f"NgramStore: {message}"):
        NgramStore(**arguments)  # type: ignore[arg-type]


def test_sizes() -> None:
    store = NgramStore()
    found = store.statistics
    assert (found.num_slots, found.num_blocks, found.line_bits) == (256, 3907, 18)
    assert 21_000_000 < store.nbytes < 22_000_000
    assert store.token_capacity == 3907 * 256
    assert store.visibility == found.visibility == "live"
    assert store.tensor.ctypes.data % (2 << 20) == 0, "at a huge page's boundary"
    assert NgramStore(1, 3841).statistics.num_blocks == 16


def test_memory_of_a_store_is_committed_before_its_first_step(tmp_path: Path) -> None:
    """Else the first steps wait for the system, which zeroes a huge page for nearly every entry."""
    store = NgramStore(2, 1 << 20)
    assert resident_share(store._words) == 1
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store")
    merged = NgramStore.load(tmp_path / "store", token_capacity=1 << 19, kind="torch")
    assert [resident_share(s._words) for s in (loaded, merged)] == [1, 1]


def test_both_kinds_say_the_same() -> None:
    numpys, torchs = NgramStore(2, 4096), NgramStore(2, 4096, kind="torch")
    for store in (numpys, torchs):
        Request(store, 0).say(TEXT)
        store.finish(np.array([0]) if store is numpys else torch.tensor([0]))
    assert isinstance(torchs.tensor, torch.Tensor)
    assert np.array_equal(numpys.tensor, torchs.tensor.numpy())


def test_what_one_said_is_drafted_to_the_next() -> None:
    store = NgramStore(2, 4096)
    assert Request(store, 0).say(TEXT) == []
    assert Request(store, 1, prompt=[9]).say(TEXT[:5]) == TEXT[5:9]
    found = store.statistics
    assert (found.lookups, found.hits, found.drafts, found.draft_tokens) == (2, 1, 1, 4)
    assert (found.hit_share, found.draft_share) == (0.5, 0.5)
    assert (found.tokens_entered, found.tokens_held) == (45, 45)
    assert (found.blocks_in_use, found.open_slots) == (2, 2)


def test_at_finish_it_is_drafted_when_the_request_has_ended() -> None:
    store = NgramStore(2, 4096, visibility="finish")
    first = Request(store, 0)
    first.say(TEXT)
    assert Request(store, 1).say(TEXT[:5]) == []
    assert store.statistics.tokens_entered == 0
    first.finish()
    assert Request(store, 1).say(TEXT[:5]) == TEXT[5:9]
    assert store.statistics.open_slots == 1


def test_the_oldest_text_is_forgotten() -> None:
    store = NgramStore(1, 1024)
    Request(store, 0).say(TEXT)
    rng = np.random.default_rng(3)
    for _ in range(8):
        Request(store, 0).say(rng.integers(1000, 9000, 200).tolist())
    assert Request(store, 0).say(TEXT[:5]) == []
    found = store.statistics
    assert found.blocks_in_use == found.num_blocks == 4
    assert found.tokens_held <= 1024
    assert found.entries_evicted > 0
    store.check_integrity()


def test_scopes() -> None:
    assert scope_of(None) == scope_of(0) == 0
    assert scope_of(np.int64(7)) == 7  # type: ignore[arg-type]
    assert scope_of(2**62 - 1) == 2**62 - 1
    named = {scope_of(name) for name in ("", "a", "b", "7", "\ud800", "ä")}
    assert len(named) == 6
    assert all(2**62 <= scope < 2**63 for scope in named)
    assert scope_of("tenant") == 8007596991872918313  # saved files depend on it
    for bad in (-1, 2**62):
        with pytest.raises(ValueError, match=r"scope_of: name: expected 0 to 2\*\*62 - 1"):
            scope_of(bad)
    for kind in (True, 1.5, b"a"):
        with pytest.raises(TypeError, match="scope_of: name: expected str, int or None"):
            scope_of(kind)  # type: ignore[arg-type]


def test_warm() -> None:
    store = NgramStore(2, 8192, visibility="finish")
    store.warm([TEXT, np.arange(1000, 1700), []], scope="jobs")
    assert store.statistics.tokens_entered == 740
    assert store.statistics.open_slots == 0
    assert Request(store, 0, scope=scope_of("jobs")).say([1400, 1401]) == [1402, 1403, 1404, 1405]
    for bad in ([[1.5]], [[[1, 2]]], [[-1]], [[2**31]]):
        with pytest.raises(ValueError, match="NgramStore: warm: expected"):
            store.warm(bad)  # type: ignore[arg-type]
    store.check_integrity()


def test_warm_is_what_a_request_would_have_said() -> None:
    warmed, said = NgramStore(1, 8192), NgramStore(1, 8192)
    text = np.random.default_rng(5).integers(0, 30, 3000).tolist()
    warmed.warm([text])
    request = Request(said, 0, prompt=[])
    request.say(text, k=0)
    request.finish()
    assert np.array_equal(warmed.tensor, said.tensor)


def test_counts_of_an_entry_equal_the_reference_up_to_the_highest() -> None:
    """A token comes 16 times after a gram, then another one, then the first one again."""
    ours, theirs = NgramStore(1, 32768), NgramStore(1, 32768)
    reached = set()
    for outcome in [8] * 16 + [9] * 16 + [8] * 40:
        Request(ours, 0).say([7, outcome])
        ours.finish(np.zeros(1, np.int32))
        drafts = np.zeros((1, 4), np.int32), *np.zeros((2, 1), np.int32), np.zeros((1, 4), np.uint8)
        row = np.array([[1, 7, outcome]], np.int32)
        lengths, sampled = np.array([3], np.int32), np.array([2], np.int32)
        given = row, lengths, sampled, theirs.tensor, None, None, None
        reference.ngram_store_step_(*given, *drafts, 2**63 - 1, COSTS, 0)
        reference.ngram_store_finish_(theirs.tensor, np.zeros(1, np.int32))
        assert np.array_equal(ours.tensor, theirs.tensor)
        states = ours.tensor[ours._parts()["lines"]][::2]
        reached |= {(int(state) >> 4 & 15, int(state) & 15) for state in states}
    assert {(15, 0), (15, 15), (8, 0), (7, 8)} <= reached


def test_clear_forgets_one_scope_or_all() -> None:
    store = NgramStore(2, 8192)
    store.warm([TEXT * 20], scope="a")
    store.warm([TEXT], scope="b")
    store.clear("a")
    assert store.statistics.tokens_held == len(TEXT)
    assert Request(store, 0, scope=scope_of("a")).say(TEXT[:5]) == []
    assert Request(store, 0, scope=scope_of("b")).say(TEXT[:5]) == TEXT[5:9]
    store.check_integrity()
    store.clear()
    assert store.statistics.tokens_held == 0
    words = store.tensor[64:]
    assert not np.isin(words, TEXT).any(), "wiped, not only forgotten"
    assert Request(store, 0, scope=scope_of("b")).say(TEXT[:5]) == []
    store.check_integrity()


@pytest.mark.parametrize(
    ("piece", "words", "message"),
    [
        (0, _C.STORE_PIECE_WORDS - 1, f"to: expected size {_C.STORE_PIECE_WORDS}, got size "),
        (-1, _C.STORE_PIECE_WORDS, "piece: expected 0 to 2, got -1"),
        (3, _C.STORE_PIECE_WORDS, "piece: expected 0 to 2, got 3"),
    ],
)
def test_copy_of_a_piece_outside_of_the_store_or_the_room_is_rejected(
    piece: int, words: int, message: str
) -> None:
    store = NgramStore(1, 4096)
    assert _C.store_pieces(store.tensor) == 3
    room = np.full(words, 7, np.int32)
    with pytest.raises(ValueError, match=f"^store_pack: {message}"):
        _C.store_pack(store.tensor, piece, room)
    assert (room == 7).all()


def test_a_request_goes_on_after_a_clear() -> None:
    store = NgramStore(2, 4096)
    request = Request(store, 0)
    request.say(TEXT)
    store.clear()
    request.say([7, 8, 9])
    assert store.statistics.tokens_held == 3
    assert Request(store, 1).say([7]) == [8, 9]
    store.check_integrity()


def test_a_broken_store_is_told_from_a_sound_one() -> None:
    store = NgramStore(1, 4096)
    store.warm([TEXT])
    store.check_integrity()
    store.tensor[64 + 4 + 8] = 99  # the serial number of the block in place 1
    with pytest.raises(IntegrityError, match=r"NgramStore: a block is not where .* \(1\)"):
        store.check_integrity()


def test_it_cannot_be_copied() -> None:
    store = NgramStore(1, 4096)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="NgramStore: a store cannot be copied or pickled"):
            attempt(store)


def test_what_waits_for_another_call() -> None:
    """Steps that run meanwhile do not use the store."""
    store = NgramStore(2, 4096)
    assert _C.store_take(store.tensor)
    warming = threading.Thread(target=store.warm, args=([TEXT],))
    warming.start()
    while store.statistics.calls_busy == 0:
        pass
    assert Request(store, 0).say(TEXT[:5]) == []
    _C.store_give_back(store.tensor)
    warming.join()
    found = store.statistics
    assert found.calls_busy > 1
    assert found.tokens_entered == len(TEXT)


def test_a_call_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngram_npu.store._PATIENCE_S", 0.05)
    store = NgramStore(1, 4096)
    assert _C.store_take(store.tensor)
    for attempt in (store.clear, store.check_integrity, lambda: store.warm([TEXT])):
        with pytest.raises(RuntimeError, match=r"NgramStore: in use by another call for 0\.05"):
            attempt()  # type: ignore[operator]


def test_threads_that_step_warm_and_save(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The store holds exactly the texts that were entered; every saved file is sound."""
    store = NgramStore(4, 65536)
    path = tmp_path_factory.mktemp("store") / "store"
    texts = [list(range(1000 * i, 1000 * i + 50)) for i in range(1, 40)]
    done = threading.Event()

    def saves() -> None:
        while not done.is_set():
            store.save(path)
            NgramStore.load(path)

    def steps() -> None:
        request = Request(store, 0)
        for token in range(400):
            request.say([token % 7])

    threads = [threading.Thread(target=saves), threading.Thread(target=steps)]
    for thread in threads:
        thread.start()
    store.warm(texts)
    threads[1].join()
    done.set()
    threads[0].join()
    store.check_integrity()
    for text in texts:
        assert Request(store, 1).say(text[:3]) == text[3:7]


def test_texts_that_threads_add_at_once_are_all_held() -> None:
    store, switch = NgramStore(4, 1 << 18), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as adding:
            list(adding.map(lambda i: store.warm([[i]] * 300, scope=i), (1, 2)))
    finally:
        sys.setswitchinterval(switch)
    assert store.scopes == {1: 300, 2: 300}


def test_a_child_of_a_process_whose_threads_use_the_store() -> None:
    """Where one did at the fork, the child's store is empty; it can be used in any case."""
    store = NgramStore(4, 65536)
    store.warm([TEXT], scope=1)
    inside, done = threading.Event(), threading.Event()

    def uses() -> None:
        with store._locked():
            inside.set()
            done.wait()

    user = threading.Thread(target=uses)
    user.start()
    inside.wait()
    try:
        assert fate_in_a_child(store) == EMPTIED
    finally:
        done.set()
        user.join()
    assert fate_in_a_child(store) == KEPT


def test_child_forked_while_a_piece_is_copied_keeps_the_text() -> None:
    store = NgramStore(4, 65536)
    store.warm([TEXT], scope=1)
    store._words[_C.STORE_WORDS["busy"]] = 2  # as store_pack leaves it while it copies
    assert fate_in_a_child(store) == KEPT
    store._words[_C.STORE_WORDS["busy"]] = 0
    assert fate_of_a_copy(store) == KEPT


EMPTIED, KEPT, BROKEN = range(3)


def fate_in_a_child(store: NgramStore) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(fate_of_a_copy(store))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fate_of_a_copy(store: NgramStore) -> int:
    """What became of a store in a forked process, which then uses it."""
    try:
        before = store.statistics
        store.check_integrity()
        drafts = Request(store, 0, scope=1).say(TEXT[:3])
        store.warm([TEXT], scope=2)
        again = Request(store, 1, scope=2).say(TEXT[:3])
        if again != TEXT[3:7] or store.statistics.calls_busy != before.calls_busy:
            return BROKEN
        if before.tokens_held:
            return KEPT if drafts == TEXT[3:7] else BROKEN
        return BROKEN if drafts else EMPTIED
    except BaseException:
        return BROKEN


COMMON = 12
"""Smaller tokens are shared by all scopes; any other belongs to the scope of its remainder."""
NAMES = (0, 1, 2**62 - 1, "a", "b")
SCOPES = [scope_of(name) for name in NAMES]


def leaks(visibility: Visibility, steps: int, *, mixed: bool = False) -> tuple[int, int]:
    """Counts drafted tokens of other scopes, and all drafted tokens, over ``steps`` steps. Requests
    come and go in a store that is too small. ``mixed``: all use one scope, which must show."""
    rng = np.random.default_rng(13)
    slots, n = 16, len(SCOPES)
    store = NgramStore(slots, 16384, visibility=visibility)

    def begun(slot: int) -> tuple[int, Request]:
        whose = int(rng.integers(n))
        prompt = rng.integers(0, COMMON, 4).tolist()
        return whose, Request(store, slot, 0 if mixed else SCOPES[whose], prompt)

    live = [begun(slot) for slot in range(slots)]
    leaked = drafted = 0
    for at in range(steps // slots):
        for i, (whose, request) in enumerate(live):
            if len(request.row) > 60 or rng.random() < 0.02:
                if rng.random() < 0.5:
                    request.finish()
                live[i] = whose, request = begun(i)
            said = rng.integers(0, COMMON, 3)
            said[2] += (said[2] % 3 == 0) * (COMMON + (n - COMMON % n) + whose - said[2])
            request.row += said.tolist()
        for (whose, _), draft in zip(
            live, step(store, [r for _, r in live], [3] * slots, 6), strict=True
        ):
            drafted += len(draft)
            leaked += sum(token >= COMMON and token % n != whose for token in draft)
        if at % 997 == 996:
            store.clear(NAMES[at % n])
    store.check_integrity()
    return leaked, drafted


@pytest.mark.parametrize("visibility", ["live", "finish"])
@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_text_crosses_scopes(visibility: Visibility, steps: int) -> None:
    leaked, drafted = leaks(visibility, steps)
    assert leaked == 0
    assert drafted > steps / 2


def test_a_store_that_mixed_scopes_up_would_be_found() -> None:
    assert leaks("live", 2_000, mixed=True)[0] > 100


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_text_stays_when_the_block_numbers_run_out(visibility: Visibility) -> None:
    """A store whose numbers are about to end says and holds the same as one whose are small."""
    store, late = (NgramStore(3, 8192, visibility=visibility) for _ in range(2))
    rng = np.random.default_rng(5)
    requests = [[Request(made, i, scope=i % 2) for i in range(3)] for made in (store, late)]

    def say(size: int) -> None:
        for pair in zip(*requests, strict=True):
            tokens = rng.integers(0, 40, size).tolist()
            assert pair[0].say(tokens) == pair[1].say(tokens)

    say(1500)
    by = 2**24 - 32
    shift_numbers(late, by)
    late.check_integrity()
    for made in (store, late):
        made.warm([TEXT], scope=7)
    for size in (200, 3, 900, 700):
        say(size)
    assert [made.statistics.renumberings for made in (store, late)] == [0, 1]
    late.check_integrity()
    assert late.scopes == store.scopes
    for made in (store, late):
        made.finish(np.arange(3))
    for scope in (0, 1):
        pair = [
            Request(made, scope, scope=scope, prompt=requests[0][scope].row[50:80])
            for made in (store, late)
        ]
        assert pair[0].say([1]) == pair[1].say([1])


def shift_numbers(store: NgramStore, by: int) -> None:
    """Adds ``by``, a multiple of the number of blocks, to all of a store's block numbers."""
    words, parts = store._words.view(np.uint32), store._parts()
    words[5] += by
    heads = words[parts["heads"]].reshape(-1, 8)
    for numbers in (words[parts["slots"]][::4], *(heads[:, word] for word in (0, 3, 4))):
        numbers[numbers > 0] += by
    places = words[parts["lines"]][1::2]
    places[places > 0] += by * 256
