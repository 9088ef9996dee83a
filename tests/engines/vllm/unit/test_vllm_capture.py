"""Tests that nothing of ngram_npu runs beside the capture of a CUDA graph. vLLM captures in global
mode, in which a call of CUDA's runtime by another thread invalidates the capture."""

from __future__ import annotations

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
    """Stands in for ``torch.cuda``, with the functions of it that ngram_npu calls. Records the
    threads that call it."""

    def __init__(self) -> None:
        self.calling_threads: set[int] = set()

    def note_call(self) -> None:
        self.calling_threads.add(threading.get_ident())

    def current_stream(self, device: Any) -> Any:
        self.note_call()
        return None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.note_call()
        yield

    def Event(self) -> Any:  # noqa: N802
        self.note_call()

        def query() -> bool:
            self.note_call()
            return True

        return SimpleNamespace(record=self.note_call, query=query)


DEVICE = Device()


class DeviceTensor(torch.Tensor):
    """A tensor of the device: each of torch's functions and operators is a call of its runtime."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        DEVICE.note_call()
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


def run_requests(engine: V2, name: str) -> None:
    """Runs a request, and what vLLM schedules after it has ended."""
    engine.begin(Request(name, [1], "owner"))
    for begin in range(0, len(WORDS), K):
        engine.step({name: WORDS[begin : begin + K]})
    engine.end(name)
    engine.add_requests(make_scheduler_output())


def test_only_the_thread_of_the_steps_calls_the_device(device: Device, tmp_path: Path) -> None:
    """vLLM runs dummy batches and warms up its kernels with requests before it captures graphs."""
    path = tmp_path / "store"
    engine = V2(**STORE, store_file=str(path), metrics=True)
    stats: Any = engine.drafter.stats
    assert isinstance(stats, DeviceStats)
    stats._on_host, stats._runtime = False, device
    num_threads = threading.active_count()
    engine.propose([0], {"dummy": [1]}, dummy_run=True)
    assert threading.active_count() == num_threads, "expected no thread before the first step"
    for name in ("_warmup_0_", "a", "b", "c"):
        run_requests(engine, name)
        engine.propose([0], {"dummy": [1]}, dummy_run=True)
        time.sleep(0.1)  # lets other threads run
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert threading.active_count() > num_threads
    assert device.calling_threads == {threading.get_ident()}
