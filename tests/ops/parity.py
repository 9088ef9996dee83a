"""Compares one call with the reference: results, written arguments, and memory around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ops.specs import Args, Array, OpSpec, Sample, clone, clone_args, owner, same_bits

if TYPE_CHECKING:
    from backends import Backend  # needs torch


class MismatchError(AssertionError):
    pass


def as_tuple(results: Any) -> tuple[Any, ...]:
    """An operator's results: none, one, or several."""
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def as_arrays(results: Any) -> tuple[Array, ...]:
    """An operator's results from either front end, as arrays."""
    return tuple(r if isinstance(r, np.ndarray) else r.cpu().numpy() for r in as_tuple(results))


@dataclass(frozen=True)
class Case:
    """A sample with what the reference makes of it, for any number of backends: most of the time of
    a comparison is the reference's."""

    sample: Sample
    results: tuple[Array, ...]
    args: Args
    """After the call; None for what is opaque."""


def case_of(spec: OpSpec, sample: Sample) -> Case:
    """Raises MismatchError if the reference writes what the schema does not mark."""
    args = clone_args(sample.args)
    results = as_arrays(spec.reference(*args))
    _check_arguments(spec, sample, args, None)
    kept = (
        None if name in spec.opaque else value
        for (name, _), value in zip(spec.arguments, args, strict=True)
    )
    return Case(sample, results, tuple(kept))


def check_parity(spec: OpSpec, backend: Backend, sample: Sample) -> None:
    """Raises MismatchError unless the backend does exactly what the reference does."""
    check_case(spec, backend, case_of(spec, sample))


def check_case(spec: OpSpec, backend: Backend, case: Case) -> None:
    """As :func:`check_parity`."""
    args = clone_args(case.sample.args)
    with backend.selected(races_allowed=not case.sample.compare):
        got = backend.call(spec.name, args)
    compare(spec, case.sample, got, args, case.results, case.args)


def compare(
    spec: OpSpec,
    sample: Sample,
    got: tuple[Array, ...],
    got_args: Args,
    expected: tuple[Array, ...],
    expected_args: Args,
) -> None:
    """Raises MismatchError unless results and arguments after the call are the expected ones."""
    _check_arguments(spec, sample, got_args, expected_args if sample.compare else None)
    if not sample.compare:
        return
    if len(got) != len(expected):
        raise MismatchError(f"{len(got)} results instead of {len(expected)}")
    for i, (mine, truth) in enumerate(zip(got, expected, strict=True)):
        if not same_bits(mine, truth):
            raise MismatchError(f"{sample.label}: result {i}: got\n{mine}\nexpected\n{truth}")


def _check_arguments(spec: OpSpec, sample: Sample, got: Args, expected: Args | None) -> None:
    """Compares whole buffers, so that a write outside a slice is found as well."""
    for (name, _), before, mine, truth in zip(
        spec.arguments, sample.args, got, expected or got, strict=True
    ):
        if not isinstance(before, np.ndarray) or name in spec.opaque:
            continue
        if name not in spec.written and not np.array_equal(owner(mine), owner(before)):
            raise MismatchError(f"{sample.label}: {name} was changed but is not marked as written")
        if expected is None:  # whatever was written, it was not beside the tensor
            truth = clone(before)
            truth[...] = mine
        if not np.array_equal(owner(mine), owner(truth)):
            raise MismatchError(
                f"{sample.label}: {name}: got\n{owner(mine)}\nexpected\n{owner(truth)}"
            )
