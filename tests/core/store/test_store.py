"""Tests NgramStore: random steps against the reference, texts, scopes, clears, updates, threads."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ngram_npu.store.store as store_module
import numpy as np
import pytest
import torch
from core.store.steps import (
    GARBAGE,
    MAX_NEW,
    SCOPES,
    K,
    Requests,
    append_tokens,
    draft_after,
    new_drafts,
    run_step,
)
from ngram_npu import PRIVATE_SCOPE, IntegrityError, NgramStore, Scope, scope_of
from ngram_npu.store import SHARED_SCOPE, scope_of_request
from ngram_npu.store.contents import OCCURRENCES, SIZES
from ops import reference
from residence import compute_resident_share

NAMES = ("slots", "text", "blocks", "table", "allocator")
TINY_RINGS = [(2, 1), (3, 2), (5, 64), (16, 4096)]
"""Blocks and columns of the table. With one column, all n-grams of a length collide."""
TEXTS = {None: [[5, 6, 7], list(range(100, 900))], "tenant": [[1, 2, 3, 4]]}
EXPECTED = [(scope_of(name), text) for name, texts in TEXTS.items() for text in texts]


def make_store(num_blocks: int = 16, num_columns: int | None = None, **options: Any) -> NgramStore:
    store = NgramStore(num_blocks * 256, **{"num_slots": 6, "max_batch": 8, **options})
    if num_columns is not None:
        store.table = np.zeros((len(SIZES), OCCURRENCES * num_columns), np.int32)
        store._arguments[False]["table"] = store.table
    return store


def set_next_number(store: NgramStore, number: int) -> None:
    store.allocator[:] = store._max_number = number


def fill_store(store: NgramStore) -> NgramStore:
    for name, texts in TEXTS.items():
        store.warm(texts, scope=name)
    return store


def read_store(store: NgramStore) -> list[tuple[int, list[int]]]:
    return [(scope, text.tolist()) for scope, text in store.texts()]


def arrays_of(store: NgramStore) -> dict[str, Any]:
    return {name: getattr(store, name).copy() for name in NAMES}


def clear_model(model: dict[str, Any], scope: int) -> None:
    halves = np.array([scope], np.int64).view(np.int32)
    for text, head in zip(model["text"], model["blocks"], strict=True):
        if head[4] == halves[0] and head[5] == halves[1]:
            text[:] = head[:] = 0
    model["slots"][:] = 0


def renumber_model(model: dict[str, Any]) -> None:
    blocks = len(model["blocks"])
    live = [int(number) for number in model["blocks"][:, 0] if number]
    offset = 0
    next_number = int(model["allocator"][0])
    while next_number - blocks - (offset + blocks) >= 1:
        offset += blocks
    assert all(number > offset for number in live)
    for name, by in (("slots", offset), ("allocator", offset), ("table", offset * 256)):
        part = model[name][:, 0] if name == "slots" else model[name]
        part[...] = np.maximum(part - by, 0)
    model["blocks"][:, :3] = np.maximum(model["blocks"][:, :3] - offset, 0)


def run_reference_step(model: dict[str, Any], requests: Requests, step: Any) -> dict[str, Any]:
    rows = requests.token_ids, requests.num_tokens, step.num_sampled
    indices = {"row_indices": step.rows, "scopes": step.scopes}
    reference.store_append_(*rows, **indices, **model, max_new=MAX_NEW)
    contents = {name: model[name] for name in ("text", "blocks", "table")}
    drafts = new_drafts(len(step.rows))
    reference.store_propose_(*rows, **indices, **contents, **drafts)
    return drafts


def run_random_steps(seed: int, size: tuple[int, int], num_steps: int, first: int = 1) -> int:
    """Compares steps, clears and renumberings with the reference. Returns the number of drafts."""
    store, requests = make_store(*size), Requests(seed)
    set_next_number(store, first)
    model = arrays_of(store)
    num_drafts = 0
    for _ in range(num_steps):
        if requests.rng.random() < 0.01:
            scope = requests.rng.choice(SCOPES)
            store.clear(Scope(scope))
            clear_model(model, scope)
        step = requests.next_step()
        bound = store._max_number
        drafts = run_step(store, requests, step)
        if store._max_number < bound:
            renumber_model(model)
        expected = run_reference_step(model, requests, step)
        for name, array in drafts.items():
            assert np.array_equal(array, expected[name]), name
        for name, array in arrays_of(store).items():
            assert np.array_equal(array, model[name]), name
        num_drafts += int((drafts["num_draft_tokens"] > 0).sum())
    store.check_integrity()
    assert not (store.text == GARBAGE).any()
    return num_drafts


@pytest.mark.parametrize("size", TINY_RINGS)
def test_random_steps_match_reference(size: tuple[int, int]) -> None:
    num_drafts = run_random_steps(1, size, 150)
    assert num_drafts > 20 or size[1] < 64


@pytest.mark.parametrize("size", TINY_RINGS)
def test_random_steps_across_the_last_block_number_match_reference(size: tuple[int, int]) -> None:
    run_random_steps(2, size, 60, first=2**23 - 20)


def test_tensors_and_arrays_use_the_same_memory() -> None:
    store, requests = make_store(), Requests(3)
    for _ in range(20):
        step = requests.next_step()
        drafts = run_step(store, requests, step)
        arrays = requests.token_ids, requests.num_tokens, step.num_sampled
        indices = {"row_indices": step.rows, "scopes": step.scopes}
        tensors = {name: torch.from_numpy(a) for name, a in new_drafts(len(step.rows)).items()}
        store.propose(
            *map(torch.from_numpy, arrays),
            **{name: torch.from_numpy(a) for name, a in indices.items()},
            **tensors,
        )
        for name, array in drafts.items():
            assert np.array_equal(tensors[name], array), name


def test_renumbering_happens_before_the_numbers_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stores with different requests renumber in the same step."""
    monkeypatch.setattr(store_module, "END_OF_BLOCK_NUMBERS", 200)
    stores, workloads = (make_store(8, 64), make_store(8, 64)), (Requests(1), Requests(2))
    num_renumberings = 0
    for _ in range(300):
        bound = stores[0]._max_number
        for store, requests in zip(stores, workloads, strict=True):
            step = requests.next_step()
            rows = requests.token_ids, requests.num_tokens, step.num_sampled
            store.begin_step(len(requests.rows), MAX_NEW)
            store.append(*rows, row_indices=step.rows, slot_indices=step.rows, max_new=MAX_NEW)
            assert store.allocator[0] <= store._max_number <= 200
        assert stores[0]._max_number == stores[1]._max_number
        num_renumberings += stores[0]._max_number < bound
    assert num_renumberings > 2


