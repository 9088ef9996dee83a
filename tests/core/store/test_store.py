"""Tests NgramStore: random steps against the reference, texts, scopes, clears, updates, threads."""

from __future__ import annotations

import copy
import mmap
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ngram_npu.store.store as store_module
import numpy as np
import pytest
import torch
from ngram_npu import PRIVATE_SCOPE, NgramStore, Scope, scope_of
from ngram_npu.store import SHARED_SCOPE, scope_of_request
from ngram_npu.store.contents import OCCURRENCES, SIZES
from ops import reference
from ops.reference.store import BLOCK
from ops.specs.store import CONTENTS, SCOPES, STORE
from store_integrity import check_integrity
from store_steps import K, generate_steps, new_drafts, run_step

TINY_RINGS = [(2, 1), (3, 2), (5, 64), (16, 4096)]
"""Blocks and columns of the table. With one column, all n-grams of a length collide."""
TEXTS = {None: [[5, 6, 7], list(range(100, 900))], "tenant": [[1, 2, 3, 4]]}
EXPECTED = [(scope_of(name), text) for name, texts in TEXTS.items() for text in texts]


def make_store(num_blocks: int = 16, num_columns: int | None = None, **options: Any) -> NgramStore:
    store = NgramStore(num_blocks * BLOCK, **{"num_slots": 6, "max_batch": 8, **options})
    if num_columns is not None:
        store.table = np.zeros((len(SIZES), OCCURRENCES * num_columns), np.int32)
        store._arguments[False]["table"] = store.table
        store._arguments.pop(True, None)
    return store


def run_steps(store: NgramStore, seed: int, num_steps: int) -> None:
    for _, rows in zip(range(num_steps), generate_steps(seed), strict=False):
        run_step(store, rows)


def append_tokens(
    store: NgramStore, row: Sequence[int], count: int, *, slot: int = 0, hold_back: bool = False
) -> None:
    """Stores the last tokens of a single row."""
    store.begin_step(1, BLOCK)
    store.append(
        np.array([row], np.int32),
        np.array([len(row)], np.int32),
        np.array([count], np.int32),
        slot_indices=np.array([slot]),
        max_new=BLOCK,
        hold_back=hold_back,
    )


def draft_after(store: NgramStore, row: Sequence[int], scope: int = 0) -> list[int]:
    """Returns what the store drafts after a row."""
    drafts, one = new_drafts(1), np.ones(1, np.int32)
    lengths, scopes = np.array([len(row)], np.int32), np.array([scope], np.int64)
    store.propose(np.array([row], np.int32), lengths, one, scopes=scopes, **drafts)
    tokens: list[int] = drafts["draft_token_ids"][0, : drafts["num_draft_tokens"][0]].tolist()
    return tokens


def set_next_number(store: NgramStore, number: int) -> None:
    store.allocator[:] = store._max_number = number


def fill_store(store: NgramStore) -> NgramStore:
    for name, texts in TEXTS.items():
        store.warm(texts, scope=name)
    return store


def read_store(store: NgramStore) -> list[tuple[int, list[int]]]:
    return [(scope, text.tolist()) for scope, text in store.texts()]


def arrays_of(store: NgramStore) -> dict[str, Any]:
    return {name: getattr(store, name).copy() for name in STORE}


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
    for name, by in (("slots", offset), ("allocator", offset), ("table", offset * BLOCK)):
        part = model[name][:, 0] if name == "slots" else model[name]
        part[...] = np.maximum(part - by, 0)
    model["blocks"][:, :3] = np.maximum(model["blocks"][:, :3] - offset, 0)


