"""What a run of the engines' tests is taken to say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import engines
from tools.engines import add, summary

CASE = '<testcase classname="engine_v2.{}" name="{}">{}</testcase>'


def results(file: Path, *cases: tuple[str, str, str]) -> Path:
    text = "".join(CASE.format(of, name, f"<{how}/>" if how else "") for of, name, how in cases)
    file.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return file


def test_failures_and_errors_are_named_by_method(tmp_path: Path) -> None:
    file = results(
        tmp_path / "r",
        ("test_v2_engine", "a[async-scan]", ""),
        ("test_v2_engine", "a[sync-scan]", "failure"),
        ("test_v2_engine", "b[sync-index]", ""),
        ("test_v2_ranks", "c[async-index]", "skipped"),
        ("test_v2_store", "d", "error"),
        ("test_beside_engine", "a[draft-sync]", ""),
    )
    assert [[*entry.values()] for entry in summary(file, "v2")] == [
        ["v2", "beside draft_model", 1, 0, 0, []],
        ["v2", "ngram", 1, 0, 1, ["test_v2_engine::a[sync-scan]"]],
        ["v2", "ngram_gpu", 1, 0, 0, []],
        ["v2", "store", 0, 0, 1, ["test_v2_store::d"]],
    ]


@pytest.mark.parametrize("cases", [(), (("test_v2_store", "a", "skipped"),)])
def test_a_run_without_tests_is_no_success(
    tmp_path: Path, cases: tuple[tuple[str, str, str]]
) -> None:
    with pytest.raises(ValueError, match="expected tests that ran, got none"):
        summary(results(tmp_path / "r", *cases), "v2")


def test_a_method_of_a_release_has_one_entry_for_each_runner(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    for runner, passed, chosen in (("v1", 1, ["-k", "a"]), ("v2", 2, []), ("v1", 3, ["-x"])):
        given = {"vllm": "1.0", "runner": runner, "method": "ngram", "passed": passed}
        add(file, [given], chosen)
    found = json.loads(file.read_text())
    rows = [(entry["runner"], entry["passed"]) for entry in found["results"]]
    assert rows == [("v1", 3), ("v2", 2)]
    assert found["chosen"] == {"1.0 v1": ["-x"], "1.0 v2": []}


def test_a_run_that_was_broken_off_is_not_written_down(tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(SystemExit, match="pytest ended with 4, nothing is written down"):
        engines.tested(python, "--no-such-option")
