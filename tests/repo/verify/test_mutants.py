"""The faults in `verify.mutants` can be made, the records are of them, and the twins notice
them."""

from __future__ import annotations

import json

import pytest
from cuda_hooks import HOOKS
from ops.specs import OPSPECS
from repo.verify.mutants import ascendc, by_ascendc_twin, by_twin, cuda
from repo.verify.mutants.mutant import Mutant, parse
from twins import ROOT

OPS = sorted({s.kernel for s in OPSPECS.values() if HOOKS.device not in s.no_kernel})
LISTS = {"cuda-mutants": cuda.MUTANTS, "ascendc-mutants": ascendc.MUTANTS}
RECORDS = ROOT / "tools" / "bench" / "results"


def test_the_text_form() -> None:
    text = "\n@ a/b.h\nx: old => new\ngone: old =>\n\n@ c.cu p q_\ny\n- 1: 2 => 3\n-   -\n+ +\n"
    assert parse(text) == [
        Mutant("a/b.h", "x", "old", "new"),
        Mutant("a/b.h", "gone", "old", ""),
        *(Mutant("c.cu", "y", "1: 2 => 3\n  -", "+", op) for op in ("p", "q_")),
    ]
    assert [mutant.name for mutant in parse(text)] == ["b.h: x", "b.h: gone", "p: y", "q_: y"]


@pytest.mark.parametrize("record", LISTS)
def test_each_can_be_made(record: str) -> None:
    for mutant in LISTS[record]:
        assert mutant.changed() != (ROOT / mutant.file).read_text()


def test_a_fault_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="nowhere: its old text stands at 0 places"):
        Mutant("csrc/cuda/launch.cuh", "nowhere", "no such text", "").changed()


@pytest.mark.parametrize("record", LISTS)
def test_the_record_is_of_these_faults(record: str) -> None:
    found = json.loads((RECORDS / f"{record}.json").read_text())
    names = sorted(mutant.name for mutant in LISTS[record])
    assert found["survived"] == []
    assert sorted(found["caught_by"]) == names
    assert found["mutants"] == len(names)


def test_every_kernel_has_faults() -> None:
    assert {mutant.op for mutant in cuda.MUTANTS} == set(OPS)


def test_every_order_of_the_ascendc_kernels_is_on_the_list() -> None:
    uses = sum(
        file.read_text().count("order<AscendC::") for file in (ROOT / "csrc/ascendc").iterdir()
    )
    assert len(ascendc.MUTANTS) == uses > 50


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ascendc.MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_the_ascendc_twin_catches(mutant: Mutant) -> None:
    assert by_ascendc_twin.caught(mutant)


@pytest.mark.slow
def test_an_ascendc_kernel_without_a_fault_passes() -> None:
    line = "struct StagedBatch {"
    unchanged = Mutant("csrc/ascendc/bookkeeping.cpp", "unchanged", line, line)
    assert by_ascendc_twin.caught(unchanged) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", cuda.MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_the_twin_catches(mutant: Mutant) -> None:
    assert by_twin.caught(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_without_a_fault_passes(op: str) -> None:
    text, file = f"ngram_npu_cuda_{op}(", by_twin.source_of(op).relative_to(ROOT)
    unchanged = Mutant(str(file), "unchanged", text, text, op)
    assert by_twin.caught(unchanged) == ""
