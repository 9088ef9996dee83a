"""Where a store's arrays are: in host memory, or in a device's memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np

from ngram_npu.tensors import Int32Array

_WORD_BYTES = 4
_HUGE_PAGE_BYTES = 2 << 20


class Memory(Protocol):
    """Allocates a store's arrays, and orders their changes with the steps of the runner."""

    def zeros(self, *shape: int) -> Any:
        """Returns zeroed int32 items."""

    def place(self, array: Any) -> Any:
        """Returns a numpy array as an array of this memory."""

    def use_current_stream_for_steps(self) -> None:
        """Makes the current stream the one in which steps run."""

    def use_step_stream(self) -> AbstractContextManager[Any]:
        """Returns a context in which any thread launches in the stream of the steps."""

    def prepare_copies(self, arrays: Sequence[Any]) -> None:
        """Allocates what :meth:`start_copy` needs."""

    def start_copy(self, arrays: Sequence[Any]) -> None:
        """Copies arrays to the host after the steps that have been launched. They are all or the
        first ones of those that were prepared. Replaces a copy that was not taken."""

    def take_copy(self) -> list[Int32Array] | None:
        """Returns the copy that was started last, and zeroes the memory that it was copied to; None
        if the device has not finished it. Calls no function of the device's runtime, since another
        thread may be capturing a graph."""


class HostMemory:
    """numpy arrays. Work runs within the calls."""

    def zeros(self, *shape: int) -> Int32Array:
        return _allocate_words(math.prod(shape)).reshape(shape)

    def place(self, array: Any) -> Any:
        return array

    def use_current_stream_for_steps(self) -> None:
        pass

    def use_step_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare_copies(self, arrays: Sequence[Any]) -> None:
        pass

    def start_copy(self, arrays: Sequence[Any]) -> None:
        self._copied = arrays

    def take_copy(self) -> list[Int32Array] | None:
        return [array.copy() for array in self._copied]


def _allocate_words(words: int) -> Int32Array:
    """Allocates zeroed int32 words, in huge pages if the system has them. With small pages, each
    random access to the table would also miss the TLB.

    All memory is committed here, because the system zeroes a page at its first use, for which the
    first steps would wait.
    """
    # A shared mapping would get no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, words * _WORD_BYTES + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    mapped = np.frombuffer(mapping, np.uint8)  # keeps the mapping alive
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    array = mapped[start : start + words * _WORD_BYTES].view(np.int32)
    array[:: mmap.PAGESIZE // _WORD_BYTES] = 0
    return array


class DeviceMemory:
    """torch tensors on a device with streams. The stream of the steps copies to pinned memory, and
    then copies the number of the copy, which shows the host that the copy is complete."""

    def __init__(self, device: Any) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = device
        # torch.cuda and torch.npu have the same interface of streams.
        self._runtime = getattr(self._torch, device.type)
        self._steps = self._runtime.current_stream(device)
        self._num_started = self._num_arrays = 0

    def zeros(self, *shape: int) -> Any:
        return self._torch.zeros(shape, dtype=self._torch.int32, device=self._device)

    def place(self, array: Any) -> Any:
        # Without pinned memory, the copy would wait for the steps.
        return self._torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def use_current_stream_for_steps(self) -> None:
        self._steps = self._runtime.current_stream(self._device)

    def use_step_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._runtime.stream(self._steps)
        return context

    def prepare_copies(self, arrays: Sequence[Any]) -> None:
        *self._host, self._host_number = [
            self._torch.zeros_like(array, device="cpu", pin_memory=True)
            for array in (*arrays, self.zeros(1))
        ]

    def start_copy(self, arrays: Sequence[Any]) -> None:
        self._num_started += 1
        self._num_arrays = len(arrays)
        sources = *arrays, self.place(np.array([self._num_started], np.int32))
        hosts = *self._host[: len(arrays)], self._host_number
        for host, source in zip(hosts, sources, strict=True):
            host.copy_(source, non_blocking=True)

    def take_copy(self) -> list[Int32Array] | None:
        if self._host_number.numpy()[0] != self._num_started:
            return None
        hosts = [host.numpy() for host in self._host[: self._num_arrays]]
        arrays = [host.copy() for host in hosts]
        for host in hosts:
            host.fill(0)
        return arrays
