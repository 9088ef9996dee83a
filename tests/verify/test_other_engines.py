"""What a run of the engines' tests is taken to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.engines import add, summary

CASE = '<testcase classname="engine_v2.test_v2_engine" name="{}">{}</testcase>'


def results(file: Path, *cases: tuple[str, str]) -> Path:
    text = "".join(CASE.format(name, f"<{how}/>" if how else "") for name, how in cases)
    file.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return file


def test_failures_and_errors_are_named(tmp_path: Path) -> None:
    cases = ("a", ""), ("b", "failure"), ("c", "skipped"), ("d", "error"), ("e", "")
    assert summary(results(tmp_path / "r", *cases)) == {
        "passed": 2,
        "skipped": 1,
        "failed": ["test_v2_engine: b", "test_v2_engine: d"],
    }


@pytest.mark.parametrize("cases", [(), (("a", "skipped"),)])
def test_a_run_without_tests_is_no_success(tmp_path: Path, cases: tuple[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="expected tests that ran, got none"):
        summary(results(tmp_path / "r", *cases))


def test_a_release_has_one_entry_for_each_runner(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    for runner, passed in (("v1", 1), ("v2", 2), ("v1", 3)):
        add(file, {"vllm": "1.0", "runner": runner, "passed": passed})
    assert file.read_text().count('"passed"') == 2
    assert '"passed": 3' in file.read_text()
