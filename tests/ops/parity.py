"""Compares calls of a backend with the reference of the operator: the results, the written
arguments, and the memory around the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from ops.specs import OPSPECS, Args, Array, OpSpec, Sample, are_equal, clone, clone_args, find_base
from ops.specs.inputs import HOSTILE_INT64, UNLIMITED, make_workspace

if TYPE_CHECKING:
    from backends import Backend  # imports torch


class MismatchError(AssertionError):
    pass


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Returns an operator's results as a tuple: none, one, or several."""
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def as_arrays(results: Any) -> tuple[Array, ...]:
    """Returns an operator's results from either front end as arrays."""
    return tuple(r if isinstance(r, np.ndarray) else r.cpu().numpy() for r in as_tuple(results))


@dataclass(frozen=True)
class Case:
    """A sample with the results of the reference. A case is compared with many backends, because
    the reference takes most of the time of a comparison."""

    sample: Sample
    results: tuple[Array, ...]
    args: Args
    """The arguments after the call; None for a workspace. Empty if results are not checked."""


def make_case(spec: OpSpec, sample: Sample) -> Case:
    """Runs the reference on a sample, unless the results are unspecified. Raises MismatchError if
    the reference writes to an argument that the schema does not mark as written."""
    if not sample.checks_results:
        return Case(sample, (), ())
    args = clone_args(sample.args)
    results = as_arrays(spec.reference(*args))
    _check_arguments(spec, sample, args, None)
    written_args = (
        None if name == "workspace" else value
        for (name, _), value in zip(spec.arguments, args, strict=True)
    )
    return Case(sample, results, tuple(written_args))


@cache
def make_sample_cases(op: str) -> list[Case]:
    """Returns the cases of the operator's samples. If the operator has a workspace, two samples
    of three have a workspace of the size that ``workspace_size`` returns."""
    spec = OPSPECS[op]
    samples = list(spec.samples)
    if "workspace" in spec.tensor_names:
        for i, sample in enumerate(samples):
            if i % 3:
                args = add_workspace(spec, sample.args)
                samples[i] = Sample(sample.label, args, sample.checks_results)
    return [make_case(spec, sample) for sample in samples]


def add_workspace(spec: OpSpec, args: Args) -> Args:
    """Returns the arguments with a workspace of the size that the batch requires."""
    from ngram_npu.ops import workspace_size  # imports torch

    values = dict(zip([name for name, _ in spec.arguments], args, strict=True))
    batch_tensors = ("sampled_token_ids", "row_indices", "prev_positions", "token_ids")
    batch = next(len(values[name]) for name in batch_tensors if values.get(name) is not None)
    return spec.replace(args, workspace=make_workspace(workspace_size(spec.name, batch)))


NUM_VARIATIONS = 150
_SCALAR_VALUES: dict[str, tuple[Any, ...]] = {
    "match_policy": (0, 1),
    "overlap": (False, True),
    "fill": (False, True),
    "advance": (False, True),
    "extend": (False, True),
    "hold_back": (False, True),
    "max_new": (1, 2, 5, 40, 2**31 - 1),
    "max_len": (-(2**63), -1, 0, 10, 20, 40, 60, 80, 95, UNLIMITED),
    "vocab_size": (0, 2, 6, UNLIMITED),
    "min_match_len": (0, 1, 5, 2**31 - 1),
    "pad_token": (0, -1, 42),
    "pad_id": (-1, 0, 77),
}
_MAX_ITEMS = 3000
"""Samples with larger arguments are not varied, because the reference is slow on long rows."""


