"""Stores whose text is marked at updates of the model's weights and dropped after later updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core.store.device_steps import Requests, run_step
from core.store.requests import Request
from ngram_npu import NgramStore
from ngram_npu.store.device_store import DeviceStore

NEXT_SERIAL_WORD = 5
END_OF_SERIALS = {NgramStore: 2**24, DeviceStore: 2**23}
Store = NgramStore | DeviceStore
TEXT = list(range(100, 140))


def make_host_store(first_number: int = 1, num_slots: int = 4) -> NgramStore:
    store = NgramStore(num_slots, 64 * 256)
    store.tensor[NEXT_SERIAL_WORD] = first_number
    return store


def make_device_store(first_number: int = 1, num_slots: int = 4) -> DeviceStore:
    store = DeviceStore(num_slots, 64 * 256, max_batch=8)
    store.allocator.fill_(first_number)
    store._max_number = first_number
    return store


MAKERS = [make_host_store, make_device_store]
Maker = Callable[..., Store]
each_store = pytest.mark.parametrize("make_store", MAKERS)


def make_text(version: int, rng: np.random.Generator) -> list[int]:
    """Returns text of at most three blocks, whose tokens show by which weights it was generated."""
    return (1000 * version + rng.integers(0, 9, rng.integers(1, 700))).tolist()


def read_texts(store: Store) -> list[list[int]]:
    return [text.tolist() for _, text in store.texts()]


@each_store
@pytest.mark.parametrize("keep_updates", [1, 2, 3])
@pytest.mark.parametrize("starts_near_end", [False, True])
def test_only_text_since_the_kept_updates_remains(
    make_store: Maker, keep_updates: int, starts_near_end: bool
) -> None:
    """Also if all block numbers are used up in between, and the blocks get new numbers."""
    rng = np.random.default_rng(keep_updates)
    store = make_store()
    if starts_near_end:
        store = make_store(END_OF_SERIALS[type(store)] - 70)
    texts: list[list[list[int]]] = []
    for version in range(1, 40):
        texts.append([make_text(version, rng) for _ in range(rng.integers(0, 4))])
        store.warm(texts[-1], scope=version % 2)
        store.mark_update(keep_updates)
        remaining_texts = texts[len(texts) - keep_updates + 1 :]
        assert read_texts(store) == [text for part in remaining_texts for text in part]
        store.check_integrity()
        if isinstance(store, NgramStore):
            tokens = store.tensor[store._parts()["tokens"]]
        else:
            tokens = store.text.numpy()
        oldest_token = 1000 * (version - keep_updates + 2)
        assert not ((tokens > 0) & (tokens < oldest_token)).any()
    if isinstance(store, NgramStore):
        assert store.statistics.renumberings == starts_near_end


@each_store
def test_update_without_number_keeps_text_and_counts_for_later_updates(make_store: Maker) -> None:
    store = make_store()
    for version in range(1, 5):
        store.warm([[version] * 3])
        store.mark_update()
    assert read_texts(store) == [[version] * 3 for version in range(1, 5)]
    store.mark_update(4)
    assert read_texts(store) == [[3] * 3, [4] * 3]


@each_store
def test_update_after_clear_keeps_newer_text(make_store: Maker) -> None:
    store = make_store()
    store.warm([TEXT * 40])
    store.mark_update(2)
    store.clear()
    store.warm([[7, 8]])
    store.mark_update(2)
    assert read_texts(store) == [[7, 8]]
    store.mark_update(2)
    assert read_texts(store) == []
    store.check_integrity()


@each_store
def test_invalid_number_of_updates_is_rejected(make_store: Maker) -> None:
    store = make_store()
    store.warm([TEXT])
    name = type(store).__name__
    message = f"^{name}: mark_update: keep_updates: expected at least 1 or None, got 0$"
    with pytest.raises(ValueError, match=message):
        store.mark_update(0)
    store.mark_update(2)
    assert read_texts(store) == [TEXT]


@each_store
def test_text_dropped_during_save_is_not_in_the_file(make_store: Maker, tmp_path: Path) -> None:
    store = make_store()
    store.warm([TEXT])
    updates = [1]
    write = NgramStore.write_new_file

    def update_while_writing(copy: NgramStore, path: Path) -> object:
        writer = write(copy, path)
        if updates:
            store.mark_update(updates.pop())
        return writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramStore, "write_new_file", update_while_writing)
        store.save(tmp_path / "store")
    assert not updates
    assert NgramStore.load(tmp_path / "store").statistics.tokens_held == 0


def test_loaded_text_is_older_than_the_next_update(tmp_path: Path) -> None:
    store = make_host_store()
    store.warm([TEXT])
    store.mark_update()
    store.save(tmp_path / "store")
    loaded_store = NgramStore.load(tmp_path / "store")
    loaded_store.mark_update(2)
    assert read_texts(loaded_store) == [TEXT]
    loaded_store.mark_update(2)
    assert read_texts(loaded_store) == []


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_open_request_continues_in_new_block_after_update(visibility: str) -> None:
    store = NgramStore(2, 8192, visibility=visibility)  # type: ignore[arg-type]
    request = Request(store, 0)
    request.append(TEXT)
    store.mark_update(2)
    assert store.statistics.open_slots == 0
    assert Request(store, 1).append(TEXT[:5]) == TEXT[5:9], "the text before the update is visible"
    request.append([7, 8, 9])
    store.mark_update(2)
    assert read_texts(store) == [TEXT[:5], [7, 8, 9]]
    assert Request(store, 1).append([7]) == [8, 9]
    assert store.statistics.blocks_lost == 0
    store.check_integrity()


def test_random_steps_with_updates_store_only_text_of_kept_weights() -> None:
    store, requests = make_device_store(num_slots=6), Requests(7)
    num_drafts = 0
    lengths: list[int] = []
    for number in range(200):
        drafts = run_step(store, requests, requests.next_step())
        num_drafts += int((drafts["num_draft_tokens"] > 0).sum())
        if number % 10 == 9:
            store.mark_update(2)
            store.check_integrity()
            lengths.append(sum(map(len, read_texts(store))))
    assert num_drafts > 50
    assert lengths[0] > 0
    assert max(lengths) < 10 * 6 * 24, "the text of ten steps"
