"""The faults in `tools.verify.mutants` can still be made, and the record is of them: building and
running them takes too long for here. Of those in the record some change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twins import ROOT

from tools.verify.mutant import Mutant, failing_tests
from tools.verify.mutants.faults import MUTANTS

RECORD = ROOT / "tools" / "bench" / "results" / "mutants.json"


def test_each_can_be_made() -> None:
    for mutant in MUTANTS:
        unchanged = mutant.changed() == (ROOT / mutant.file).read_text()
        assert unchanged == mutant.name.endswith("unchanged")


def test_a_fault_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="nowhere: its old text stands at 0 places"):
        Mutant("nowhere", "csrc/core/batch.h", "no such text", "").changed()


def test_a_crash_is_noticed(tmp_path: Path) -> None:
    crashing = tmp_path / "test_crash.py"
    crashing.write_text("import os, signal\ndef test(): os.kill(os.getpid(), signal.SIGKILL)\n")
    assert failing_tests([str(crashing)], {}, 60)


def test_the_record_is_of_these_faults() -> None:
    record = json.loads(RECORD.read_text())
    assert {*record["survived"]} == {mutant.name for mutant in MUTANTS if mutant.equivalent}
    assert {*record["survived"], *record["caught_by"]} == {mutant.name for mutant in MUTANTS}
