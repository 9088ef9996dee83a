"""Tests that stores are saved and loaded, that files are replaced completely or not at all, and
that the copies for them are made between steps."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ngram_npu.store.store as store_module
import numpy as np
import pytest
import torch
from core.store.test_store import EXPECTED, fill_store, make_store, read_store
from ngram_npu import NgramStore, Scope, StoreFileError
from ngram_npu.store import file as store_file
from ngram_npu.store.memory import DeviceMemory, HostMemory
from store_integrity import check_integrity
from store_steps import generate_steps, run_step
from torch.utils._python_dispatch import TorchDispatchMode

HEADER_BYTES = 72 + 32  # including the checksum
DIGEST, SEED = "ab" * 16, "cd" * 16


def test_loaded_store_equals_saved_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = fill_store(make_store(tokenizer=DIGEST))
    store.seed = SEED
    store.save(path)
    loaded = NgramStore.load(path, tokenizer=DIGEST)
    for name in ("text", "blocks", "table", "allocator"):
        assert np.array_equal(getattr(loaded, name), getattr(store, name)), name
    description = store_file.describe(path)
    assert (loaded.tokenizer, loaded.seed) == (DIGEST, SEED)
    assert (loaded.checksum, loaded.capacity) == (description.checksum, store.capacity)
    assert (description.num_texts, description.num_tokens) == (3, 807)
    assert path.stat().st_size == HEADER_BYTES + 3 * 12 + 807 * 4
    make_store().save(tmp_path / "empty")
    assert read_store(NgramStore.load(tmp_path / "empty")) == []
    smaller = NgramStore.load(path, tokens=512)
    assert smaller.capacity == 512
    assert read_store(smaller)[-1] == EXPECTED[-1]


@pytest.mark.parametrize("num_blocks", [2, 3, 64])
@pytest.mark.parametrize("length", [1, 256, 497, 768, 4096])
def test_full_store_is_saved_completely(tmp_path: Path, num_blocks: int, length: int) -> None:
    store = make_store(num_blocks)
    num_texts = 80 * 256 // max(length, 256)
    store.warm(np.arange(num_texts * length).reshape(num_texts, length))
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store")
    assert read_store(loaded) == read_store(store)
    check_integrity(loaded)


def test_save_to_link_replaces_its_target_by_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "store"
    path.parent.mkdir()
    path.write_bytes(b"old")
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    make_store().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["store"]


def test_failed_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_store().save(tmp_path / "none" / "store")
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        make_store().save(tmp_path / "folder")
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
store = NgramStore(4096)
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


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_save_keeps_the_temporary_file_of_a_concurrent_save(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save waits before it writes to the disk, or before it replaces the path."""
    path, call = tmp_path / "store", getattr(os, function)
    is_waiting, may_continue = threading.Event(), threading.Event()
    slow_store, quick_store = make_store(4), make_store(8)
    save_thread = threading.Thread(target=slow_store.save, args=(path,))

    def wait_then_call(*arguments: Any) -> None:
        if threading.current_thread() is save_thread and not may_continue.is_set():
            is_waiting.set()
            assert may_continue.wait(60)
        call(*arguments)

    monkeypatch.setattr(os, function, wait_then_call)
    save_thread.start()
    assert is_waiting.wait(60)
    (temporary_file,) = os.listdir(tmp_path)
    quick_store.save(path)
    assert set(os.listdir(tmp_path)) == {"store", temporary_file}
    may_continue.set()
    save_thread.join()
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).capacity == 1024


def test_temporary_file_removed_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "store", fcntl.flock
    first_store, second_store = make_store(4), make_store(8)

    def save_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        second_store.save(path)
        assert os.listdir(tmp_path) == ["store"]
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", save_then_lock)
    first_store.save(path)
    assert os.listdir(tmp_path) == ["store"]
    assert NgramStore.load(path).capacity == 1024


