"""Tests that nothing of ngram_npu runs beside the capture of a CUDA graph. vLLM captures in global
mode, in which a call of CUDA's runtime by another thread invalidates the capture."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import STORE, V2, WORDS, K, Request, make_scheduler_output
from ngram_npu.engines.vllm import saving
from ngram_npu.engines.vllm.stats import DeviceStats
from ngram_npu.store import memory
from ngram_npu.store import store as store_module


class Device:
    """Stands in for a CUDA device: while a graph is captured, a call by another thread fails."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.calling_threads: set[int] = set()
        self._capturing_thread: int | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._capturing_thread = threading.get_ident()
        yield
        self._capturing_thread = None

    def note_call(self, name: str) -> None:
        thread = threading.get_ident()
        self.calling_threads.add(thread)
        if self._capturing_thread not in (None, thread):
            self.errors.append(f"{name} in {threading.current_thread().name}")
            raise RuntimeError("operation not permitted when stream is capturing")

    # The functions of torch.cuda that ngram_npu calls.

    def current_stream(self, device: Any) -> Any:
        self.note_call("current_stream")
        return None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.note_call("stream")
        yield

    def Event(self) -> Any:  # noqa: N802
        self.note_call("Event")

        def query() -> bool:
            self.note_call("query")
            return True

        return SimpleNamespace(record=lambda: self.note_call("record"), query=query)


DEVICE = Device()


class DeviceTensor(torch.Tensor):
    """A tensor of the device: each of torch's functions and operators is a call of its runtime."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        DEVICE.note_call(str(func))
        return super().__torch_function__(func, types, args, kwargs)


class Memory(memory.DeviceMemory):
    def zeros(self, *shape: int) -> Any:
        return super().zeros(*shape).as_subclass(DeviceTensor)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes stores and counts use the device, and all intervals short."""
    device = Device()
    monkeypatch.setitem(globals(), "DEVICE", device)
    zeros_like = torch.zeros_like

    def zeros_like_unpinned(tensor: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros_like(tensor.as_subclass(torch.Tensor), **options)

    def make_memory(_: Any) -> tuple[Memory, torch.device]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cpu", device)
            return Memory(torch.device("cpu")), torch.device("cpu")

    monkeypatch.setattr(torch, "zeros_like", zeros_like_unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(store_module, "_make_memory", make_memory)
    for name in ("BUSY_SAVE_S", "IDLE_SAVE_S", "PAUSE_PER_SAVE"):
        monkeypatch.setattr(saving, name, 0)
    monkeypatch.setattr(saving, "POLL_S", 0.001)
    return device


def start_engine(device: Device, path: Path) -> V2:
    engine = V2(**STORE, store_file=str(path), metrics=True)
    stats: Any = engine.drafter.stats
    assert isinstance(stats, DeviceStats)
    stats._on_host, stats._runtime = False, device
    return engine


def run_requests(engine: V2, name: str) -> None:
    """Runs a request, and what vLLM schedules after it has ended."""
    engine.begin(Request(name, [1], "owner"))
    for begin in range(0, len(WORDS), K):
        engine.step({name: WORDS[begin : begin + K]})
    engine.end(name)
    engine.add_requests(make_scheduler_output())


def test_no_other_thread_calls_the_device_during_a_start_up(device: Device, tmp_path: Path) -> None:
    """vLLM runs dummy batches and warms up its kernels with requests before it captures graphs."""
    path = tmp_path / "store"
    engine = start_engine(device, path)
    num_threads = threading.active_count()
    rows = [0]
    engine.propose(rows, {"dummy": [1]}, dummy_run=True)
    assert threading.active_count() == num_threads, "expected no thread before the first step"
    run_requests(engine, "_warmup_0_")
    for _ in range(3):
        with device.capture():
            engine.propose(rows, {"dummy": [1]}, dummy_run=True)
            time.sleep(0.1)  # lets other threads run
        run_requests(engine, "request")
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert device.errors == []
    assert device.calling_threads == {threading.get_ident()}


def test_thread_that_calls_the_device_during_a_capture_is_detected(
    device: Device, tmp_path: Path
) -> None:
    engine = start_engine(device, tmp_path / "store")
    for call in (lambda: engine.store.statistics, lambda: engine.store.save(tmp_path / "other")):
        with device.capture():
            thread = threading.Thread(target=_suppress_errors, args=(call,))
            thread.start()
            thread.join()
        assert device.errors.pop()
    with device.capture():
        assert engine.store.statistics.tokens_held == 0


def _suppress_errors(call: Any) -> None:
    with contextlib.suppress(RuntimeError):
        call()
