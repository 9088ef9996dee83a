"""Where a store's arrays are: in host memory, or in a device's memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np

from ngram_npu.tensors import Int32Array

_TIMEOUT_S = 10.0
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

    def prepare_copies(self, arrays: Sequence[Any]) -> int:
        """Allocates what :meth:`start_copy` needs, and returns its bytes on the device."""

    def start_copy(self, arrays: Sequence[Any]) -> Any:
        """Copies arrays as they are at this point of the stream of the steps. They are all or the
        first ones of those that were prepared. One copy may be unfinished at a time."""

    def finish_copy(self, copy: Any) -> list[Int32Array]:
        """Returns the result of :meth:`start_copy` in host memory, and zeroes all other copies of
        the text. Only the calling thread waits, not the stream.

        Raises:
            RuntimeError: the device did not finish within ten seconds.
        """


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

    def prepare_copies(self, arrays: Sequence[Any]) -> int:
        return 0

    def start_copy(self, arrays: Sequence[Any]) -> list[Int32Array]:
        return [array.copy() for array in arrays]

    def finish_copy(self, copy: list[Int32Array]) -> list[Int32Array]:
        return copy


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
    """torch tensors on a device with streams. A second stream copies to the host, from a snapshot:
    later steps change the arrays while the copy is running."""

    def __init__(self, device: Any) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = device
        # torch.cuda and torch.npu have the same interface of streams.
        self._runtime = getattr(self._torch, device.type)
        self._steps = self._runtime.current_stream(device)
        self._copies = self._runtime.Stream(device)
        self._snapshot: list[Any] = []
        self._host: list[Any] = []

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

    def prepare_copies(self, arrays: Sequence[Any]) -> int:
        zeros_like = self._torch.zeros_like
        self._snapshot = [zeros_like(array) for array in arrays]
        self._host = [zeros_like(array, device="cpu", pin_memory=True) for array in arrays]
        return sum(int(tensor.nbytes) for tensor in self._snapshot)

    def start_copy(self, arrays: Sequence[Any]) -> tuple[int, Any]:
        for copy, array in zip(self._snapshot, arrays, strict=False):
            copy.copy_(array)
        return len(arrays), self._steps.record_event()

    def finish_copy(self, copy: tuple[int, Any]) -> list[Int32Array]:
        count, mark = copy
        hosts = self._host[:count]
        self._copies.wait_event(mark)
        with self._runtime.stream(self._copies):
            for host, tensor in zip(hosts, self._snapshot, strict=False):
                host.copy_(tensor, non_blocking=True)
                tensor.zero_()
        copied = self._copies.record_event()
        # A stream that hangs, because another rank has ended, must not hang the engine's end.
        deadline = time.monotonic() + _TIMEOUT_S
        while not copied.query():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"NgramStore: the device did not finish its steps within {_TIMEOUT_S:g} s"
                )
            time.sleep(0.001)
        arrays = [host.numpy().copy() for host in hosts]
        for host in hosts:
            host.zero_()
        return arrays
