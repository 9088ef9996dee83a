"""Every operator on every backend against its reference, bit for bit; derived from the OpSpecs. The
sanitizer run really uses sanitized kernels."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import ngram_npu
import numpy as np
import pytest
from backends import BACKENDS, DEVICE_BACKENDS, TWIN_BACKENDS, Backend, as_arrays
from hypothesis import given
from hypothesis import strategies as st
from ops.cases import cases_of
from ops.parity import Case, MismatchError, case_of, check_case, check_parity
from ops.specs import OPSPECS, OpSpec, Sample, clone_args, owner

SANITIZED = os.environ.get("NGRAM_NPU_EXPECT_VERSION")
SPECS = list(OPSPECS.values())
PAIRS = [
    pytest.param(spec, backend, id=f"{spec.name}-{backend.name}")
    for spec in SPECS  # one after the other, for the cached cases
    for backend in [*BACKENDS, *TWIN_BACKENDS, *DEVICE_BACKENDS]
    if backend.serves(spec)
]


@lru_cache(maxsize=2)
def _random(op: str) -> list[Case]:
    cases: list[Case] = []

    @given(OPSPECS[op].strategy)
    def draw(args: tuple[object, ...]) -> None:
        cases.append(case_of(OPSPECS[op], Sample("hypothesis", args)))

    draw()
    return cases


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_samples(spec: OpSpec, backend: Backend) -> None:
    cases = cases_of(spec.name)
    for case in cases:
        check_case(spec, backend, case)
    assert len(cases) >= 10


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_random(spec: OpSpec, backend: Backend) -> None:
    cases = _random(spec.name)
    for case in cases:
        check_case(spec, backend, case)
    assert len(cases) >= 100


@pytest.mark.parametrize("fault", ["unmarked", "outside"])
def test_the_reference_writes_only_what_the_schema_marks(fault: str) -> None:
    """In every sample: what it would write otherwise is an error."""
    spec = OPSPECS["ngram_step_"]
    wrong = _wrong_backend(spec, fault)
    with pytest.raises(MismatchError):
        case_of(replace(spec, reference=lambda *args: wrong.call("", args)), spec.sample())


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


@pytest.mark.skipif(SANITIZED is None, reason="only in the sanitizer run of the Makefile")
def test_these_are_the_sanitized_kernels() -> None:
    assert ngram_npu.__version__ == SANITIZED
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libasan" in loaded
    assert "libubsan" in loaded
