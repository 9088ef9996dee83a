"""Copies numpy arguments to a torch device and back, with equal strides; detects stray writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ops.parity import as_arrays
from ops.specs import OPSPECS, Args, Array, find_base

GUARD = 256
"""Number of bytes before and after each base array. The number is a multiple of a kernel's largest
load, so that a view has the same alignment on the device."""
_CANARY = 0x41

Call = Callable[..., Any]


class StrayWriteError(AssertionError):
    """An operator has written to memory outside of its arguments."""


class DeviceArguments:
    """The arguments of one call, copied to a device. Base arrays are copied completely, so that a
    write outside of a view is visible after they are copied back."""

    def __init__(self, args: Args, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._copies: dict[int, tuple[Array, torch.Tensor]] = {}
        self.args: Args = tuple(
            self._make_view(value) if isinstance(value, np.ndarray) else value for value in args
        )

    def _make_view(self, array: Array) -> torch.Tensor:
        base = find_base(array)
        if id(base) not in self._copies:
            self._copies[id(base)] = (base, self._upload(base))
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        buffer = self._copies[id(base)][1].view(dtype)
        start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        strides = [step // array.itemsize for step in array.strides]
        return buffer.as_strided(array.shape, strides, (GUARD + start) // array.itemsize)

    def _upload(self, base: Array) -> torch.Tensor:
        if not base.flags.c_contiguous:
            raise ValueError("an argument's base array must be contiguous")
        padded = np.full(GUARD + -(-base.nbytes // GUARD) * GUARD + GUARD, _CANARY, np.uint8)
        padded[GUARD : GUARD + base.nbytes] = np.frombuffer(base.tobytes(), np.uint8)
        return torch.from_numpy(padded).to(self._device)

    def refresh(self) -> None:
        """Copies the current contents to the device again, for the next replay of a graph that was
        captured with these arguments."""
        for base, buffer in self._copies.values():
            content = buffer[GUARD : GUARD + base.nbytes]
            content.copy_(torch.from_numpy(np.frombuffer(bytearray(base.tobytes()), np.uint8)))

    def copy_back(self) -> None:
        """Copies all base arrays back to the host.

        Raises:
            StrayWriteError: the guards have changed.
        """
        for base, buffer in self._copies.values():
            padded = buffer.cpu().numpy()
            content = slice(GUARD, GUARD + base.nbytes)
            if (np.delete(padded, content) != _CANARY).any():
                raise StrayWriteError("a write before or after an argument's memory")
            base[...] = padded[content].view(base.dtype).reshape(base.shape)


def make_device_call(device: str) -> Callable[[str, Args], tuple[Array, ...]]:
    """Returns a `Backend.call` that runs operators on `device`."""

    def call(op: str, args: Args) -> tuple[Array, ...]:
        return run_on(device, torch_op(op), args)

    return call


def torch_op(op: str) -> Call:
    """Returns the operator as a function of positional arguments, in the order of its schema."""
    spec, operator = OPSPECS[op], getattr(torch.ops.ngram_npu, op)

    def call(*args: Any) -> Any:
        positional, keywords = spec.split(args)
        return operator(*positional, **keywords)

    return call


def run_on(device: str, function: Call, args: Args) -> tuple[Array, ...]:
    """Runs `function` on device copies of `args`, then copies its writes back to `args`."""
    copies = DeviceArguments(args, device)
    try:
        results = function(*copies.args)
    except ValueError:  # tests check that a rejected call wrote nothing
        copies.copy_back()
        raise
    copies.copy_back()
    return as_arrays(results)