def test_memory_is_known_and_committed_before_the_first_step() -> None:
    store = NgramStore(num_slots=4)
    assert store.capacity == 2**20
    assert store.nbytes == 2**20 * (4 + 48) + 4096 * 32 + 5 * 32 + 8
    assert compute_resident_share(store.table) == compute_resident_share(store.text) == 1


DAMAGE: dict[str, tuple[Callable[[NgramStore], Any], str]] = {
    "allocator": (lambda s: np.add.at(s.allocator, 1, 1), "allocator"),
    "number": (lambda s: np.add.at(s.blocks, (3, 0), 16), "number is not one of the newest"),
    "fill": (lambda s: s.blocks[3:4, 3].fill(257), "wrong fill"),
    "tail": (lambda s: np.add.at(s.text, (slice(None), 255), 1), "tokens after its end"),
    "successor": (lambda s: np.putmask(s.blocks[:, 2], s.blocks[:, 0] > 0, 1), "wrong successor"),
    "free block": (lambda s: s.blocks[3:4, 0].fill(0), "the head of a free block is not 0"),
    "slot's block": (lambda s: s.slots[:1, 0].fill(2**20), "not assigned"),
    "slot's length": (lambda s: s.slots[:1, 1].fill(-1), "negative length"),
    "two slots": (lambda s: s.slots[:, 0].fill(int(s.slots[:, 0].max())), "the same block"),
    "text": (lambda s: np.add(s.text, s.text > 0, out=s.text), "belong to another column"),
    "entry": (lambda s: s.table[0].fill(int(s.table.max()) + 1), "not older than the newest"),
    "newest": (lambda s: s.table[0, ::2].fill(int(s.table.max()) + 1), "refers to no token"),
}


@pytest.mark.parametrize("part", DAMAGE)
def test_check_integrity_detects_damage(part: str) -> None:
    store, requests = make_store(16, 4096), Requests(4)
    for _ in range(60):
        run_step(store, requests, requests.next_step())
    store.check_integrity()
    damage, message = DAMAGE[part]
    damage(store)
    with pytest.raises(IntegrityError, match=message):
        store.check_integrity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "num_slots: expected 1 to"),
        ({"tokens": 256}, "tokens: expected 257 to 268435456, got 256"),
        ({"max_batch": 0}, "max_batch: expected 1 to"),
        ({"device": "meta"}, "device: expected a device with kernels of the store, got meta"),
    ],
)
def test_invalid_argument_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"NgramStore: {message}"):
        NgramStore(**{"tokens": 512, **change})


