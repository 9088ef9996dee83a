"""Compares every operator on every backend with its reference, bit for bit, on the samples of the
OpSpecs and on random variations of them. Also tests with guard pages that the kernels of the CPU
access no memory outside their arguments. The models of the twins check this themselves."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace

import ngram_npu
import numpy as np
import pytest
from backends import (
    BACKENDS,
    DEVICE_BACKENDS,
    TWIN_BACKENDS,
    Backend,
    as_arrays,
    call_numpy,
)
from ngram_npu import _C
from ops.guard_pages import make_guarding_backend
from ops.parity import (
    MismatchError,
    check_cases,
    check_parity,
    make_random_cases,
    make_sample_cases,
)
from ops.specs import OPSPECS, OpSpec, find_base

SANITIZED_VERSION = os.environ.get("NGRAM_NPU_EXPECT_VERSION")
SPECS = list(OPSPECS.values())
QUICK_INSTRUCTION_SETS = (_C.instruction_set(), "auto")
NUMPY_BACKENDS = [backend for backend in BACKENDS if backend.call is call_numpy]


def _is_slow(backend: Backend) -> bool:
    """The front ends call the same kernels, so numpy without guard pages suffices for most runs of
    other instruction sets."""
    return backend.instruction_set not in QUICK_INSTRUCTION_SETS and backend.call is not call_numpy


def _list_backends(spec: OpSpec) -> list[Backend]:
    guarded = [
        make_guarding_backend(spec, backend, at_end)
        for backend in NUMPY_BACKENDS
        for at_end in (False, True)
    ]
    backends = [*BACKENDS, *guarded, *TWIN_BACKENDS, *DEVICE_BACKENDS]
    return [backend for backend in backends if backend.serves(spec)]


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        pytest.param(
            spec,
            backend,
            id=f"{spec.name}-{backend.name}",
            marks=pytest.mark.slow if _is_slow(backend) else (),
        )
        for spec in SPECS
        for backend in _list_backends(spec)
    ],
)
def test_backend_matches_reference(spec: OpSpec, backend: Backend) -> None:
    """Both kinds of cases are in one test, so that few processes run the reference on them. An
    access to a guard page ends the process; `pytest -s` shows the label of the case."""
    cases = make_sample_cases(spec.name)
    assert len(cases) >= 10
    check_cases(spec, backend, cases + make_random_cases(spec.name))


STEP = OPSPECS["ngram_step_"]
FAULTS = ("value", "written", "dtype", "shape", "missing", "unmarked", "outside")


def _make_faulty_backend(fault: str) -> Backend:
    """Returns a backend that calls the reference of ngram_step_ and then makes a fault."""

    def call(_: str, args: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        results = as_arrays(STEP.reference(*args))
        if fault == "value":
            results[-1].flat[0] += 1
        elif fault == "written":
            STEP.get(args, "num_tokens").flat[0] ^= 1
        elif fault == "dtype":
            results = (*results[:-1], results[-1].astype(np.int64))
        elif fault == "shape":
            results = (*results[:-1], results[-1][None])
        elif fault == "missing":
            results = results[:-1]
        elif fault == "unmarked":
            STEP.get(args, "sampled_token_ids").flat[0] ^= 1
        elif fault == "outside":
            find_base(STEP.get(args, "token_ids")).reshape(-1)[-1] += 1
        return results

    return Backend(f"faulty-{fault}", call, "auto")


@pytest.mark.parametrize("is_compared", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_comparison_detects_fault(fault: str, is_compared: bool) -> None:
    """If the results are unspecified, only writes to other memory are faults."""
    is_detected = is_compared or fault in ("unmarked", "outside")
    sample = replace(STEP.sample(), checks_results=is_compared)
    with pytest.raises(MismatchError) if is_detected else nullcontext():
        check_parity(STEP, _make_faulty_backend(fault), sample)


@pytest.mark.skipif(SANITIZED_VERSION is None, reason="only in the sanitizer run of the Makefile")
def test_sanitizer_run_uses_sanitized_kernels() -> None:
    assert ngram_npu.__version__ == SANITIZED_VERSION
    with open("/proc/self/maps") as maps:
        loaded_libraries = maps.read()
    assert "libasan" in loaded_libraries
    assert "libubsan" in loaded_libraries
