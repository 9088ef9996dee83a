"""Saving, loading and merging stores, and rejecting files that are not store files."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core.store.requests import Request
from ngram_npu import NgramStore, StoreFileError, scope_of
from ngram_npu.store import Visibility
from ngram_npu.store import file as store_file
from ngram_npu.tensors import Int32Array

TEXT = list(range(100, 140))
HEADER_BYTES = 64 + 32  # including the checksum


def full_store(visibility: Visibility = "live", slots: int = 3) -> NgramStore:
    """Returns a store after more text of three scopes than it can hold, with open requests."""
    store = NgramStore(slots, 16384, visibility=visibility)
    rng = np.random.default_rng(7)
    for number in range(60):
        request = Request(store, number % slots, scope=number % 3)
        request.append(rng.integers(0, 50, int(rng.integers(1, 900))).tolist())
    return store


def live_words(store: NgramStore) -> Int32Array:
    """Returns all words but the slots and the entries of overwritten text."""
    words = store._words.copy()
    parts = store._parts()
    serials = set(words[parts["heads"]].reshape(-1, 8)[:, 0].tolist()) - {0}
    entries = words[parts["lines"]].reshape(-1, 2)
    is_live = np.isin(entries[:, 1].view(np.uint32) >> 8, list(serials))
    entries[~is_live] = 0
    return np.delete(words, parts["slots"])


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_loaded_store_equals_saved_store(visibility: Visibility, tmp_path: Path) -> None:
    store = full_store(visibility)
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store", num_slots=3, kind="torch")
    assert np.array_equal(live_words(loaded), live_words(store))
    assert loaded.statistics.open_slots == 0
    assert loaded.visibility == visibility
    if visibility == "live":  # with "finish", the open requests of the saved store are lost
        store.finish(np.arange(3))
        other = NgramStore.load(tmp_path / "store", num_slots=3)
        drafts = Request(store, 0, scope=1).append([4, 5])
        assert drafts == Request(other, 0, scope=1).append([4, 5]) != []


@pytest.mark.parametrize("slots", [1, 2, 5, None])
def test_store_is_loaded_with_another_number_of_slots(slots: int | None, tmp_path: Path) -> None:
    store = full_store()
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store", num_slots=slots)
    assert loaded.statistics.num_slots == (slots or 16)
    loaded.check_integrity()
    loaded.save(tmp_path / "loaded")
    twice = NgramStore.load(tmp_path / "loaded", num_slots=3)
    assert np.array_equal(live_words(twice), live_words(store))


def test_save_replaces_the_target_of_a_link_by_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "store"
    path.parent.mkdir()
    path.write_bytes(b"old")
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    full_store().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["store"]


def test_failed_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        full_store().save(tmp_path / "none" / "store")
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        full_store().save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.usefixtures("no_torch")
def test_process_that_dies_while_saving_leaves_a_complete_file(tmp_path: Path) -> None:
    """It dies at each step of saving: an open, the lock, another open, fsync, rename, the folder's
    open and fsync. Loading keeps the temporary file, the next save removes it."""
    subprocess.run([sys.executable, "-c", SAVE_AND_DIE, str(tmp_path)], check=True)
    folders = [tmp_path / "store" / str(n) for n in range(8)]
    stores = [NgramStore.load(folder / "store") for folder in folders]
    assert [store.statistics.tokens_held for store in stores] == [200] * 5 + [700] * 3
    assert [len(os.listdir(folder)) for folder in folders] == [1, 2, 2, 2, 2, 1, 1, 1]
    for folder, store in zip(folders, stores, strict=True):
        store.save(folder / "store")
        assert os.listdir(folder) == ["store"]


SAVE_AND_DIE = """
import os, sys
from ngram_npu import NgramStore
store = NgramStore(1, 4096)
left, fsync = 100, os.fsync
def count(*_):
    global left
    left -= 1
    if left < 0:
        os._exit(7)
def counting_fsync(file):
    count()
    fsync(file)
os.fsync = counting_fsync
steps = ("open", "fcntl.flock", "os.rename")
sys.addaudithook(lambda event, _: count() if event in steps else None)
store.warm([range(200)])
for n in range(8):
    left = 100
    path = f"{sys.argv[1]}/store/{n}"
    os.makedirs(path)
    store.save(path + "/store")
store.warm([range(1000, 1500)])
for n in range(8):
    if os.fork() == 0:
        left = n
        store.save(f"{sys.argv[1]}/store/{n}/store")
        os._exit(0)
    assert os.WEXITSTATUS(os.wait()[1]) == (7 if n < 7 else 0)
