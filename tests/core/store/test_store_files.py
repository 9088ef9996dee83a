"""Tests that stores are saved, loaded and merged, and that files of other formats are rejected."""

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


def make_full_store(visibility: Visibility = "live", slots: int = 3) -> NgramStore:
    """Returns a store after more text of three scopes than it can hold, with open requests."""
    store = NgramStore(slots, 16384, visibility=visibility)
    rng = np.random.default_rng(7)
    for i in range(60):
        request = Request(store, i % slots, scope=i % 3)
        request.append(rng.integers(0, 50, int(rng.integers(1, 900))).tolist())
    return store


def get_live_words(store: NgramStore) -> Int32Array:
    """Returns all words except the slots, with the entries of overwritten text set to 0."""
    words = store._words.copy()
    slices = store._parts()
    serials = set(words[slices["heads"]].reshape(-1, 8)[:, 0].tolist()) - {0}
    entries = words[slices["lines"]].reshape(-1, 2)
    is_live = np.isin(entries[:, 1].view(np.uint32) >> 8, list(serials))
    entries[~is_live] = 0
    return np.delete(words, slices["slots"])


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_loaded_store_equals_saved_store(visibility: Visibility, tmp_path: Path) -> None:
    store = make_full_store(visibility)
    store.save(tmp_path / "store")
    copy = NgramStore.load(tmp_path / "store", num_slots=3, kind="torch")
    assert np.array_equal(get_live_words(copy), get_live_words(store))
    assert copy.statistics.open_slots == 0
    assert copy.visibility == visibility
    if visibility == "live":  # with "finish", the open requests of the saved store are lost
        store.finish(np.arange(3))
        other_store = NgramStore.load(tmp_path / "store", num_slots=3)
        drafts = Request(store, 0, scope=1).append([4, 5])
        assert drafts == Request(other_store, 0, scope=1).append([4, 5]) != []


@pytest.mark.parametrize("slots", [1, 2, 5, None])
def test_store_loaded_with_other_slots_is_equal(slots: int | None, tmp_path: Path) -> None:
    store = make_full_store()
    store.save(tmp_path / "store")
    copy = NgramStore.load(tmp_path / "store", num_slots=slots)
    assert copy.statistics.num_slots == (slots or 16)
    copy.check_integrity()
    copy.save(tmp_path / "loaded")
    reloaded = NgramStore.load(tmp_path / "loaded", num_slots=3)
    assert np.array_equal(get_live_words(reloaded), get_live_words(store))


def test_save_to_link_replaces_its_target_by_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "store"
    path.parent.mkdir()
    path.write_bytes(b"old")
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    make_full_store().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["store"]


def test_failed_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_full_store().save(tmp_path / "none" / "store")
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        make_full_store().save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.usefixtures("no_torch")
def test_process_killed_while_saving_leaves_a_complete_file(tmp_path: Path) -> None:
    """Processes exit at each step of saving: open, lock, another open, fsync, rename, then open and
    fsync of the folder. Loading keeps the temporary file, and the next save removes the file."""
    subprocess.run([sys.executable, "-c", SAVE_AND_EXIT, str(tmp_path)], check=True)
    folders = [tmp_path / "store" / str(n) for n in range(8)]
    stores = [NgramStore.load(folder / "store") for folder in folders]
    assert [store.statistics.tokens_held for store in stores] == [200] * 5 + [700] * 3
    assert [len(os.listdir(folder)) for folder in folders] == [1, 2, 2, 2, 2, 1, 1, 1]
    for folder, store in zip(folders, stores, strict=True):
        store.save(folder / "store")
        assert os.listdir(folder) == ["store"]


SAVE_AND_EXIT = """
import os, sys
from ngram_npu import NgramStore
store = NgramStore(1, 4096)
num_steps_left, fsync = 100, os.fsync
def count_step(*_):
    global num_steps_left
    num_steps_left -= 1
    if num_steps_left < 0:
        os._exit(7)
def count_and_sync(file):
    count_step()
    fsync(file)
os.fsync = count_and_sync
steps = ("open", "fcntl.flock", "os.rename")
sys.addaudithook(lambda event, _: count_step() if event in steps else None)
store.warm([range(200)])
for n in range(8):
    num_steps_left = 100
    path = f"{sys.argv[1]}/store/{n}"
    os.makedirs(path)
    store.save(path + "/store")
store.warm([range(1000, 1500)])
for n in range(8):
    if os.fork() == 0:
        num_steps_left = n
        store.save(f"{sys.argv[1]}/store/{n}/store")
        os._exit(0)
    assert os.WEXITSTATUS(os.wait()[1]) == (7 if n < 7 else 0)
"""


