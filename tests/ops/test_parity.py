"""Every operator on every backend against its reference, bit for bit; derived from the OpSpecs."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from backends import BACKENDS, DEVICE_BACKENDS, TWIN_BACKENDS, Backend, as_arrays
from hypothesis import given
from hypothesis import strategies as st
from opspecs import OPSPECS, OpSpec, Sample, clone_args, owner

from ops.parity import MismatchError, check_parity

SPECS = list(OPSPECS.values())
PAIRS = [
    pytest.param(spec, backend, id=f"{spec.name}-{backend.name}")
    for backend in [*BACKENDS, *TWIN_BACKENDS, *DEVICE_BACKENDS]
    for spec in SPECS
    if backend.serves(spec)
]


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_samples(spec: OpSpec, backend: Backend) -> None:
    count = 0
    with backend.drawing():
        for sample in spec.samples(np.random.default_rng(2026)):
            check_parity(spec, backend, sample)
            count += 1
    assert count >= 10


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_random(spec: OpSpec, backend: Backend) -> None:
    @given(spec.strategy)
    def check(args: tuple[object, ...]) -> None:
        check_parity(spec, backend, Sample("hypothesis", args))

    with backend.drawing():
        check()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_reference_writes_only_what_the_schema_marks(spec: OpSpec) -> None:
    reference = Backend("reference", lambda _, args: as_arrays(spec.reference(*args)), "auto")
    for sample in spec.samples(np.random.default_rng(7)):
        check_parity(spec, reference, sample)


def _wrong_backend(spec: OpSpec, fault: str) -> Backend:
    def call(_: str, args: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        results = as_arrays(spec.reference(*args))
        arrays = {
            name: a
            for (name, _), a in zip(spec.arguments, args, strict=True)
            if isinstance(a, np.ndarray)
        }
        if fault == "value":
            results[-1].flat[0] += 1
        elif fault == "written":
            arrays[max((spec.written - spec.opaque) & arrays.keys())].flat[0] ^= 1
        elif fault == "dtype":
            results = (*results[:-1], results[-1].astype(np.int64))
        elif fault == "shape":
            results = (*results[:-1], results[-1][None])
        elif fault == "missing":
            results = results[:-1]
        elif fault == "unmarked":
            target = next(a for name, a in arrays.items() if name not in spec.written)
            target.flat[0] = 0 if target.flat[0] else 1
        elif fault == "outside":
            last = (owner(a).reshape(-1)[-1:] for a in arrays.values())
            next(
                end
                for end, a in zip(last, arrays.values(), strict=True)
                if not np.shares_memory(end, a)
            )[0] += 1
        return results

    return Backend(f"wrong-{fault}", call, "auto")


def _faults(spec: OpSpec) -> list[str]:
    always = {name for name, kind in spec.arguments if not kind.endswith("?")}
    results = [] if spec.schema.endswith("-> ()") else ["value", "dtype", "shape", "missing"]
    return [
        *results,
        *(["written"] if spec.written & always - spec.opaque else []),
        "unmarked",
        "outside",
    ]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [pytest.param(s, fault, id=f"{s.name}-{fault}") for s in SPECS for fault in _faults(s)],
)
def test_the_comparison_catches(spec: OpSpec, fault: str) -> None:
    sample = next(spec.samples(np.random.default_rng(3)))
    with pytest.raises(MismatchError):
        check_parity(spec, _wrong_backend(spec, fault), sample)


@pytest.mark.parametrize(
    ("fault", "caught"), [("value", False), ("outside", True), ("unmarked", True)]
)
def test_where_results_are_unspecified_the_tensors_around_are_not(fault: str, caught: bool) -> None:
    spec = OPSPECS["ngram_step_"]
    sample = Sample("unspecified", spec.sample().args, compare=False)
    with pytest.raises(MismatchError) if caught else nullcontext():
        check_parity(spec, _wrong_backend(spec, fault), sample)


@given(st.data())
def test_clone_keeps_the_layout(data: st.DataObject) -> None:
    args = data.draw(OPSPECS["ngram_propose"].strategy)
    for original, copy in zip(args, clone_args(args), strict=True):
        if isinstance(original, np.ndarray):
            assert copy.strides == original.strides
            assert np.array_equal(copy, original)
            assert not np.shares_memory(copy, original)
