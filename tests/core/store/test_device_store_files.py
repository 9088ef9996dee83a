"""Text that enters and leaves a device store other than by steps: warm, merge, files, and clears
while the store is being saved."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core.store.device_steps import MAX_NEW, Requests, new_drafts, run_step
from ngram_npu import NgramStore, scope_of
from ngram_npu.store import Scope, device_store
from ngram_npu.store.device_store import CpuStreams, CudaStreams, DeviceStore
from torch.utils._python_dispatch import TorchDispatchMode

TEXTS = {0: [[5, 6, 7], list(range(100, 900))], scope_of("tenant"): [[1, 2, 3, 4]]}


def make_store(token_capacity: int = 4096) -> DeviceStore:
    return DeviceStore(6, token_capacity, max_batch=8)


def fill_store(store: DeviceStore | NgramStore) -> None:
    for scope, texts in TEXTS.items():
        store.warm(texts, scope=scope)


def read_store(store: DeviceStore | NgramStore) -> list[tuple[int, list[int]]]:
    return [(scope, text.tolist()) for scope, text in store.texts()]


EXPECTED = [(scope, text) for scope, texts in TEXTS.items() for text in texts]


def test_warmed_texts_are_drafted_within_their_scope_only() -> None:
    store = make_store()
    fill_store(store)
    store.check_integrity()
    assert read_store(store) == EXPECTED
    assert store.scopes == {0: 803, scope_of("tenant"): 4}
    statistics = store.statistics
    assert (statistics.tokens_held, statistics.blocks_in_use) == (807, 1 + 4 + 1)
    row = torch.tensor([[300, 301, 302], [1, 2, 3]], dtype=torch.int32)
    lengths, sampled = torch.full((2, 2), 3, dtype=torch.int32)
    for scope, counts in ((0, [6, 0]), (scope_of("tenant"), [0, 1])):
        drafts = new_drafts(2)
        store.propose(row, lengths, sampled, scopes=torch.tensor([scope] * 2), **drafts)
        assert drafts["num_draft_tokens"].tolist() == counts


def test_text_longer_than_the_ring_keeps_its_newest_blocks() -> None:
    store = make_store(4 * 256)
    store.warm([list(range(5000))])
    store.check_integrity()
    ((_, text),) = read_store(store)
    assert text == list(range(5000))[-len(text) :]
    assert len(text) > 3 * 256


def test_warmed_text_does_not_continue_the_text_before() -> None:
    """The second text contains the first one, so that the slot could mistake it for its request."""
    store = make_store()
    store.warm([list(range(20)), list(range(30))])
    assert [text for _, text in read_store(store)] == [list(range(20)), list(range(30))]


def test_saved_file_has_the_text_of_a_host_store(tmp_path: Path) -> None:
    digest = "ab" * 16
    store = DeviceStore(6, 4096, max_batch=8, tokenizer=digest)
    store.seed = "cd" * 16
    fill_store(store)
    store.save(tmp_path / "store")
    loaded = NgramStore.load(tmp_path / "store", tokenizer=digest)
    assert read_store(loaded) == EXPECTED
    assert (loaded.tokenizer, loaded.seed) == (digest, "cd" * 16)
    loaded.check_integrity()
    merged = make_store()
    merged.merge(loaded)
    assert read_store(merged) == EXPECTED


@pytest.mark.parametrize("length", [1, 497, 512, 768, 4096])
def test_full_store_is_saved_completely(tmp_path: Path, length: int) -> None:
    """Texts of 497 tokens need two blocks on the device and three in the file."""
    store = make_store(64 * 256)
    num_texts = 80 * 256 // max(length, 256)
    store.warm(np.arange(num_texts * length).reshape(num_texts, length).astype(np.int32))
    store.save(tmp_path / "store")
    assert read_store(NgramStore.load(tmp_path / "store")) == read_store(store)


class LateStreams(CpuStreams):
    """Calls ``change`` between the copy on the device and the copy to the host."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def read(self, snapshot: tuple[torch.Tensor, ...], mark: None) -> list[Any]:
        self.change()
        return super().read(snapshot, mark)


def test_save_during_overwriting_steps_writes_one_state(tmp_path: Path) -> None:
    """A copy of the live ring would contain blocks of the state before and after the steps."""
    store, requests = make_store(4 * 256), Requests(3)
    for _ in range(30):
        run_step(store, requests, requests.next_step())
    expected = read_store(store)

    def overwrite() -> None:
        for _ in range(30):
            run_step(store, requests, requests.next_step())

    store._streams = LateStreams(overwrite)
    store.save(tmp_path / "store")
    assert read_store(NgramStore.load(tmp_path / "store")) == expected
    assert read_store(store) != expected


def test_cleared_text_is_neither_saved_nor_left_in_memory(tmp_path: Path) -> None:
    store = make_store()
    fill_store(store)
    clears = [Scope(0)]
    write = NgramStore.write_new_file

    def clear_while_writing(copy: NgramStore, path: Any) -> Any:
        if clears:
            store.clear(clears.pop())
        return write(copy, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramStore, "write_new_file", clear_while_writing)
        store.save(tmp_path / "store")
    assert read_store(NgramStore.load(tmp_path / "store")) == EXPECTED[-1:]
    store.clear("tenant")
    tensors = (store.text, store.blocks, *store._snapshot)
    assert not any(tensor.any() for tensor in tensors)


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


