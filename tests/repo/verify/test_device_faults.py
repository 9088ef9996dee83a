"""Tests that twins detect each seeded fault and pass correct kernels. A seeded fault
removes or weakens a synchronization in a device kernel's source."""

from __future__ import annotations

import pytest
from repo.verify.device_faults import (
    ASCENDC_FAULTS,
    ASCENDC_SYNC_FAULTS,
    CUDA_FAULTS,
    Fault,
)
from repo.verify.run_device_faults import detect_ascendc_fault, detect_cuda_fault, find_cuda_source
from twins import ROOT


@pytest.mark.parametrize(
    "fault", [*CUDA_FAULTS, *ASCENDC_FAULTS, *ASCENDC_SYNC_FAULTS], ids=lambda f: f.name
)
def test_fault_applies_to_its_source(fault: Fault) -> None:
    assert fault.apply() != (ROOT / fault.file).read_text()


def test_fault_with_missing_old_text_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"expected 1 occurrence in csrc/cuda/launch\.cuh, got 0"):
        Fault("csrc/cuda/launch.cuh", "missing", "no such text", "").apply()


def test_ascendc_faults_cover_every_event() -> None:
    sources = (ROOT / "csrc/ascendc").iterdir()
    uses = sum(file.read_text().count("sync_pipes<AscendC::") for file in sources)
    assert len(ASCENDC_SYNC_FAULTS) == uses > 50


def test_cuda_faults_cover_every_barrier() -> None:
    uses = sum(file.read_text().count("__syncthreads()") for file in (ROOT / "csrc/cuda").iterdir())
    assert sum("__syncthreads" in fault.description for fault in CUDA_FAULTS) == uses > 10


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*ASCENDC_FAULTS, *ASCENDC_SYNC_FAULTS], ids=lambda f: f.name)
def test_ascendc_twin_detects_fault(fault: Fault) -> None:
    assert detect_ascendc_fault(fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CUDA_FAULTS, ids=lambda f: f"{f.name} ({f.mode})")
def test_cuda_twin_detects_fault(fault: Fault) -> None:
    assert detect_cuda_fault(fault)


@pytest.mark.slow
def test_ascendc_kernel_without_fault_passes() -> None:
    # Any line of the file: a fault with equal texts changes nothing.
    line = "struct StagedBatch : StagedBatchLayout {"
    fault = Fault("csrc/ascendc/bookkeeping.cpp", "none", line, line)
    assert detect_ascendc_fault(fault, num_rounds=2) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "mode"),
    [
        ("prepare_inputs", "fast"),
        *sorted({(fault.op, fault.mode) for fault in CUDA_FAULTS if fault.mode == "hooks"}),
    ],
)
def test_cuda_kernel_without_fault_passes(op: str, mode: str) -> None:
    """The parity suite runs all operators in the other modes."""
    # A fault with equal texts changes nothing.
    entry, file = f"ngram_npu_cuda_{op}(", find_cuda_source(op, ROOT / "csrc").relative_to(ROOT)
    assert detect_cuda_fault(Fault(str(file), "none", entry, entry, mode, op)) == ""