def test_save_removes_only_its_own_temporary_files(tmp_path: Path) -> None:
    """A pipe or a folder may have the name of a temporary file."""
    code = "0123456789abcdef"
    other_names = {f".{name}.{code}.tmp" for name in ("other", "stores", "s+ore")}
    other_names |= {f"store.{code}.tmp", f".store.{code[1:]}.tmp", f".store.{code}.tmp2"}
    for name in (*other_names, f".s.ore.{code}.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f".s.ore.{code[::-1]}.tmp").mkdir()
    os.mkfifo(tmp_path / f".s.ore.{code[1:]}0.tmp")
    make_store().save(tmp_path / "s.ore")
    assert set(os.listdir(tmp_path)) == other_names | {"s.ore", f".s.ore.{code[::-1]}.tmp"}


# Files that cannot be used.


def check_file_is_rejected(path: Path, message: str) -> None:
    with pytest.raises(StoreFileError, match=message) as error:
        NgramStore.load(path)
    assert str(path) in str(error.value)


@pytest.fixture
def saved_path(tmp_path: Path) -> Path:
    fill_store(make_store(tokenizer=DIGEST)).save(tmp_path / "store")
    return tmp_path / "store"


def test_truncated_file_is_rejected(saved_path: Path) -> None:
    content = saved_path.read_bytes()
    saved_path.write_bytes(b"")
    check_file_is_rejected(saved_path, "not a store file")
    for size in (*range(1, HEADER_BYTES + 3), len(content) // 2, len(content) - 1):
        saved_path.write_bytes(content[:size])
        check_file_is_rejected(saved_path, "truncated")
    saved_path.write_bytes(content + b"x")
    check_file_is_rejected(saved_path, "too long")


def test_file_of_another_format_or_version_is_rejected(saved_path: Path) -> None:
    content = bytearray(saved_path.read_bytes())
    saved_path.write_bytes(b"\x89PNG" + bytes(content))
    check_file_is_rejected(saved_path, "not a store file")
    advices = {2: "make the file again with `ngram-npu learn`", 4: "update ngram_npu"}
    for version, advice in advices.items():
        content[8:12] = struct.pack("<I", version)
        for size in (12, len(content)):
            saved_path.write_bytes(content[:size])
            message = f"expected a file of format 3, got format {version}; {advice}$"
            check_file_is_rejected(saved_path, message)


def test_damaged_file_is_rejected_before_memory_is_allocated(
    saved_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit in the header or in the first texts. Reading must need little memory, even if
    the sizes in the header are large."""
    content, rng = saved_path.read_bytes(), random.Random(1)
    monkeypatch.setattr(NgramStore, "__init__", None)
    for position in (*range(8 * HEADER_BYTES), *rng.choices(range(8 * len(content)), k=200)):
        data = bytearray(content)
        data[position // 8] ^= 1 << position % 8
        saved_path.write_bytes(data)
        check_file_is_rejected(
            saved_path, "not a store file|truncated|too long|of format|corrupt: its checksum"
        )


def test_file_of_another_tokenizer_is_rejected(saved_path: Path) -> None:
    with pytest.raises(StoreFileError, match=f"of another tokenizer: expected vocabulary {SEED}"):
        NgramStore.load(saved_path, tokenizer=SEED)
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits, got 'gpt2'"):
        make_store(tokenizer="gpt2")
    make_store().save(saved_path)
    assert NgramStore.load(saved_path, tokenizer=SEED).tokenizer == SEED


# Text that is removed during a save.


@pytest.mark.parametrize(
    "remove", [lambda store: store.clear(Scope(0)), lambda store: store.mark_update(1)]
)
def test_text_removed_before_the_file_is_replaced_is_not_saved(
    remove: Callable[[NgramStore], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fsync = fill_store(make_store()), os.fsync

    def remove_then_sync(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        remove(store)
        fsync(file)

    monkeypatch.setattr(os, "fsync", remove_then_sync)
    store.save(tmp_path / "store")
    assert read_store(NgramStore.load(tmp_path / "store")) == read_store(store) != EXPECTED
    assert os.listdir(tmp_path) == ["store"]
    monkeypatch.setattr(os, "fsync", lambda file: remove(store))
    with pytest.raises(RuntimeError, match="text was cleared during each of 10 attempts"):
        store.save(tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]


# Copies between steps.


def test_steps_continue_and_clear_waits_while_text_is_copied_to_the_host() -> None:
    store, steps = make_store(), generate_steps(7)
    is_reading, may_read = threading.Event(), threading.Event()

    class LateMemory(HostMemory):
        """Has no copy until the test allows it."""

        def take_copy(self) -> list[Any] | None:
            if not may_read.is_set():
                is_reading.set()
                return None
            return super().take_copy()

    store._memory = LateMemory()
    reader = threading.Thread(target=store.texts)
    reader.start()
    assert is_reading.wait(30)
    run_step(store, next(steps))
    clearer = threading.Thread(target=store.clear)
    clearer.start()
    clearer.join(0.05)
    assert clearer.is_alive()
    may_read.set()
    reader.join(30)
    clearer.join(30)
    assert not clearer.is_alive()


class FakeRuntime:
    """Stands in for ``torch.cuda``. Work in the stream of the steps runs within the calls, except
    copies to pinned memory: one runs whenever the host sleeps."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.num_steps = self.depth = 0
        self.hangs = False

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.depth += 1
        with _DeferCopies(self.copies):
            yield
        self.depth -= 1

    def current_stream(self, device: Any) -> Any:
        self.num_steps += 1
        return "steps"

    def sleep(self, seconds: float) -> None:
        if self.copies and not self.hangs:
            self.copies.pop(0)()


class _DeferCopies(TorchDispatchMode):
    """Keeps the copies that do not block, with the values that their sources have now."""

    def __init__(self, copies: list[Callable[[], object]]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, *rest = args
        if func is torch.ops.aten.copy_.default and True in (*rest[1:], *(kwargs or {}).values()):
            value = rest[0].clone()
            self._copies.append(lambda: target.copy_(value))
            return target
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_store(monkeypatch: pytest.MonkeyPatch) -> tuple[NgramStore, FakeRuntime]:
    """A store on torch's CPU device that works as on a device with streams."""
    runtime, zeros_like = FakeRuntime(), torch.zeros_like

    def make_memory(device: Any) -> tuple[DeviceMemory, torch.device]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cpu", runtime)
            return DeviceMemory(torch.device("cpu")), torch.device("cpu")

    def zeros_like_unpinned(tensor: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert pin_memory == bool(options)
        return zeros_like(tensor, **options)

    monkeypatch.setattr(torch, "zeros_like", zeros_like_unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    clock = SimpleNamespace(sleep=runtime.sleep, monotonic=time.monotonic)
    monkeypatch.setattr(store_module, "time", clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngram_npu.store.store._make_memory", make_memory)
        return make_store(device="fake"), runtime


def test_store_on_device_equals_store_on_host(
    device_store: tuple[NgramStore, FakeRuntime], tmp_path: Path
) -> None:
    store, _ = device_store
    host_store = make_store()
    for _, rows in zip(range(30), generate_steps(2), strict=False):
        run_step(store, rows, torch.from_numpy)
        run_step(host_store, rows)
    assert read_store(store) == read_store(host_store)
    changes: list[Callable[[NgramStore], object]] = [
        fill_store,
        lambda s: s.clear("a"),
        lambda s: s.mark_update(2),
        lambda s: s._renumber(),
        lambda s: s.merge(fill_store(NgramStore(1024))),
        lambda s: s.reserve_slots(9),
        lambda s: s.mark_update(2),
        lambda s: s.save(tmp_path / str(s.device == "cpu")),
    ]
    for change in changes:
        for each in (store, host_store):
            change(each)
            check_integrity(each)
        for name in ("slots", "text", "blocks", "table", "allocator"):
            assert np.array_equal(getattr(store, name), getattr(host_store, name)), name
    assert store.scopes == host_store.scopes
    with pytest.raises(ValueError, match="NgramStore: expected tensors on cpu, got arrays"):
        run_step(store, next(generate_steps(2)))


def test_changes_and_copies_run_in_the_stream_of_the_steps(
    device_store: tuple[NgramStore, FakeRuntime], tmp_path: Path
) -> None:
    store, runtime = device_store
    num_outside = 0

    class CountOperatorsOutside(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal num_outside
            num_outside += runtime.depth == 0
            return func(*args, **(kwargs or {}))

    num_steps = runtime.num_steps
    run_step(store, next(generate_steps(6)), torch.from_numpy)
    assert runtime.num_steps == num_steps + 1
    calls: list[Callable[[], object]] = [
        lambda: fill_store(store),
        lambda: store.clear("tenant"),
        lambda: store.mark_update(1),
        store.clear,
    ]
    for call in calls:
        with CountOperatorsOutside():
            call()
    assert num_outside == 0


def test_copies_of_the_text_are_complete_and_zeroed(
    device_store: tuple[NgramStore, FakeRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runtime = device_store
    fill_store(store)
    for _ in range(2):
        assert read_store(store) == EXPECTED
        assert store.statistics.tokens_held == 807
        memory: Any = store._memory
        assert not any(tensor.any() for tensor in memory._host)
    runtime.hangs = True
    monkeypatch.setattr(store_module, "_COPY_TIMEOUT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"did not finish its steps within 0\.01 s"):
        store.texts()


def test_started_copy_is_taken_once_it_is_complete_and_saved(
    device_store: tuple[NgramStore, FakeRuntime], tmp_path: Path
) -> None:
    store, runtime = device_store
    fill_store(store)
    assert store.take_copy() is None, "expected none before one is started"
    store.start_copy()
    fill_store(store)  # does not change the copy
    num_copies = len(runtime.copies)
    for _ in range(num_copies):
        assert store.take_copy() is None
        runtime.sleep(0)
    copy = store.take_copy()
    assert copy is not None
    assert copy.tokens_held == 807
    assert store.take_copy() is None, "expected that a copy is taken only once"
    assert store.save_copy(tmp_path / "store", copy)
    assert read_store(NgramStore.load(tmp_path / "store")) == EXPECTED
    assert not any(tensor.any() for tensor in store._memory._host)  # type: ignore[attr-defined]


@pytest.mark.parametrize("remove", [lambda s: s.clear(Scope(0)), lambda s: s.mark_update(1)])
def test_clear_removes_text_from_a_copy_that_was_not_taken(
    device_store: tuple[NgramStore, FakeRuntime], remove: Callable[[NgramStore], None]
) -> None:
    store, runtime = device_store
    fill_store(store)
    for is_copied in (False, True):
        store.start_copy()
        for _ in range(len(runtime.copies) * is_copied):
            runtime.sleep(0)
        remove(store)
        store.start_copy(heads_only=True)
        while runtime.copies:
            runtime.sleep(0)
        copy = store.take_copy()
        assert copy is not None
        texts = [(scope, text.tolist()) for scope, text in copy.texts()]
        assert texts == read_store(store) != EXPECTED
        fill_store(store)


def test_copy_from_before_a_clear_is_not_saved(tmp_path: Path) -> None:
    store = fill_store(make_store())
    store.start_copy()
    copy = store.take_copy()
    assert copy is not None
    store.clear(Scope(0))
    assert not store.save_copy(tmp_path / "store", copy)
    assert os.listdir(tmp_path) == []