@pytest.mark.parametrize("is_announced", [True, False])
def test_slot_of_an_announced_request_stores_no_prompt(is_announced: bool) -> None:
    """The prompt of the second request is the text of the first one and two tokens more."""
    store, row = make_store(), torch.arange(31, dtype=torch.int32)[None]
    counts = torch.tensor([[28], [20], [31], [1]], dtype=torch.int32)
    store.begin_step(1, MAX_NEW)
    store.append(row, counts[0], counts[1], max_new=MAX_NEW, hold_back=False)
    if is_announced:
        store.begin_request(0)
    store.begin_step(1, MAX_NEW)
    store.append(row, counts[2], counts[3], max_new=MAX_NEW, hold_back=True)
    stored = [token for _, text in read_store(store) for token in text]
    assert stored == [*range(8, 28)] + ([] if is_announced else [28, 29])


class _DeferOperators(TorchDispatchMode):
    """Keeps the operators of a stream until it is synchronized."""

    def __init__(self, tasks: list[Callable[[], object]]) -> None:
        super().__init__()
        self._tasks = tasks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tasks.append(functools.partial(func, *args, **(kwargs or {})))
        return args[0]


class FakeCuda:
    """Stands in for ``torch.cuda``. The stream of the steps works within the calls, a second stream
    as late as possible: when the host waits for it. It must wait for the steps before."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []
        self.has_waited = False
        self.steps = SimpleNamespace(record_event=object, context=nullcontext)
        self.copies = SimpleNamespace(
            wait_event=lambda event: setattr(self, "has_waited", True),
            record_event=lambda: SimpleNamespace(query=self._run_copies),
            context=lambda: _DeferOperators(self.tasks),
        )
        self.hangs = False

    def current_stream(self, device: Any) -> Any:
        return self.steps

    def Stream(self, device: Any) -> Any:  # noqa: N802
        return self.copies

    def stream(self, stream: Any) -> Any:
        return stream.context()

    def _run_copies(self) -> bool:
        assert self.has_waited, "the copies may run before the steps"
        while self.tasks and not self.hangs:
            self.tasks.pop(0)()
        return not self.hangs


def test_cuda_copies_follow_the_steps_and_are_complete_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda()

    def zeros_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        assert (device, pin_memory) == ("cpu", True)
        return torch.zeros_like(tensor)

    fake_torch = SimpleNamespace(cuda=fake, zeros_like=zeros_like)
    monkeypatch.setattr(device_store, "torch", fake_torch)
    snapshot = (torch.arange(4, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    streams = CudaStreams(torch.device("cpu"), snapshot)
    for _ in range(2):
        for tensor in snapshot:
            tensor.fill_(7)
        streams.use_current_stream_for_steps()
        with streams.use_step_stream():
            snapshot[1][0] += 1
        arrays = streams.read(snapshot, streams.mark())
        assert [array.tolist() for array in arrays] == [[7] * 4, [8, 7]]
        assert not any(tensor.any() for tensor in (*snapshot, *streams._host))
    assert len(streams.read(snapshot[:1], streams.mark())) == 1
    fake.hangs = True
    monkeypatch.setattr(device_store, "_TIMEOUT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"did not finish its steps within 0\.01 s"):
        streams.read(snapshot, streams.mark())


class RecordingStreams(CpuStreams):
    """Counts the operators that run outside of the stream of the steps."""

    def __init__(self) -> None:
        self.num_steps = self.num_outside = self._depth = 0

    def use_current_stream_for_steps(self) -> None:
        self.num_steps += 1

    @contextmanager
    def use_step_stream(self) -> Iterator[None]:
        self._depth += 1
        yield
        self._depth -= 1

    def read(self, snapshot: tuple[torch.Tensor, ...], mark: None) -> list[Any]:
        with self.use_step_stream():  # in place of the second stream
            return super().read(snapshot, mark)

    def record(self) -> TorchDispatchMode:
        streams = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                streams.num_outside += streams._depth == 0
                return func(*args, **(kwargs or {}))

        return Mode()


def test_changes_and_copies_run_in_the_stream_of_the_steps(tmp_path: Path) -> None:
    store, requests = make_store(), Requests(6)
    store._streams = streams = RecordingStreams()
    run_step(store, requests, requests.next_step())
    assert streams.num_steps == 1
    calls: list[Callable[[], object]] = [
        lambda: fill_store(store),
        lambda: store.clear("tenant"),
        store.clear,
        lambda: store.save(tmp_path / "store"),
        lambda: store.scopes,
    ]
    for call in calls:
        with streams.record():
            call()
    assert streams.num_outside == 0


def test_steps_continue_and_clear_waits_while_text_is_copied_to_the_host() -> None:
    store, requests = make_store(), Requests(7)
    is_reading, may_read = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert may_read.wait(30)

    store._streams = LateStreams(wait)
    reader = threading.Thread(target=store.texts)
    reader.start()
    assert is_reading.wait(30)
    run_step(store, requests, requests.next_step())
    clearer = threading.Thread(target=store.clear)
    clearer.start()
    clearer.join(0.05)
    assert clearer.is_alive()
    may_read.set()
    reader.join(30)
    clearer.join(30)
    assert not clearer.is_alive()


def test_text_before_a_clear_does_not_return_with_the_next_step() -> None:
    """The tokens of the newest step, which are held back, are of the cleared text too."""
    store, row = make_store(), torch.arange(40, dtype=torch.int32)[None]
    for end, count in ((10, 4), (14, 4)):
        store.begin_step(1, MAX_NEW)
        lengths = torch.tensor([[end], [count]], dtype=torch.int32)
        store.append(row, *lengths, max_new=MAX_NEW)
    store.clear(Scope(0))
    for end, count in ((15, 1), (16, 1)):
        store.begin_step(1, MAX_NEW)
        lengths = torch.tensor([[end], [count]], dtype=torch.int32)
        store.append(row, *lengths, max_new=MAX_NEW)
    assert read_store(store) == [(0, [14])]
