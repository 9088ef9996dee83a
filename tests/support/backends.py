"""The implementations that the parity suite runs on: the CPU kernels at each instruction set,
through torch and through numpy; the host twins, through torch in the CPU's place; and the available
devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from ngram_npu import _C, _library
from on_device import call_on, torch_op
from ops.parity import as_arrays
from ops.specs import Args, Array, OpSpec
from twins import TWINS, Twin, load_kernels

ALL_INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "neon")


@dataclass(frozen=True)
class Backend:
    name: str
    call: Callable[[str, Args], tuple[Array, ...]]
    """Runs an operator on numpy arguments, updates those it writes, and returns its results."""
    instruction_set: str = "auto"
    twin: Twin | None = None
    device: str = "cpu"

    @contextmanager
    def selected(self, *, races_allowed: bool = False) -> Iterator[None]:
        """`races_allowed`: for a call that breaks the contract's rules, so its results may race."""
        with (
            instruction_set(self.instruction_set),
            in_place_of_the_cpu(self.twin, races_allowed=races_allowed),
        ):
            yield

    def serves(self, spec: OpSpec) -> bool:
        if self.twin is not None:
            return self.twin.device not in spec.no_kernel
        return _library.has_kernel(spec.name, self.device)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    before = _C.instruction_set()
    _C.set_instruction_set(name)
    try:
        yield
    finally:
        _C.set_instruction_set(before)


@contextmanager
def in_place_of_the_cpu(twin: Twin | None, *, races_allowed: bool = False) -> Iterator[None]:
    if twin is None:
        yield
        return
    twin.allow_races(races_allowed)
    try:
        loaded = load_kernels(twin.prefix, "cpu", twin.path)
        assert loaded.kernels > 0, loaded.reason
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {twin.fault()}") from error
    finally:
        twin.allow_races(False)
        load_kernels("cpu", "cpu", _library.cpu_library_path())


def to_torch(args: Args) -> Args:
    """Tensors over the same memory, strides kept."""
    return tuple(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args)


def call_torch(op: str, args: Args) -> tuple[Array, ...]:
    return as_arrays(torch_op(op)(*to_torch(args)))


def call_numpy(op: str, args: Args) -> tuple[Array, ...]:
    return as_arrays(getattr(_C, op)(*args))


def available_devices() -> list[str]:
    modules = {"cuda": torch.cuda, "npu": getattr(torch, "npu", None)}
    return [
        name for name, module in modules.items() if module is not None and module.is_available()
    ]


def available_instruction_sets() -> list[str]:
    found = []
    for name in ALL_INSTRUCTION_SETS:
        try:
            with instruction_set(name):
                found.append(name)
        except ValueError:
            continue
    return found


BACKENDS = [
    Backend(f"{front_end}-{name}", call, name)
    for name in available_instruction_sets()
    for front_end, call in (("torch", call_torch), ("numpy", call_numpy))
]
TWIN_BACKENDS = [Backend(twin.name, call_torch, twin=twin) for twin in TWINS]
DEVICE_BACKENDS = [
    Backend(f"device-{name}", call_on(name), device=name) for name in available_devices()
]
FRONT_ENDS = [Backend(n, c) for n, c in (("torch", call_torch), ("numpy", call_numpy))]
