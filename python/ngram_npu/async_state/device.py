"""Contains the interface of AsyncSpecState to a device: memory, copies, streams, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu import _library

Stream = Literal["main", "side"]
"""`main` is the stream of the model, which is current when a method is called. `side` is for copies
to the host that must not delay the main stream."""

Event = Any
"""Opaque result of :meth:`Device.record`."""


class Device(Protocol):
    """The only interface between AsyncSpecState and a runtime, apart from the operators.

    Tests implement it with a device that delays its work until the host waits for it.
    """

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros on the device."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros in host memory that is pinned if the device supports it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueues a copy to, from or within the device. The source must not change meanwhile."""

    def record(self, stream: Stream) -> Event:
        """Returns an event that is set when all work enqueued on `stream` so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes work enqueued later on `stream` wait for `event`, without blocking the host."""

    def synchronize(self, event: Event) -> None:
        """Blocks the host until `event` is set."""


class CpuDevice:
    """The CPU: all work is done when a call returns."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")

    host_tensor = tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def record(self, stream: Stream) -> Event:
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def synchronize(self, event: Event) -> None:
        return None


class StreamDevice:
    """A CUDA device or an NPU; `torch.cuda` and `torch.npu` have the same stream interface."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = getattr(torch, device.type)
        self._side_stream = self._runtime.Stream(device=device)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        if stream == "main":
            target.copy_(source, non_blocking=True)
            return
        with self._runtime.stream(self._side_stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        event = self._runtime.Event()
        event.record(self._get_stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._get_stream(stream).wait_event(event)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def _get_stream(self, stream: Stream) -> Any:
        return self._side_stream if stream == "side" else self._runtime.current_stream(self._device)


def make_device(device: str | torch.device) -> Device:
    """Returns the Device for a torch device.

    Raises:
        ValueError: The device is not cpu, cuda or npu, or its backend cannot run.
    """
    # Without torch_npu, torch.device does not know the name npu.
    device_type = device.partition(":")[0] if isinstance(device, str) else device.type
    backend = _library.backends().get(device_type)
    if backend is None:
        raise ValueError(f"AsyncSpecState: device: expected cpu, cuda or npu, got {device}")
    if backend.reason:
        raise ValueError(
            f"AsyncSpecState: device: expected a device with a usable backend, got {device}: "
            f"{backend.reason}"
        )
    torch_device = torch.device(device)
    return CpuDevice() if torch_device.type == "cpu" else StreamDevice(torch_device)


class HostBuffer:
    """A flat int32 host buffer for transfers, growing on demand."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self.tensor = self._device.host_tensor((size,), torch.int32)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()

    def reserve(self, size: int) -> None:
        """Grows the buffer, which no copy may be using, to `size` elements. Its contents are
        lost."""
        if size > len(self.array):
            self._allocate(max(size, 2 * len(self.array)))


class Download:
    """Copies of device tensors to the host on the side stream."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._device = device
        self._buffers = [HostBuffer(device, size) for size in sizes]
        self._sources: Sequence[torch.Tensor] = ()
        self.event: Event = None

    def start(self, sources: Sequence[torch.Tensor]) -> None:
        """Enqueues copies of `sources` after all work enqueued so far."""
        # The tensors are referenced until the next start. Otherwise the allocator could reuse their
        # memory while the side stream still reads it.
        self._sources = sources
        device = self._device
        device.wait("side", device.record("main"))
        for buffer, source in zip(self._buffers, sources, strict=True):
            target = buffer.tensor[: source.numel()].view(source.shape)
            device.copy(target, source, "side")
        self.event = device.record("side")

    def finish(self) -> list[npt.NDArray[np.int32]]:
        """Waits for the copies. The returned arrays are valid until the next `start`."""
        self._device.synchronize(self.event)
        return [
            buffer.array[: source.numel()].reshape(source.shape)
            for buffer, source in zip(self._buffers, self._sources, strict=True)
        ]
