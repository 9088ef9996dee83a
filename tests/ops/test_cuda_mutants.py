"""The twin notices kernels that are wrong; `python -m cuda_mutants` runs the same by itself."""

from __future__ import annotations

import pytest
from cuda_hooks import HOOKS
from cuda_mutants.catch import Mutant, caught
from cuda_mutants.mutants import MUTANTS
from opspecs import OPSPECS

OPS = [name for name, spec in OPSPECS.items() if HOOKS.device not in spec.no_kernel]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_each_is_caught(mutant: Mutant) -> None:
    assert caught(mutant)


def _unchanged(op: str) -> Mutant:
    return Mutant(
        "unchanged", f"{op}.cu", "NGRAM_NPU_EXPORT int32_t", "NGRAM_NPU_EXPORT int32_t", op
    )


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_without_a_fault_passes(op: str) -> None:
    assert caught(_unchanged(op)) == ""


def test_a_fault_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places"):
        caught(Mutant("nowhere", "launch.cuh", "no such text", "", "prepare_inputs"))


def test_every_kernel_has_faults() -> None:
    assert {mutant.op for mutant in MUTANTS} == set(OPS)
