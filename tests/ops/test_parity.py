"""Compares every operator on every backend with its reference, bit for bit, on the samples of the
OpSpecs and on random variations of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace

import ngram_npu
import numpy as np
import pytest
from backends import BACKENDS, DEVICE_BACKENDS, TWIN_BACKENDS, Backend, as_arrays, call_torch
from ngram_npu import _C
from ops.parity import (
    MismatchError,
    check_case,
    check_parity,
    make_case,
    random_cases,
    sample_cases,
)
from ops.specs import OPSPECS, OpSpec, clone_args, find_base

SANITIZED = os.environ.get("NGRAM_NPU_EXPECT_VERSION")
SPECS = list(OPSPECS.values())
# The front ends call the same kernels, so numpy suffices for most runs of other instruction sets.
SLOW = [
    backend
    for backend in BACKENDS
    if backend.call is call_torch and backend.instruction_set != _C.instruction_set()
]
PAIRS = [
    pytest.param(
        spec,
        backend,
        id=f"{spec.name}-{backend.name}",
        marks=pytest.mark.slow if backend in SLOW else (),
    )
    for spec in SPECS
    for backend in [*BACKENDS, *TWIN_BACKENDS, *DEVICE_BACKENDS]
    if backend.serves(spec)
]


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_samples_match_reference(spec: OpSpec, backend: Backend) -> None:
    cases = sample_cases(spec.name)
    for case in cases:
        check_case(spec, backend, case)
    assert len(cases) >= 10


@pytest.mark.parametrize(("spec", "backend"), PAIRS)
def test_random_variations_match_reference(spec: OpSpec, backend: Backend) -> None:
    for case in random_cases(spec.name):
        check_case(spec, backend, case)


STEP = OPSPECS["ngram_step_"]
FAULTS = ("value", "written", "dtype", "shape", "missing", "unmarked", "outside")


def _faulty_backend(fault: str) -> Backend:
    """The reference of ngram_step_ with a fault."""

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


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_comparison_detects_fault(fault: str, compared: bool) -> None:
    """Where results are unspecified, only writes to other memory are faults."""
    is_detected = compared or fault in ("unmarked", "outside")
    sample = replace(STEP.sample(), compare=compared)
    with pytest.raises(MismatchError) if is_detected else nullcontext():
        check_parity(STEP, _faulty_backend(fault), sample)


@pytest.mark.parametrize("fault", ["unmarked", "outside"])
def test_reference_that_writes_unmarked_memory_is_rejected(fault: str) -> None:
    faulty = _faulty_backend(fault)
    spec = replace(STEP, reference=lambda *args: faulty.call("", args))
    with pytest.raises(MismatchError):
        make_case(spec, STEP.sample())


def test_clone_keeps_layout() -> None:
    for sample in OPSPECS["ngram_propose"].samples(np.random.default_rng(1)):
        for original, copy in zip(sample.args, clone_args(sample.args), strict=True):
            if isinstance(original, np.ndarray):
                assert copy.strides == original.strides
                assert np.array_equal(copy, original)
                assert not np.shares_memory(copy, original)


@pytest.mark.skipif(SANITIZED is None, reason="only in the sanitizer run of the Makefile")
def test_sanitizer_run_uses_sanitized_kernels() -> None:
    assert ngram_npu.__version__ == SANITIZED
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libasan" in loaded
    assert "libubsan" in loaded
