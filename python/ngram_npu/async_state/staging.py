"""Buffers between host and device that the slower side may still be using."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.async_state.device import Device, Event


class HostBuffer:
    """A flat host buffer that the device copies from or to, of int32, growing on demand."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self.tensor = self._device.host_tensor((size,), torch.int32)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()

    def reserve(self, size: int) -> None:
        """Makes room for `size` elements; the contents are lost. No copy may be using it."""
        if size > len(self.array):
            self._allocate(max(size, 2 * len(self.array)))


class Download:
    """Device tensors on their way to the host over the side stream."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._device = device
        self._buffers = [HostBuffer(device, size) for size in sizes]
        self._sources: Sequence[torch.Tensor] = ()
        self.event: Event = None

    def start(self, sources: Sequence[torch.Tensor]) -> None:
        """Copies `sources` after all work launched so far is done."""
        # Kept until the next start: the allocator could reuse the memory of a freed tensor while
        # the side stream still reads it.
        self._sources = sources
        device = self._device
        device.wait("side", device.record("main"))
        for buffer, source in zip(self._buffers, sources, strict=True):
            target = buffer.tensor[: source.numel()].view(source.shape)
            device.copy(target, source, "side")
        self.event = device.record("side")

    def finish(self) -> list[npt.NDArray[np.int32]]:
        """Waits for the copies; the arrays are valid until the next `start`."""
        self._device.synchronize(self.event)
        return [
            buffer.array[: source.numel()].reshape(source.shape)
            for buffer, source in zip(self._buffers, self._sources, strict=True)
        ]
