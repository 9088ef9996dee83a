"""Defines OpSpec, which contains an operator's reference, samples and invalid calls. The tests
of all operators are derived from OpSpecs. Also contains helpers for arrays inside larger
buffers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import tee
from typing import Any

import numpy as np
import numpy.typing as npt
from ops.schema import arguments_of, parameters_of, schema_of

Array = npt.NDArray[Any]
Args = tuple[Any, ...]

CANARY = 0x41414141
"""The value of the items around the data that an operator may access."""


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, in schema order, as numpy arrays and scalars."""

    label: str
    args: Args
    checks_results: bool = True
    """False if the results are unspecified (e.g. duplicate rows): only memory safety is tested."""


@dataclass(frozen=True)
class BadCall:
    """An invalid call, which must be rejected before anything is written."""

    change: dict[str, Any]
    """New values by argument name. A callable receives the valid value and returns the new one."""
    message: str
    """A regular expression that the error matches. The tests also check that the error names the
    operator and the argument."""
    named: str = ""
    """The argument that the error names; if empty, the first argument in ``change``."""
    sample: str = ""
    """The label of the sample whose arguments are changed; if empty, the first sample."""

    @property
    def argument(self) -> str:
        return self.named or next(iter(self.change))


@dataclass(frozen=True)
class OpSpec:
    name: str
    reference: Callable[..., tuple[Array, ...] | None]
    make_samples: Callable[[np.random.Generator], Iterator[Sample]]
    """Generates ordinary calls, calls at limits, and calls with hostile values. The first sample is
    ordinary and has all sizes above 1."""
    bad_calls: tuple[BadCall, ...]
    sizes: tuple[Args, ...]
    """Arguments of calls of a single compiled graph. All tensor sizes differ between the calls
    and within each call, because torch uses the same symbol for equal sizes."""
    not_randomized: frozenset[str] = frozenset()
    """Arguments that ``parity.make_random_cases`` must not change, because with other values the
    results would be unspecified. Workspaces are never changed."""
    kernel_of: str = ""
    """The operator whose kernels this operator uses; if empty, the operator has its own kernels."""

    @property
    def kernel(self) -> str:
        """The name of the operator's kernels."""
        return self.kernel_of or self.name

    @property
    def family(self) -> str:
        """The name of the files that contain the operator and related operators (tests/repo)."""
        return self.reference.__module__.rpartition(".")[2]

    @cached_property
    def schema(self) -> str:
        """The schema in the operator's document; a test compares it with the registered schema."""
        return schema_of(self.name)

    @cached_property
    def arguments(self) -> list[tuple[str, str]]:
        """(name, type) of each argument, e.g. ("token_ids", "Tensor(a!)")."""
        return arguments_of(self.name)

    @cached_property
    def num_positional(self) -> int:
        """The number of arguments that may be passed by position."""
        parts = parameters_of(self.name)
        return parts.index("*") if "*" in parts else len(parts)

    def split(self, args: Args) -> tuple[Args, dict[str, Any]]:
        """Returns the positional and the keyword arguments of a call."""
        names = [name for name, _ in self.arguments[self.num_positional :]]
        keywords = dict(zip(names, args[self.num_positional :], strict=True))
        return args[: self.num_positional], keywords

    @cached_property
    def tensor_names(self) -> list[str]:
        return [name for name, kind in self.arguments if kind.startswith("Tensor")]

    @cached_property
    def written(self) -> set[str]:
        return {name for name, kind in self.arguments if re.match(r"Tensor\(\w+!\)", kind)}

    @cached_property
    def _samples(self) -> Iterator[Sample]:
        [samples] = tee(self.make_samples(np.random.default_rng(2026)), 1)
        return samples

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples, which are generated once, when they are needed. Tests must not change their
        arrays."""
        return copy(self._samples)

    def sample(self, label: str = "") -> Sample:
        """Returns a copy of the sample with this label; if it is empty, of the first sample."""
        sample = next(s for s in self.samples if label in ("", s.label))
        return replace(sample, args=clone_args(sample.args))

    def sample_with(self, name: str) -> Sample:
        """Returns a copy of the first sample in which this tensor is given and has all sizes above
        1."""
        for sample in self.samples:
            value = self.get(sample.args, name)
            if value is not None and min(value.shape) > 1:
                return replace(sample, args=clone_args(sample.args))
        raise LookupError(f"{self.name}: no sample has {name}")

    def get(self, args: Args, name: str) -> Any:
        """Returns the argument with this name."""
        return args[[n for n, _ in self.arguments].index(name)]

    def replace(self, args: Args, **change: Any) -> Args:
        """Returns the arguments with new values, which may be functions of the old value."""
        names = [name for name, _ in self.arguments]
        values = dict(zip(names, args, strict=True))
        for name, value in change.items():
            values[name] = value(values[name]) if callable(value) else value
        return tuple(values[name] for name in names)


def find_base(array: Array) -> Array:
    """Returns the array that owns the memory of `array`."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def clone(array: Array) -> Array:
    """Returns a copy with equal strides, at the same offset in a copy of the base array."""
    base = find_base(array)
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(array.shape, array.dtype, base.copy(), offset, array.strides)


def clone_args(args: Args) -> Args:
    return tuple(clone(a) if isinstance(a, np.ndarray) else a for a in args)


def contiguous(args: Iterable[Any]) -> Args:
    return tuple(np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in args)


def in_buffer(
    values: npt.ArrayLike, *, before: int = 0, gap: int = 0, dtype: Any = np.int32
) -> Array:
    """Returns the values as a slice of a larger buffer, which is filled with CANARY. Each row
    has `before` items before it and `gap` items after it. The outer stride therefore exceeds the
    width of the rows, and comparing the buffers detects writes outside the slice."""
    array = np.asarray(values, dtype)
    if array.ndim == 1:
        base = np.full(before + array.shape[0] + gap, CANARY).astype(dtype)
        view = base[before : before + array.shape[0]]
    else:
        base = np.full((array.shape[0], before + array.shape[1] + gap), CANARY).astype(dtype)
        view = base[:, before : before + array.shape[1]]
    view[...] = array
    return view


def are_equal(got: Array, expected: Array) -> bool:
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and bool(np.array_equal(got, expected))
    )