"""


def test_save_keeps_the_temporary_file_of_a_concurrent_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "store", os.fsync
    is_writing, may_continue = threading.Event(), threading.Event()
    slow, quick = NgramStore(1, 1024), NgramStore(1, 2048)
    saving = threading.Thread(target=slow.save, args=(path,))

    def wait_then_sync(file: int) -> None:
        if threading.current_thread() is saving and not may_continue.is_set():
            is_writing.set()
            assert may_continue.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", wait_then_sync)
    saving.start()
    assert is_writing.wait(60)
    (temporary,) = os.listdir(tmp_path)
    quick.save(path)
    assert set(os.listdir(tmp_path)) == {"store", temporary}
    may_continue.set()
    saving.join()
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_temporary_file_removed_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "store", fcntl.flock
    first, second = NgramStore(1, 1024), NgramStore(1, 2048)

    def save_then_lock(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        second.save(path)
        assert os.listdir(tmp_path) == ["store"]
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", save_then_lock)
    first.save(path)
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_save_removes_only_its_own_temporary_files(tmp_path: Path) -> None:
    """A pipe or a folder may have the name of one."""
    code = "0123456789abcdef"
    others = {
        f".other.{code}.tmp",
        f".stores.{code}.tmp",
        f".s+ore.{code}.tmp",
        f"store.{code}.tmp",
    }
    others |= {f".store.{code[1:]}.tmp", f".store.{code}.tmp2"}
    for name in (*others, f".s.ore.{code}.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f".s.ore.{code[::-1]}.tmp").mkdir()
    os.mkfifo(tmp_path / f".s.ore.{code[1:]}0.tmp")
    NgramStore(1, 1024).save(tmp_path / "s.ore")
    assert set(os.listdir(tmp_path)) == others | {"s.ore", f".s.ore.{code[::-1]}.tmp"}


def check_rejected(path: Path, message: str) -> None:
    with pytest.raises(StoreFileError, match=message) as error:
        NgramStore.load(path)
    assert str(path) in str(error.value)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "store"
    NgramStore(1, 1024).save(path)
    content = path.read_bytes()
    path.write_bytes(b"")
    check_rejected(path, "not a store file")
    for size in (*range(1, HEADER_BYTES + 3), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        check_rejected(path, "truncated")
    path.write_bytes(content + b"x")
    check_rejected(path, "too long")


def test_file_of_another_format_or_version_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "store"
    full_store().save(path)
    content = bytearray(path.read_bytes())
    path.write_bytes(b"\x89PNG" + bytes(content))
    check_rejected(path, "not a store file")
    for version, age in ((1, "an older"), (3, "a newer")):
        content[8:12] = struct.pack("<I", version)
        for size in (12, len(content)):
            path.write_bytes(content[:size])
            check_rejected(path, f"of {age} release: expected format 2, got {version}")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (12, 0, "corrupt: no store has the sizes in its header"),  # blocks
        (16, 0, "corrupt: no store has the sizes in its header"),  # bits
        (16, 3, "corrupt: NgramStore: a piece of a file does not belong to a store of these sizes"),
        (20, 2, "corrupt: no store has the sizes in its header"),  # visibility
        (24, 2**30, "truncated: expected 1073741824 bytes"),
        (32, 5, "corrupt: its checksum does not match"),
        (HEADER_BYTES, 9, "corrupt: NgramStore: a piece of a file"),
    ],
)
def test_damaged_file_is_rejected(offset: int, value: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    full_store().save(path)
    data = bytearray(path.read_bytes())
    data[offset : offset + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    check_rejected(path, message)


def test_file_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    path, tokenizer, other = tmp_path / "store", "0f" * 16, "a0" * 16
    store = NgramStore(1, 4096, tokenizer=tokenizer)
    store.seed = "1b" * 16
    store.warm([TEXT])
    store.save(path)
    for capacity in (4096, 8192):
        loaded = NgramStore.load(
            path, token_capacity=capacity, visibility="live", tokenizer=tokenizer
        )
        assert (loaded.tokenizer, loaded.seed) == (tokenizer, store.seed)
        assert (loaded.token_capacity, loaded.statistics.tokens_held) == (capacity, len(TEXT))
    assert store_file.describe(path).tokenizer == tokenizer
    with pytest.raises(StoreFileError, match=f"another tokenizer: expected vocabulary {other}"):
        NgramStore.load(path, tokenizer=other)
    with pytest.raises(ValueError, match=f"merge: expected a store of vocabulary {other}"):
        NgramStore(1, 4096, tokenizer=other).merge(store)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits, got 'gpt2'"):
        NgramStore(1, 4096, tokenizer="gpt2")


def test_file_without_a_digest_adopts_the_tokenizer(tmp_path: Path) -> None:
    NgramStore(1, 4096).save(tmp_path / "store")
    for capacity in (4096, 8192):
        loaded = NgramStore.load(tmp_path / "store", token_capacity=capacity, tokenizer="0f" * 16)
        assert loaded.tokenizer == "0f" * 16


def test_file_size_depends_on_the_text_only(tmp_path: Path) -> None:
    store = NgramStore(1, 1 << 22)
    store.warm([np.random.default_rng(1).integers(0, 5000, 40_000)])
    store.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_size < 40_000 * (5 + 5 * 12) + 10_000


def call_after_each_piece(store: NgramStore, function: Callable[[], object]) -> None:
    """Changes a store so that saving it calls a function after each piece."""
    pieces = store._pieces

    def pieces_with_calls(epoch: int) -> Iterator[bytes]:
        for piece in pieces(epoch):
            yield piece
            function()

    store._pieces = pieces_with_calls  # type: ignore[method-assign]


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_file_saved_during_steps_is_valid(visibility: Visibility, tmp_path: Path) -> None:
    """Between any two pieces, text is added and overwritten. The file contains the other text."""
    store = NgramStore(3, 1 << 19, visibility=visibility)
    rng = np.random.default_rng(3)
    old_text = rng.integers(50, 90, 9000).tolist()
    store.warm([rng.integers(0, 50, 1 << 18), old_text], scope=5)
    requests = [Request(store, i, scope=i) for i in range(2)]

    def add_text() -> None:
        for request in requests:
            request.append(rng.integers(0, 50, 9000).tolist())

    call_after_each_piece(store, add_text)
    store.save(tmp_path / "store")
    assert store.statistics.calls_skipped == 0
    loaded = NgramStore.load(tmp_path / "store")
    loaded.check_integrity()
    assert loaded.statistics.tokens_held > 1 << 18
    request = Request(loaded, 0, scope=5, prompt=old_text[4000:4020])
    assert request.append([old_text[4020]]) == old_text[4021:4025]


def test_text_cleared_between_pieces_is_not_saved(tmp_path: Path) -> None:
    store = NgramStore(1, 4096)
    store.warm([TEXT], scope="a")
    store.warm([[5, 6, 7]], scope="b")
    call_after_each_piece(store, lambda: scope_of("a") in store.scopes and store.clear("a"))
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store")
    assert loaded.scopes == store.scopes == {scope_of("b"): 3}


def test_text_cleared_before_the_file_is_replaced_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fsync = NgramStore(1, 4096), os.fsync
    store.warm([TEXT], scope="a")

    def clear_then_sync(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        store.clear("a")
        fsync(file)

    monkeypatch.setattr(os, "fsync", clear_then_sync)
    store.save(tmp_path / "store")
    assert NgramStore.load(tmp_path / "store").scopes == {}
    assert os.listdir(tmp_path) == ["store"]
    monkeypatch.setattr(os, "fsync", lambda file: store.clear("a"))
    with pytest.raises(RuntimeError, match="text was cleared during each of 10 attempts"):
        store.save(tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]


def test_number_of_slots_is_limited_by_the_blocks(tmp_path: Path) -> None:
    full_store().save(tmp_path / "store")
    for slots in (0, 17):
        with pytest.raises(ValueError, match=f"num_slots: expected 1 to 16, got {slots}"):
            NgramStore.load(tmp_path / "store", num_slots=slots)
    resized = NgramStore.load(tmp_path / "store", token_capacity=8192)
    assert resized.statistics.num_slots == 8


def test_merge_equals_adding_each_text() -> None:
    """Texts of several interleaved blocks."""
    first, second = NgramStore(4, 16384), NgramStore(2, 32768)
    texts = [np.random.default_rng(i).integers(0, 40, 700 + 90 * i).tolist() for i in range(3)]
    requests = [Request(first, i, scope=i % 2, prompt=[]) for i in range(3)]
    for at in range(0, 900, 100):
        for request, text in zip(requests, texts, strict=True):
            if text[at : at + 100]:
                request.append(text[at : at + 100])
    before = first.tensor.copy()
    second.merge(first)
    assert np.array_equal(first.tensor, before)
    expected = NgramStore(2, 32768)
    for i, text in enumerate(texts):
        expected.warm([text], scope=i % 2)
    assert np.array_equal(second.tensor, expected.tensor)
    second.check_integrity()
    with pytest.raises(ValueError, match="merge: expected another store, got this one"):
        second.merge(second)


def test_merge_adds_the_remaining_part_of_a_text() -> None:
    first, second = NgramStore(1, 1024), NgramStore(1, 8192)
    text = np.random.default_rng(2).integers(0, 40, 2000).tolist()
    first.warm([text], scope="a")
    second.merge(first)
    num_tokens = second.statistics.tokens_held
    assert num_tokens == first.statistics.tokens_held + 16, "repeated by the oldest block"
    expected = NgramStore(1, 8192)
    expected.warm([text[-num_tokens:]], scope="a")
    assert np.array_equal(second.tensor, expected.tensor)


def test_merge_of_new_texts_compares_scopes(tmp_path: Path) -> None:
    """Equal texts of two scopes are two texts. Merging a copy adds nothing."""
    first, second = NgramStore(2, 8192), NgramStore(2, 8192)
    for scope in (0, "a", "b", 2**62 - 1):
        first.warm([TEXT, TEXT[:9]], scope=scope)
    second.warm([TEXT], scope="a")
    second.merge(first, new_only=True)
    assert second.scopes == first.scopes == dict.fromkeys(first.scopes, len(TEXT) + 9)
    assert len(first.scopes) == 4
    assert len(second.texts()) == 8, "a text in both stores is stored once"
    first.save(tmp_path / "copy")
    for other in (NgramStore.load(tmp_path / "copy"), second):
        before = first.tensor.copy()
        first.merge(other, new_only=True)
        assert np.array_equal(first.tensor, before)
