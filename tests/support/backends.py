"""The backends that the parity suite tests: the CPU kernels with each instruction set, through
torch and through numpy; the host twins, registered for the CPU; and the available devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from ngram_npu import _C, _library
from on_device import make_device_call, torch_op
from ops.parity import as_arrays
from ops.specs import Args, Array, OpSpec
from twins import TWINS, Twin, load_kernels

ALL_INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "neon")


@dataclass(frozen=True)
class Backend:
    name: str
    call: Callable[[str, Args], tuple[Array, ...]]
    """Runs an operator on numpy arguments, updates those it writes, and returns the results."""
    instruction_set: str = "auto"
    twin: Twin | None = None
    device: str = "cpu"

    @contextmanager
    def select(self, *, races_allowed: bool = False) -> Iterator[None]:
        """Selects the backend within a `with` block. races_allowed: whether threads may race, as in
        calls that violate the contract."""
        with (
            select_instruction_set(self.instruction_set),
            replace_cpu_kernels(self.twin, races_allowed=races_allowed),
        ):
            yield

    def serves(self, spec: OpSpec) -> bool:
        return self.twin is not None or _library.has_kernel(spec.name, self.device)


@contextmanager
def select_instruction_set(name: str) -> Iterator[None]:
    previous_name = _C.instruction_set()
    _C.set_instruction_set(name)
    try:
        yield
    finally:
        _C.set_instruction_set(previous_name)


@contextmanager
def replace_cpu_kernels(twin: Twin | None, *, races_allowed: bool = False) -> Iterator[None]:
    if twin is None:
        yield
        return
    twin.allow_races(races_allowed)
    try:
        backend = load_kernels(twin.prefix, "cpu", twin.path)
        assert backend.kernels > 0, backend.reason
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {twin.get_fault()}") from error
    finally:
        twin.allow_races(False)
        load_kernels("cpu", "cpu", _library.cpu_library_path())


def to_torch(args: Args) -> Args:
    """Returns tensors that share the arrays' memory, with equal strides."""
    return tuple(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args)


def call_torch(op: str, args: Args) -> tuple[Array, ...]:
    return as_arrays(torch_op(op)(*to_torch(args)))


def call_numpy(op: str, args: Args) -> tuple[Array, ...]:
    return as_arrays(getattr(_C, op)(*args))


def list_available_devices() -> list[str]:
    modules = {"cuda": torch.cuda, "npu": getattr(torch, "npu", None)}
    return [
        name for name, module in modules.items() if module is not None and module.is_available()
    ]


def list_available_instruction_sets() -> list[str]:
    names = []
    for name in ALL_INSTRUCTION_SETS:
        try:
            with select_instruction_set(name):
                names.append(name)
        except ValueError:
            continue
    return names


BACKENDS = [
    Backend(f"{front_end}-{name}", call, name)
    for name in list_available_instruction_sets()
    for front_end, call in (("torch", call_torch), ("numpy", call_numpy))
]
TWIN_BACKENDS = [Backend(twin.name, call_torch, twin=twin) for twin in TWINS]
DEVICE_BACKENDS = [
    Backend(f"device-{name}", make_device_call(name), device=name)
    for name in list_available_devices()
]
FRONT_ENDS = [Backend("torch", call_torch), Backend("numpy", call_numpy)]