def test_store_cannot_be_copied_or_pickled() -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="NgramStore: a store cannot be copied or pickled"):
            duplicate(make_store())


def test_reserved_slots_keep_open_requests() -> None:
    store = make_store(num_slots=1)
    append_tokens(store, [1, 2, 3], 3)
    store.reserve_slots(9)
    append_tokens(store, [1, 2, 3, 4], 1)
    append_tokens(store, [7, 8], 2, slot=8)
    assert store.num_slots == 9
    assert read_store(store) == [(0, [1, 2, 3, 4]), (0, [7, 8])]
    store.reserve_slots(3)
    assert store.num_slots == 9


# Names of scopes.


NAME_PARTS = [
    *(
        "",
        "0",
        "7",
        "None",
        "secret",
        "\0" * 8,
        "\ud800",
        "\udfff",
        "\ud800\udc00",
        "\U00010000",
        "ä",
    ),
    *(f"{tag}{chr(n)}{' ' * n}" for tag in "sbint" for n in range(20)),
    *(f"s{n.to_bytes(8, 'little').decode()}{'secret'[:n]}" for n in range(7)),
]
"""Strings that contain encodings of other names, surrogates, NUL, and numbers as text."""


def test_scope_of_maps_names_to_distinct_numbers() -> None:
    parts = NAME_PARTS
    values: list[Any] = [*parts, *range(-20, 20), None, b"", b"7", b"0"]
    names: list[Any] = [*parts, ()]
    names += [(value,) for value in values]
    names += [(first, second) for first in values for second in values]
    names += [((first,), second) for first in parts for second in values]
    assert len(names) > 10_000
    numbers = set(map(scope_of, names))
    assert len(numbers) == len(names)
    assert min(numbers) > 0
    assert max(numbers) < 2**63
    assert all(scope_of(number) is number for number in list(numbers)[:3])
    assert (scope_of(None), scope_of(Scope(7)), PRIVATE_SCOPE) == (0, 7, -1)
    assert scope_of("tenant") == SCOPE_OF_TENANT, "saved files contain this scope"


SCOPE_OF_TENANT = 8764047689480050753


def test_requests_with_different_keys_have_different_scopes() -> None:
    adapters = [None, *NAME_PARTS]
    keys = [(salt, adapter) for salt in adapters if salt != "" for adapter in adapters]
    assert len(keys) > 10_000
    scopes = {scope_of_request(salt, adapter) for salt, adapter in keys}
    assert len(scopes) == len(keys)
    assert scopes.isdisjoint(map(scope_of, NAME_PARTS))
    assert min(scopes) == scope_of_request(None) == scope_of_request("") == SHARED_SCOPE == 0
    assert max(scopes) < 2**63
    # Other engines, and files, have the same scopes.
    assert scope_of_request("tenant", "adapter") == SCOPE_OF_REQUEST


SCOPE_OF_REQUEST = 3399535731772413336


@pytest.mark.parametrize("key", [7, True, b"a", ["a"], ("a",)])
def test_key_of_wrong_type_is_rejected(key: Any) -> None:
    with pytest.raises(TypeError, match="scope_of_request: cache_salt: expected str or None, got"):
        scope_of_request(key)
    with pytest.raises(TypeError, match="scope_of_request: adapter: expected str or None, got"):
        scope_of_request("a", key)


@pytest.mark.parametrize("name", [7, True, 1.5, b"a", ("a", 1.5), (True,)])
def test_name_of_wrong_type_is_rejected(name: Any) -> None:
    with pytest.raises(TypeError, match="scope_of: name: expected"):
        scope_of(name)


# Texts that enter and leave other than by steps.


def test_warmed_texts_are_drafted_within_their_scope_only() -> None:
    store = fill_store(make_store())
    store.check_integrity()
    assert read_store(store) == EXPECTED
    assert store.scopes == {0: 803, scope_of("tenant"): 4}
    statistics = store.statistics
    assert (statistics.tokens_held, statistics.blocks_in_use) == (807, 1 + 4 + 1)
    assert draft_after(store, [1, 2, 3]) == []
    assert draft_after(store, [1, 2, 3], scope_of("tenant")) == [4]
    for end in (301, 356, 613, 898):
        assert draft_after(store, list(range(end - 9, end))) == [*range(end, min(end + K, 900))]
    for invalid in ([[1.5]], [[[1, 2]]], [[-1]], [[2**31]]):
        with pytest.raises(ValueError, match="NgramStore: warm: expected"):
            store.warm(invalid)  # type: ignore[arg-type]