def run_reference_step(model: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    reference.store_append_(**rows, **model, max_new=BLOCK)
    drafts = new_drafts(len(rows["num_sampled"]))
    contents = {name: model[name] for name in CONTENTS}
    reference.store_propose_(
        **{name: array for name, array in rows.items() if name != "slot_indices"},
        **contents,
        **drafts,
    )
    return drafts


@pytest.mark.parametrize("first_number", [1, 2**23 - 20])
@pytest.mark.parametrize("size", TINY_RINGS)
def test_random_steps_and_clears_match_reference(size: tuple[int, int], first_number: int) -> None:
    """Steps with tensors and with arrays. The last block number is reached from the second number
    on, so that the blocks are renumbered."""
    rng = np.random.default_rng(first_number)
    store = make_store(*size)
    set_next_number(store, first_number)
    model = arrays_of(store)
    num_drafts = num_renumberings = 0
    for number, rows in zip(range(100), generate_steps(1), strict=False):
        if rng.random() < 0.02:
            scope = int(rng.choice(SCOPES))
            store.clear(Scope(scope))
            clear_model(model, scope)
        bound = store._max_number
        drafts = run_step(store, rows, torch.from_numpy if number % 2 else np.asarray)
        if store._max_number < bound:
            renumber_model(model)
            num_renumberings += 1
        expected = run_reference_step(model, rows)
        for name, array in drafts.items():
            assert np.array_equal(array, expected[name]), name
        for name, array in arrays_of(store).items():
            assert np.array_equal(array, model[name]), name
        num_drafts += int((drafts["num_draft_tokens"] > 0).sum())
    assert num_drafts > 20 or size[1] < 64
    assert (num_renumberings > 0) == (first_number > 1)


def test_renumbering_happens_before_the_numbers_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stores with different requests renumber in the same step."""
    monkeypatch.setattr(store_module, "END_OF_BLOCK_NUMBERS", 200)
    stores, workloads = (
        (make_store(8, 64), make_store(8, 64)),
        (generate_steps(1), generate_steps(2)),
    )
    num_renumberings = 0
    for _ in range(200):
        bound = stores[0]._max_number
        for store, workload in zip(stores, workloads, strict=True):
            store.begin_step(6, BLOCK)
            store.append(**next(workload), max_new=BLOCK)
            assert store.allocator[0] <= store._max_number <= 200
        assert stores[0]._max_number == stores[1]._max_number
        num_renumberings += stores[0]._max_number < bound
    assert num_renumberings > 2


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_known_and_committed_before_the_first_step() -> None:
    resident_bytes = read_resident_bytes()
    store = NgramStore(num_slots=4)
    assert store.capacity == 2**20
    assert store.nbytes == 2**20 * (4 + 48) + 4096 * 32 + 5 * 32 + 8
    assert read_resident_bytes() - resident_bytes > 0.9 * store.nbytes


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
    check_integrity(store)
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
        check_integrity(store)
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
    for name in STORE:
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
        store.begin_requests(0)
    append_tokens(store, row, 1, hold_back=True)
    assert [text for _, text in read_store(store)] == [list(range(8, 28))]


# Clears and updates of the weights.


def test_clear_leaves_no_token_of_the_scope() -> None:
    """Blocks that replaced blocks of the scope must not contain its tokens after their ends."""
    store, rng = make_store(8), np.random.default_rng(5)
    for length in rng.integers(1, 600, 60):
        scope = int(rng.integers(1, 6))
        store.warm([np.full(length, scope)], scope=Scope(scope))
    for scope in (1, 2, 3):
        store.clear(Scope(scope))
    tokens = set(store.text.flatten().tolist())
    assert tokens & {4, 5}
    assert not tokens & {1, 2, 3}
    check_integrity(store)
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
        check_integrity(store)
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
    store = make_store()
    revisions = [store.revision]
    changes: list[Callable[[], object]] = [
        lambda: run_steps(store, 4, 1),
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
    store, steps = make_store(256), generate_steps(8)
    texts = [list(range(1000 * i, 1000 * i + 50)) for i in range(1, 40)]
    is_done = threading.Event()

    def save_repeatedly() -> None:
        while not is_done.is_set():
            store.save(tmp_path / "store")

    saver = threading.Thread(target=save_repeatedly)
    saver.start()
    try:
        for text in texts:
            run_step(store, next(steps))
            store.warm([text], scope="warmed")
    finally:
        is_done.set()
        saver.join()
    check_integrity(store)
    for text in texts:
        assert draft_after(store, text[:3], scope_of("warmed")) == text[3 : 3 + K]
    check_integrity(NgramStore.load(tmp_path / "store"))
