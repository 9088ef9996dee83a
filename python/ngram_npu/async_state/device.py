"""The device interface of AsyncSpecState besides the operators: memory, copies, two streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from ngram_npu.config import NgramConfig
from ngram_npu.host_drafting import CallingThread, current_stream
from ngram_npu.host_drafting import Stream as Jobs
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.store import NgramStore, make_store

Stream = Literal["main", "side"]
"""`main` is the stream the model runs on, current when a method is called; `side` is for copies
to the host, which nothing on the main stream should wait for."""

Event = Any
"""Opaque: the result of :meth:`Device.record`."""


class Device(Protocol):
    """The only interface between the pipeline and a runtime. Tests use a *late* device, which runs
    work only when the host waits for it."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in memory that the device copies from and to without the host's help."""

    def index(self, ngram: NgramConfig, num_slots: int, token_capacity: int) -> NgramIndex:
        """An empty index on the device for the settings ``ngram``.

        Raises:
            ValueError: the device does not support an index, or not one of these sizes.
        """

    def store(self, ngram: NgramConfig, num_slots: int) -> NgramStore:
        """An empty store for the settings ``ngram``.

        Raises:
            ValueError: the device does not support a store, or ``store_tokens`` are too few.
        """

    def jobs(self) -> Jobs:
        """What runs jobs on the host in the order of the main stream.

        Raises:
            RuntimeError: jobs cannot run on this device.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueues a copy between a host and a device tensor, which must not change before it."""

    def record(self, stream: Stream) -> Event:
        """An event that happens when all work enqueued on `stream` so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Lets work enqueued later on `stream` wait for `event`; the host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Blocks the host until `event` has happened."""


class CpuDevice:
    """The host as its own device: all work is done when the call returns."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")

    host_tensor = tensor

    def index(self, ngram: NgramConfig, num_slots: int, token_capacity: int) -> NgramIndex:
        return make_index(ngram, num_slots, token_capacity, kind="torch")

    def store(self, ngram: NgramConfig, num_slots: int) -> NgramStore:
        return make_store(ngram, num_slots, kind="torch")

    def jobs(self) -> Jobs:
        return CallingThread()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def record(self, stream: Stream) -> Event:
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def synchronize(self, event: Event) -> None:
        return None


class StreamDevice:
    """CUDA and NPU: `torch.cuda` and `torch.npu` have the same streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = getattr(torch, device.type)
        self._side = self._runtime.Stream(device=device)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def index(self, ngram: NgramConfig, num_slots: int, token_capacity: int) -> NgramIndex:
        option = "NgramConfig: sizes: expected 'consecutive'"
        if not ngram.is_ladder:
            option = "AsyncConfig: engine: expected 'auto' or 'scan'"
        raise ValueError(
            f"{option} on {self._device.type}: the index is in host memory; with draft_on='host' "
            "it is used from there"
        )

    def store(self, ngram: NgramConfig, num_slots: int) -> NgramStore:
        raise ValueError(
            f"AsyncConfig: draft_on: expected 'auto' or 'host' for a store on {self._device.type}"
        )

    def jobs(self) -> Jobs:
        return current_stream(self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        if stream == "main":
            target.copy_(source, non_blocking=True)
            return
        with self._runtime.stream(self._side):
            target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        event = self._runtime.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._stream(stream).wait_event(event)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def _stream(self, stream: Stream) -> Any:
        return self._side if stream == "side" else self._runtime.current_stream(self._device)


def device_for(device: str | torch.device) -> Device:
    """The Device of a torch device.

    Raises:
        ValueError: a device other than cpu, cuda or npu.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return CpuDevice()
    if found.type in ("cuda", "npu"):
        return StreamDevice(found)
    raise ValueError(f"AsyncSpecState: device: expected cpu, cuda or npu, got {found}")