def test_text_longer_than_the_ring_keeps_its_newest_blocks() -> None:
    for num_blocks in (2, 4):
        store = make_store(num_blocks)
        store.warm([list(range(5000))])
        store.check_integrity()
        ((_, text),) = read_store(store)
        assert text == list(range(5000))[-len(text) :]
        assert len(text) > (num_blocks - 1) * 256


def test_warmed_text_does_not_continue_the_text_before() -> None:
    """The second text contains the first one, so that the slot could mistake it for its request."""
    store = make_store()
    store.warm([list(range(20)), list(range(30)), []])
    assert [text for _, text in read_store(store)] == [list(range(20)), list(range(30))]


def test_merge_equals_adding_each_text() -> None:
    source, target = fill_store(make_store()), make_store(64)
    before = arrays_of(source)
    target.merge(source)
    expected = fill_store(make_store(64))
    for name in NAMES:
        assert np.array_equal(getattr(target, name), getattr(expected, name)), name
        assert np.array_equal(getattr(source, name), before[name]), name
    with pytest.raises(ValueError, match="merge: expected another store, got this one"):
        target.merge(target)
    with pytest.raises(ValueError, match=f"merge: expected a store of vocabulary {'a' * 32}, got"):
        make_store(tokenizer="a" * 32).merge(make_store(tokenizer="b" * 32))


def test_merge_of_new_texts_compares_scopes() -> None:
    """Equal texts of two scopes are different texts. A second merge adds nothing."""
    store, other = make_store(), make_store()
    for name in ("a", "b", None):
        store.warm([range(40), range(9)], scope=name)
    other.warm([range(40)], scope="a")
    for _ in range(2):
        other.merge(store, new_only=True)
        assert other.scopes == store.scopes == dict.fromkeys(store.scopes, 49)
        assert len(other.texts()) == 6


@pytest.mark.parametrize("is_announced", [True, False])
def test_slot_of_an_announced_request_stores_no_prompt(is_announced: bool) -> None:
    """The prompt of the second request is the text of the first one and two tokens more."""
    store, row = make_store(), list(range(31))
    append_tokens(store, row[:28], 20)
    if is_announced:
        store.begin_request(0)
    append_tokens(store, row, 1, hold_back=True)
    assert [text for _, text in read_store(store)] == [list(range(8, 28))]


# Clears and updates of the weights.


def test_clear_leaves_no_token_of_the_scope() -> None:
    """Blocks that replaced blocks of the scope must not contain its tokens after their ends."""
    store, requests = make_store(8, 4096), Requests(5)
    for _ in range(120):
        run_step(store, requests, requests.next_step())
    for scope in SCOPES[:3]:
        store.clear(Scope(scope))
    cleared = {request.mark for request in requests.texts if request.scope in SCOPES[:3]}
    kept = {request.mark for request in requests.texts if request.scope in SCOPES[3:]}
    tokens = set(store.text.flatten().tolist())
    assert not tokens & cleared
    assert tokens & kept
    store.check_integrity()
    store.clear()
    assert not any(array.any() for array in arrays_of(store).values())


def test_text_before_a_clear_does_not_return_with_the_next_step() -> None:
    """The tokens of the newest step, which are held back, are of the cleared text too."""
    store, row = make_store(), list(range(40))
    for end in (10, 14):
        append_tokens(store, row[:end], 4, hold_back=True)
    store.clear(Scope(0))
    for end in (15, 16):
        append_tokens(store, row[:end], 1, hold_back=True)
    assert read_store(store) == [(0, [14])]


@pytest.mark.parametrize("keep_updates", [1, 2, 3])
@pytest.mark.parametrize("first_number", [1, 2**23 - 70])
def test_only_text_since_the_kept_updates_remains(keep_updates: int, first_number: int) -> None:
    """Also if all block numbers are used up in between, and the blocks get new numbers."""
    rng = np.random.default_rng(keep_updates)
    store = make_store(64)
    set_next_number(store, first_number)
    texts: list[list[list[int]]] = []
    for version in range(1, 40):
        lengths = rng.integers(1, 700, rng.integers(0, 4))
        texts.append([(1000 * version + rng.integers(0, 9, n)).tolist() for n in lengths])
        store.warm(texts[-1], scope=Scope(version % 2))
        store.mark_update(keep_updates)
        remaining = texts[len(texts) - keep_updates + 1 :]
        assert [text for _, text in read_store(store)] == [t for part in remaining for t in part]
        store.check_integrity()
        oldest_token = 1000 * (version - keep_updates + 2)
        assert not ((store.text > 0) & (store.text < oldest_token)).any()


