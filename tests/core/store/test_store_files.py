"""Saving, loading and merging stores, and refusing files that hold no store."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core.store.requests import Request
from ngram_npu import NgramStore, StoreFileError, scope_of, store_file
from ngram_npu.memory import Int32Array
from ngram_npu.store_statistics import Visibility

TEXT = list(range(100, 140))
PREAMBLE = 64 + 32  # what a file says of itself, checksum


def filled(visibility: Visibility = "live", slots: int = 3) -> NgramStore:
    """A store given more text of three scopes than it holds, with open requests."""
    store = NgramStore(slots, 16384, visibility=visibility)
    rng = np.random.default_rng(7)
    for turn in range(60):
        request = Request(store, turn % slots, scope=turn % 3)
        request.say(rng.integers(0, 50, int(rng.integers(1, 900))).tolist())
    return store


def contents(store: NgramStore) -> Int32Array:
    """All but the slots and the entries of text that was overwritten."""
    words = store._words.copy()
    parts = store._parts()
    used = set(words[parts["heads"]].reshape(-1, 8)[:, 0].tolist())
    entries = words[parts["lines"]].reshape(-1, 2)
    alive = np.isin(entries[:, 1].view(np.uint32) >> 8, list(used - {0}))
    entries[~alive] = 0
    return np.delete(words, parts["slots"])


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_a_store_comes_back_as_it_was(visibility: Visibility, tmp_path: Path) -> None:
    store = filled(visibility)
    store.save(tmp_path / "store")
    again = NgramStore.load(tmp_path / "store", num_slots=3, kind="torch")
    assert np.array_equal(contents(again), contents(store))
    assert again.statistics.open_slots == 0
    assert again.visibility == visibility
    first, second = Request(store, 0, scope=1), Request(again, 0, scope=1)
    store.finish(np.arange(3))
    second.store = NgramStore.load(tmp_path / "store", num_slots=3)
    assert (visibility == "finish") or first.say([4, 5]) == second.say([4, 5]) != []


@pytest.mark.parametrize("slots", [1, 2, 5, None])
def test_a_store_may_get_other_slots(slots: int | None, tmp_path: Path) -> None:
    store = filled()
    store.save(tmp_path / "store")
    again = NgramStore.load(tmp_path / "store", num_slots=slots)
    assert again.statistics.num_slots == (slots or 16)
    again.check_integrity()
    again.save(tmp_path / "again")
    twice = NgramStore.load(tmp_path / "again", num_slots=3)
    assert np.array_equal(contents(twice), contents(store))


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"old")
    path.chmod(0o644)
    filled().save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["store"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "store")
    filled().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["store"]


def test_where_it_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        filled().save(tmp_path / "none" / "store")
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        filled().save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.usefixtures("no_torch")
def test_a_process_that_ends_in_the_middle_leaves_a_whole_file(tmp_path: Path) -> None:
    """It ends at each step of saving: an open, the lock, another open, fsync, rename, the folder's
    open and fsync. Loading leaves what it left alone, saving removes it."""
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
def noted(file):
    count()
    fsync(file)
os.fsync = noted
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


def test_killed_processes_leave_one_file_at_most(tmp_path: Path) -> None:
    """Each process first removes what the one before it left."""
    path = tmp_path / "store"
    store = NgramStore(1, 65536)
    store.save(path)
    left = 0
    for n in range(200):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                while True:
                    store.save(path)
            finally:
                os._exit(1)
        time.sleep(0.002 + n * 0.0005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        files = set(os.listdir(tmp_path))
        assert "store" in files
        assert len(files) <= 2
        left += len(files) - 1
        if left == 10:
            break
    assert left == 10
    NgramStore.load(path).save(path)
    assert os.listdir(tmp_path) == ["store"]


def test_what_another_call_is_writing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "store", os.fsync
    reached, go_on = threading.Event(), threading.Event()
    slow, quick = NgramStore(1, 1024), NgramStore(1, 2048)
    saving = threading.Thread(target=slow.save, args=(path,))

    def waits(file: int) -> None:
        if threading.current_thread() is saving and not go_on.is_set():
            reached.set()
            assert go_on.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", waits)
    saving.start()
    assert reached.wait(60)
    (written,) = os.listdir(tmp_path)
    quick.save(path)
    assert set(os.listdir(tmp_path)) == {"store", written}
    go_on.set()
    saving.join()
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_a_file_that_is_removed_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "store", fcntl.flock
    first, second = NgramStore(1, 1024), NgramStore(1, 2048)

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        second.save(path)
        assert os.listdir(tmp_path) == ["store"]
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    first.save(path)
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).token_capacity == 1024


def test_only_its_own_leftovers_are_removed(tmp_path: Path) -> None:
    """Also where a pipe or a folder has the name of one."""
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


def refused(path: Path, message: str) -> None:
    with pytest.raises(StoreFileError, match=message) as error:
        NgramStore.load(path)
    assert str(path) in str(error.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    NgramStore(1, 1024).save(path)
    whole = path.read_bytes()
    path.write_bytes(b"")
    refused(path, "not a file of a store")
    for size in (*range(1, PREAMBLE + 3), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "truncated")
    path.write_bytes(whole + b"x")
    refused(path, "too long")


def test_foreign_and_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    filled().save(path)
    whole = bytearray(path.read_bytes())
    path.write_bytes(b"\x89PNG" + bytes(whole))
    refused(path, "not a file of a store")
    for version, age in ((1, "an older"), (3, "a newer")):
        whole[8:12] = struct.pack("<I", version)
        for size in (12, len(whole)):
            path.write_bytes(whole[:size])
            refused(path, f"of {age} release: expected format 2, got {version}")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (12, 0, "corrupt: a store cannot have the sizes it names"),  # blocks
        (12, 2**32 - 1, "corrupt: a store cannot have the sizes it names"),
        (12, 65, "corrupt: its checksum does not match"),
        (16, 0, "corrupt: a store cannot have the sizes it names"),  # bits
        (16, 24, "corrupt: its checksum does not match"),
        (16, 3, "corrupt: NgramStore: a piece of a file is not one of a store of these sizes"),
        (20, 2, "corrupt: a store cannot have the sizes it names"),  # visibility
        (20, 1, "corrupt: its checksum does not match"),
        (24, 2**30, "truncated: expected 1073741824 bytes"),
        (32, 5, "corrupt: its checksum does not match"),
        (48, 5, "corrupt: its checksum does not match"),
        (PREAMBLE, 9, "corrupt: NgramStore: a piece of a file"),
        (PREAMBLE, 2**32 - 1, "corrupt: its checksum does not match"),
        (PREAMBLE + 4 * 10, 9, "corrupt: its checksum does not match"),
        (-4, 77, "corrupt: its checksum does not match"),
    ],
)
def test_damage_is_refused(offset: int, value: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    filled().save(path)
    data = bytearray(path.read_bytes())
    at = offset % len(data)
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    refused(path, message)


def test_a_file_is_of_a_tokenizer(tmp_path: Path) -> None:
    path, ours, other = tmp_path / "store", "0f" * 16, "a0" * 16
    store = NgramStore(1, 4096, tokenizer=ours)
    store.seed = "1b" * 16
    store.warm([TEXT])
    store.save(path)
    for capacity in (4096, 8192):
        again = NgramStore.load(path, token_capacity=capacity, visibility="live", tokenizer=ours)
        assert (again.tokenizer, again.seed) == (ours, store.seed)
        assert (again.token_capacity, again.statistics.tokens_held) == (capacity, len(TEXT))
    assert store_file.describe(path).tokenizer == ours
    with pytest.raises(StoreFileError, match=f"another tokenizer: expected vocabulary {other}"):
        NgramStore.load(path, tokenizer=other)
    with pytest.raises(ValueError, match=f"merge: expected a store of vocabulary {other}"):
        NgramStore(1, 4096, tokenizer=other).merge(store)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits, got 'gpt2'"):
        NgramStore(1, 4096, tokenizer="gpt2")


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_file_without_a_digest_adopts_the_given_tokenizer(capacity: int, tmp_path: Path) -> None:
    path, given, other = tmp_path / "store", "0f" * 16, "a0" * 16
    NgramStore(1, 4096).save(path)
    again = NgramStore.load(path, token_capacity=capacity, tokenizer=given)
    assert again.tokenizer == given
    again.save(path)
    with pytest.raises(StoreFileError, match=f"expected vocabulary {other}, got {given}"):
        NgramStore.load(path, tokenizer=other)


def test_a_file_is_no_larger_than_what_it_holds(tmp_path: Path) -> None:
    store = NgramStore(1, 1 << 22)
    store.warm([np.random.default_rng(1).integers(0, 5000, 40_000)])
    store.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_size < 40_000 * (5 + 5 * 12) + 10_000


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_steps_go_on_while_a_store_is_saved(visibility: Visibility, tmp_path: Path) -> None:
    """Between any two pieces text comes in and goes: the file is sound, and has the rest."""
    store = NgramStore(3, 1 << 19, visibility=visibility)
    rng = np.random.default_rng(3)
    kept = rng.integers(50, 90, 9000).tolist()
    store.warm([rng.integers(0, 50, 1 << 18), kept], scope=5)
    pieces, requests = store._pieces, [Request(store, i, scope=i) for i in range(2)]

    def meanwhile(epoch: int) -> Iterator[bytes]:
        for piece in pieces(epoch):
            yield piece
            for request in requests:
                request.say(rng.integers(0, 50, 9000).tolist())

    store._pieces = meanwhile  # type: ignore[method-assign]
    store.save(tmp_path / "store")
    assert store.statistics.calls_busy == 0
    again = NgramStore.load(tmp_path / "store")
    again.check_integrity()
    assert again.statistics.tokens_held > 1 << 18
    request = Request(again, 0, scope=5, prompt=kept[4000:4020])
    assert request.say([kept[4020]]) == kept[4021:4025]


def test_what_is_cleared_while_a_store_is_saved_is_not_in_the_file(tmp_path: Path) -> None:
    store = NgramStore(1, 4096)
    store.warm([TEXT], scope="a")
    store.warm([[5, 6, 7]], scope="b")
    pieces = store._pieces

    def meanwhile(epoch: int) -> Iterator[bytes]:
        for number, piece in enumerate(pieces(epoch)):
            yield piece
            if number == 0 and scope_of("a") in store.scopes:
                store.clear("a")

    store._pieces = meanwhile  # type: ignore[method-assign]
    store.save(tmp_path / "store")
    again = NgramStore.load(tmp_path / "store")
    assert again.scopes == store.scopes == {scope_of("b"): 3}


def test_nor_is_what_is_cleared_when_its_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fsync = NgramStore(1, 4096), os.fsync
    store.warm([TEXT], scope="a")

    def clears(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        store.clear("a")
        fsync(file)

    monkeypatch.setattr(os, "fsync", clears)
    store.save(tmp_path / "store")
    assert NgramStore.load(tmp_path / "store").scopes == {}
    assert os.listdir(tmp_path) == ["store"]
    monkeypatch.setattr(os, "fsync", lambda file: store.clear("a"))
    with pytest.raises(RuntimeError, match="text was cleared during each of 10 tries"):
        store.save(tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]


def test_what_was_broken_when_it_was_saved_is_refused(tmp_path: Path) -> None:
    store = filled()
    store.tensor[64 + 12 + 8 * 5] = 12345  # a block's serial number
    store.save(tmp_path / "store")
    refused(tmp_path / "store", "corrupt: NgramStore: a piece of a file")


def test_more_slots_than_there_are_blocks_for(tmp_path: Path) -> None:
    filled().save(tmp_path / "store")
    for slots in (0, 17):
        with pytest.raises(ValueError, match=f"num_slots: expected 1 to 16, got {slots}"):
            NgramStore.load(tmp_path / "store", num_slots=slots)


def test_merge_is_each_text_said_again() -> None:
    """Texts of several blocks whose requests took turns, and one that lost its beginning."""
    first, second = NgramStore(4, 16384), NgramStore(2, 32768)
    texts = [np.random.default_rng(i).integers(0, 40, 700 + 90 * i).tolist() for i in range(3)]
    requests = [Request(first, i, scope=i % 2, prompt=[]) for i in range(3)]
    for at in range(0, 900, 100):
        for request, text in zip(requests, texts, strict=True):
            if text[at : at + 100]:
                request.say(text[at : at + 100])
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


def test_merge_of_what_is_left_of_a_text() -> None:
    first, second = NgramStore(1, 1024), NgramStore(1, 8192)
    text = np.random.default_rng(2).integers(0, 40, 2000).tolist()
    first.warm([text], scope="a")
    second.merge(first)
    held = second.statistics.tokens_held
    assert held == first.statistics.tokens_held + 16  # its oldest block repeats them
    expected = NgramStore(1, 8192)
    expected.warm([text[-held:]], scope="a")
    assert np.array_equal(second.tensor, expected.tensor)


def test_merge_of_new_texts_tells_scopes_apart(tmp_path: Path) -> None:
    """Equal texts of two scopes are two texts. Merging with a copy adds nothing in any scope."""
    first, second = NgramStore(2, 8192), NgramStore(2, 8192)
    for scope in (0, "a", "b", 2**62 - 1):
        first.warm([TEXT, TEXT[:9]], scope=scope)
    second.warm([TEXT], scope="a")
    second.merge(first, new_only=True)
    assert second.scopes == first.scopes == dict.fromkeys(first.scopes, len(TEXT) + 9)
    assert len(first.scopes) == 4
    assert len(second._texts()) == 8, "the text that both hold is held once"
    first.save(tmp_path / "copy")
    for other in (NgramStore.load(tmp_path / "copy"), second):
        before = first.tensor.copy()
        first.merge(other, new_only=True)
        assert np.array_equal(first.tensor, before)