def test_save_keeps_the_temporary_file_of_a_concurrent_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "store", os.fsync
    is_writing, may_continue = threading.Event(), threading.Event()
    slow_store, quick_store = NgramStore(1, 1024), NgramStore(1, 2048)
    save_thread = threading.Thread(target=slow_store.save, args=(path,))

    def wait_then_sync(file: int) -> None:
        if threading.current_thread() is save_thread and not may_continue.is_set():
            is_writing.set()
            assert may_continue.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", wait_then_sync)
    save_thread.start()
    assert is_writing.wait(60)
    (temporary_file,) = os.listdir(tmp_path)
    quick_store.save(path)
    assert set(os.listdir(tmp_path)) == {"store", temporary_file}
    may_continue.set()
    save_thread.join()
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_temporary_file_removed_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "store", fcntl.flock
    first_store, second_store = NgramStore(1, 1024), NgramStore(1, 2048)

    def save_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        second_store.save(path)
        assert os.listdir(tmp_path) == ["store"]
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", save_then_lock)
    first_store.save(path)
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_save_removes_only_its_own_temporary_files(tmp_path: Path) -> None:
    """A pipe or a folder may have the name of a temporary file."""
    code = "0123456789abcdef"
    other_names = {
        f".other.{code}.tmp",
        f".stores.{code}.tmp",
        f".s+ore.{code}.tmp",
        f"store.{code}.tmp",
    }
    other_names |= {f".store.{code[1:]}.tmp", f".store.{code}.tmp2"}
    for name in (*other_names, f".s.ore.{code}.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f".s.ore.{code[::-1]}.tmp").mkdir()
    os.mkfifo(tmp_path / f".s.ore.{code[1:]}0.tmp")
    NgramStore(1, 1024).save(tmp_path / "s.ore")
    assert set(os.listdir(tmp_path)) == other_names | {"s.ore", f".s.ore.{code[::-1]}.tmp"}


def check_file_is_rejected(path: Path, message: str) -> None:
    with pytest.raises(StoreFileError, match=message) as error:
        NgramStore.load(path)
    assert str(path) in str(error.value)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "store"
    NgramStore(1, 1024).save(path)
    content = path.read_bytes()
    path.write_bytes(b"")
    check_file_is_rejected(path, "not a store file")
    for size in (*range(1, HEADER_BYTES + 3), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        check_file_is_rejected(path, "truncated")
    path.write_bytes(content + b"x")
    check_file_is_rejected(path, "too long")


def test_file_of_another_format_or_version_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make_full_store().save(path)
    content = bytearray(path.read_bytes())
    path.write_bytes(b"\x89PNG" + bytes(content))
    check_file_is_rejected(path, "not a store file")
    for version, age in ((1, "an older"), (3, "a newer")):
        content[8:12] = struct.pack("<I", version)
        for size in (12, len(content)):
            path.write_bytes(content[:size])
            check_file_is_rejected(path, f"of {age} release: expected format 2, got {version}")


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
    make_full_store().save(path)
    data = bytearray(path.read_bytes())
    data[offset : offset + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    check_file_is_rejected(path, message)


def test_file_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    path, tokenizer, other_id = tmp_path / "store", "0f" * 16, "a0" * 16
    store = NgramStore(1, 4096, tokenizer=tokenizer)
    store.seed = "1b" * 16
    store.warm([TEXT])
    store.save(path)
    for capacity in (4096, 8192):
        copy = NgramStore.load(
            path, token_capacity=capacity, visibility="live", tokenizer=tokenizer
        )
        assert (copy.tokenizer, copy.seed) == (tokenizer, store.seed)
        assert (copy.token_capacity, copy.statistics.tokens_held) == (capacity, len(TEXT))
    assert store_file.describe(path).tokenizer == tokenizer
    with pytest.raises(StoreFileError, match=f"another tokenizer: expected vocabulary {other_id}"):
        NgramStore.load(path, tokenizer=other_id)
    with pytest.raises(ValueError, match=f"merge: expected a store of vocabulary {other_id}"):
        NgramStore(1, 4096, tokenizer=other_id).merge(store)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits, got 'gpt2'"):
        NgramStore(1, 4096, tokenizer="gpt2")


def test_store_from_file_without_tokenizer_gets_tokenizer_argument(tmp_path: Path) -> None:
    NgramStore(1, 4096).save(tmp_path / "store")
    for capacity in (4096, 8192):
        copy = NgramStore.load(tmp_path / "store", token_capacity=capacity, tokenizer="0f" * 16)
        assert copy.tokenizer == "0f" * 16


def test_file_size_depends_on_the_text_only(tmp_path: Path) -> None:
    store = NgramStore(1, 1 << 22)
    store.warm([np.random.default_rng(1).integers(0, 5000, 40_000)])
    store.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_size < 40_000 * (5 + 5 * 12) + 10_000


def insert_call_after_each_piece(store: NgramStore, function: Callable[[], object]) -> None:
    """Changes a store so that a save calls the function after each piece of the file."""
    pieces = store._pieces

    def iterate_pieces_with_calls(epoch: int) -> Iterator[bytes]:
        for piece in pieces(epoch):
            yield piece
            function()

    store._pieces = iterate_pieces_with_calls  # type: ignore[method-assign]


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_file_saved_during_steps_is_valid(visibility: Visibility, tmp_path: Path) -> None:
    """Text is added and overwritten between any two pieces. The file contains all other text."""
    store = NgramStore(3, 1 << 19, visibility=visibility)
    rng = np.random.default_rng(3)
    old_text = rng.integers(50, 90, 9000).tolist()
    store.warm([rng.integers(0, 50, 1 << 18), old_text], scope=5)
    requests = [Request(store, i, scope=i) for i in range(2)]

    def add_text() -> None:
        for request in requests:
            request.append(rng.integers(0, 50, 9000).tolist())

    insert_call_after_each_piece(store, add_text)
    store.save(tmp_path / "store")
    assert store.statistics.calls_skipped == 0
    copy = NgramStore.load(tmp_path / "store")
    copy.check_integrity()
    assert copy.statistics.tokens_held > 1 << 18
    request = Request(copy, 0, scope=5, prompt=old_text[4000:4020])
    assert request.append([old_text[4020]]) == old_text[4021:4025]


def test_text_cleared_between_pieces_is_not_saved(tmp_path: Path) -> None:
    store = NgramStore(1, 4096)
    store.warm([TEXT], scope="a")
    store.warm([[5, 6, 7]], scope="b")
    insert_call_after_each_piece(store, lambda: scope_of("a") in store.scopes and store.clear("a"))
    store.save(tmp_path / "store")
    copy = NgramStore.load(tmp_path / "store")
    assert copy.scopes == store.scopes == {scope_of("b"): 3}


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


def test_number_of_slots_is_limited_by_number_of_blocks(tmp_path: Path) -> None:
    make_full_store().save(tmp_path / "store")
    for slots in (0, 17):
        with pytest.raises(ValueError, match=f"num_slots: expected 1 to 16, got {slots}"):
            NgramStore.load(tmp_path / "store", num_slots=slots)
    resized = NgramStore.load(tmp_path / "store", token_capacity=8192)
    assert resized.statistics.num_slots == 8


def test_merge_equals_adding_each_text() -> None:
    """Each text has several blocks, which alternate with blocks of the other texts."""
    source, target = NgramStore(4, 16384), NgramStore(2, 32768)
    texts = [np.random.default_rng(i).integers(0, 40, 700 + 90 * i).tolist() for i in range(3)]
    requests = [Request(source, i, scope=i % 2, prompt=[]) for i in range(3)]
    for begin in range(0, 900, 100):
        for request, text in zip(requests, texts, strict=True):
            if text[begin : begin + 100]:
                request.append(text[begin : begin + 100])
    words_before = source.tensor.copy()
    target.merge(source)
    assert np.array_equal(source.tensor, words_before)
    expected = NgramStore(2, 32768)
    for i, text in enumerate(texts):
        expected.warm([text], scope=i % 2)
    assert np.array_equal(target.tensor, expected.tensor)
    target.check_integrity()
    with pytest.raises(ValueError, match="merge: expected another store, got this one"):
        target.merge(target)


def test_merge_adds_the_part_of_a_text_that_is_not_overwritten() -> None:
    source, target = NgramStore(1, 1024), NgramStore(1, 8192)
    text = np.random.default_rng(2).integers(0, 40, 2000).tolist()
    source.warm([text], scope="a")
    target.merge(source)
    num_tokens = target.statistics.tokens_held
    assert num_tokens == source.statistics.tokens_held + 16, "the oldest block repeats 16 tokens"
    expected = NgramStore(1, 8192)
    expected.warm([text[-num_tokens:]], scope="a")
    assert np.array_equal(target.tensor, expected.tensor)


def test_merge_of_new_texts_compares_scopes(tmp_path: Path) -> None:
    """Equal texts of two scopes are different texts. A merge of a copy adds nothing."""
    store, other_store = NgramStore(2, 8192), NgramStore(2, 8192)
    for scope in (0, "a", "b", 2**62 - 1):
        store.warm([TEXT, TEXT[:9]], scope=scope)
    other_store.warm([TEXT], scope="a")
    other_store.merge(store, new_only=True)
    assert other_store.scopes == store.scopes == dict.fromkeys(store.scopes, len(TEXT) + 9)
    assert len(store.scopes) == 4
    assert len(other_store.texts()) == 8, "a text in both stores is stored once"
    store.save(tmp_path / "copy")
    for source in (NgramStore.load(tmp_path / "copy"), other_store):
        words_before = store.tensor.copy()
        store.merge(source, new_only=True)
        assert np.array_equal(store.tensor, words_before)