def test_update_without_number_keeps_text_and_counts_for_later_updates() -> None:
    store = make_store()
    for version in range(1, 5):
        store.warm([[version] * 3])
        store.mark_update()
    assert [text for _, text in read_store(store)] == [[version] * 3 for version in range(1, 5)]
    store.mark_update(4)
    assert [text for _, text in read_store(store)] == [[3] * 3, [4] * 3]
    with pytest.raises(ValueError, match="mark_update: keep_updates: expected at least 1 or None"):
        store.mark_update(0)


def test_update_after_clear_keeps_newer_text() -> None:
    store = make_store()
    store.warm([range(1600)])
    store.mark_update(2)
    store.clear()
    store.warm([[7, 8]])
    store.mark_update(2)
    assert read_store(store) == [(0, [7, 8])]
    store.mark_update(2)
    assert read_store(store) == []


def test_revision_changes_with_steps_text_and_clears() -> None:
    store, requests = make_store(), Requests(4)
    revisions = [store.revision]
    changes: list[Callable[[], object]] = [
        lambda: run_step(store, requests, requests.next_step()),
        lambda: store.warm([[1, 2]]),
        lambda: store.clear("tenant"),
        store.clear,
    ]
    for change in changes:
        change()
        revisions.append(store.revision)
    assert len(set(revisions)) == len(revisions)


# Threads.


def test_threads_warm_save_and_step_concurrently(tmp_path: Any) -> None:
    store, requests = make_store(256), Requests(8)
    texts = [list(range(1000 * i, 1000 * i + 50)) for i in range(1, 40)]
    is_done = threading.Event()

    def save_repeatedly() -> None:
        while not is_done.is_set():
            store.save(tmp_path / "store")

    saver = threading.Thread(target=save_repeatedly)
    saver.start()
    try:
        for text in texts:
            run_step(store, requests, requests.next_step())
            store.warm([text], scope="warmed")
    finally:
        is_done.set()
        saver.join()
    store.check_integrity()
    for text in texts:
        assert draft_after(store, text[:3], scope_of("warmed")) == text[3 : 3 + K]
    NgramStore.load(tmp_path / "store").check_integrity()


GIL_CALLS: dict[str, Callable[[NgramStore], object]] = {
    "clear of a scope": lambda store: store.clear(Scope(0)),
    "clear": lambda store: store.clear(),
    "mark_update": lambda store: store.mark_update(1),
    "renumber": lambda store: store._renumber(),
    "texts": lambda store: store.texts(),
    "scopes": lambda store: store.scopes,
}


def measure_longest_pause(function: Callable[[], object]) -> float:
    """Returns the longest pause of a thread that only waits for the GIL, as a share of the time of
    the call."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    pauses, is_done = [0.0], threading.Event()

    def measure_pauses() -> None:
        last = time.perf_counter()
        while not is_done.is_set():
            now = time.perf_counter()
            pauses[0] = max(pauses[0], now - last)
            last = now
            time.sleep(0)

    thread = threading.Thread(target=measure_pauses)
    thread.start()
    try:
        time.sleep(0.001)
        pauses[0], begin = 0.0, time.perf_counter()
        function()
        return pauses[0] / (time.perf_counter() - begin)
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", GIL_CALLS)
def test_long_call_lets_other_threads_run(name: str) -> None:
    """A busy machine can make a pause long, but not in each of 20 calls."""
    store, shares = make_store(1 << 14), list[float]()
    while len(shares) < 20 and min(shares, default=1.0) > 0.3:
        store.text[:] = 1
        store.blocks[:, 0] = np.arange(1, len(store.blocks) + 1)
        store.blocks[:, 3] = 256
        shares.append(measure_longest_pause(lambda: GIL_CALLS[name](store)))
    assert min(shares) <= 0.3


def test_call_that_keeps_the_gil_is_detected() -> None:
    text = make_store(1 << 14).text.reshape(-1)
    assert measure_longest_pause(text.tolist) > 0.5
