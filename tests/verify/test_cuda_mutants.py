"""The twin notices kernels that are wrong: some of the faults here, since those of an index take
long. All of them: `python -m tools.verify.cuda_mutants`, whose outcome is kept as JSON."""

from __future__ import annotations

import json

import pytest
from cuda_hooks import HOOKS
from opspecs import OPSPECS
from twins import ROOT

from tools.verify.cuda_mutants.catch import INDEX_OPS, caught, op_of
from tools.verify.cuda_mutants.mutants import MUTANTS
from tools.verify.mutant import Mutant

OPS = [name for name, spec in OPSPECS.items() if HOOKS.device not in spec.no_kernel]
QUICK = [m for m in MUTANTS if op_of(m) not in INDEX_OPS]
OF_INDEXES = [m for m in MUTANTS if op_of(m) in INDEX_OPS]
RECORD = ROOT / "tools" / "bench" / "results" / "cuda-mutants.json"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", QUICK + OF_INDEXES[::20], ids=lambda m: m.name.replace(" ", "-"))
def test_each_is_caught(mutant: Mutant) -> None:
    assert caught(mutant)


def _unchanged(op: str) -> Mutant:
    text = "NGRAM_NPU_EXPORT int32_t"
    return Mutant(f"{op}: unchanged", f"csrc/cuda/{op.rstrip('_')}.cu", text, text)


# An index's kernels are built and tested together.
@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if op not in INDEX_OPS] + ["ngram_index_step_"])
def test_a_kernel_without_a_fault_passes(op: str) -> None:
    assert caught(_unchanged(op)) == ""


def test_a_fault_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places"):
        caught(Mutant("prepare_inputs: nowhere", "csrc/cuda/launch.cuh", "no such text", ""))


def test_every_kernel_has_faults() -> None:
    assert {op_of(mutant) for mutant in MUTANTS} == set(OPS)


def test_the_record_is_of_these_faults() -> None:
    record = json.loads(RECORD.read_text())
    assert record["survived"] == []
    assert set(record["caught_by"]) == {mutant.name for mutant in MUTANTS}