@cache
def make_random_cases(op: str) -> list[Case]:
    """Returns cases of samples with random changes. Arguments in ``OpSpec.not_randomized`` are
    not changed, because other values would break a rule of the contract."""
    spec = OPSPECS[op]
    rng = np.random.default_rng(2027)
    fixed = {"workspace"} | spec.not_randomized

    def is_small(sample: Sample) -> bool:
        arrays = (spec.get(sample.args, name) for name in spec.tensor_names if name not in fixed)
        return all(a is None or a.size <= _MAX_ITEMS for a in arrays)

    samples = [sample for sample in spec.samples if sample.checks_results and is_small(sample)]
    cases = []
    for i in range(NUM_VARIATIONS):
        sample = samples[int(rng.integers(len(samples)))]
        args = clone_args(sample.args)
        new_values = {}
        for (name, _), value in zip(spec.arguments, args, strict=True):
            if name in fixed or rng.random() < 0.5:
                continue
            if isinstance(value, np.ndarray):
                _change_items(rng, value)
            elif name in _SCALAR_VALUES:
                choices = _SCALAR_VALUES[name]
                new_values[name] = choices[int(rng.integers(len(choices)))]
        label = f"random-{i}-{sample.label}"
        cases.append(make_case(spec, Sample(label, spec.replace(args, **new_values))))
    return cases


def _change_items(rng: np.random.Generator, array: Array) -> None:
    """Replaces about a third of the items: 15 % by other items, 10 % by an adjacent value, and
    10 % by a hostile value."""
    if array.dtype == np.bool_:
        array ^= rng.random(array.shape) < 0.3
        return
    limits = np.iinfo(array.dtype)
    hostile = [v for v in HOSTILE_INT64 if limits.min <= v <= limits.max]
    choice = rng.random(array.shape)
    shuffled = rng.permutation(array.reshape(-1)).reshape(array.shape)
    array[...] = np.where(choice < 0.15, shuffled, array)
    step = rng.choice(np.array([1, limits.max], array.dtype), array.shape)
    array[...] = np.where((choice > 0.15) & (choice < 0.25), array + step, array)
    array[...] = np.where(
        choice > 0.9, rng.choice(np.array(hostile, array.dtype), array.shape), array
    )


def check_parity(spec: OpSpec, backend: Backend, sample: Sample) -> None:
    """Raises MismatchError unless results and written arguments equal those of the reference."""
    check_cases(spec, backend, [make_case(spec, sample)])


def check_cases(spec: OpSpec, backend: Backend, cases: list[Case]) -> None:
    """Same as :func:`check_parity`, for samples with known results of the reference."""
    # Selecting a backend takes longer than most calls.
    for checks_results, group in groupby(cases, lambda case: case.sample.checks_results):
        with backend.select(races_allowed=not checks_results):
            for case in group:
                print(case.sample.label)  # the call may end the process
                args = clone_args(case.sample.args)
                got = backend.call(spec.name, args)
                check_results(spec, case.sample, got, args, case.results, case.args)


def check_results(
    spec: OpSpec,
    sample: Sample,
    got: tuple[Array, ...],
    got_args: Args,
    expected: tuple[Array, ...],
    expected_args: Args,
) -> None:
    """Raises MismatchError unless the results and the arguments after the call equal the
    expected ones. For a sample that is not compared, only writes to other memory are errors."""
    _check_arguments(spec, sample, got_args, expected_args if sample.checks_results else None)
    if not sample.checks_results:
        return
    if len(got) != len(expected):
        raise MismatchError(f"{sample.label}: expected {len(expected)} results, got {len(got)}")
    for i, (result, reference) in enumerate(zip(got, expected, strict=True)):
        if not are_equal(result, reference):
            raise MismatchError(f"{sample.label}: result {i}: got\n{result}\nexpected\n{reference}")


def _check_arguments(spec: OpSpec, sample: Sample, got: Args, expected: Args | None) -> None:
    """Compares the whole buffers of the arguments, in order to detect writes outside a slice."""
    for (name, _), before, after, reference in zip(
        spec.arguments, sample.args, got, expected or got, strict=True
    ):
        if not isinstance(before, np.ndarray) or name == "workspace":
            continue
        if name not in spec.written:
            if not np.array_equal(find_base(after), find_base(before)):
                raise MismatchError(f"{sample.label}: {name} changed but is not marked as written")
            continue
        if expected is None:  # the rest of the buffer must not change
            reference = clone(before)
            reference[...] = after
        if not np.array_equal(find_base(after), find_base(reference)):
            raise MismatchError(
                f"{sample.label}: {name}: got\n{find_base(after)}\nexpected\n{find_base(reference)}"
            )
