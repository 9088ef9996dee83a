"""Random faults: which places of a source are changed, and that a fault that no test notices is
reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import mutate

PYTHON = '''"""a + b"""
def total(a, b):
    # a + b
    if not a and b < 10:
        return "a + b"
    c = a
    return c - b
'''
CPP = """#include <vector>
// a + b
int total(std::vector<int> a, const char* b) {
  if (a.size() > 9) count(a, "a + b");
  return 'x' == *b && true;
}
"""


def changed_lines(text: str, *, is_python: bool) -> list[str]:
    lines = []
    for change in mutate.find_changes(text, is_python=is_python):
        before, after = text.splitlines(), change.applied_to(text).splitlines()
        (line,) = (new for old, new in zip(before, after, strict=True) if old != new)
        lines.append(line.strip())
    return lines


def test_changes_of_python_leave_strings_and_comments() -> None:
    assert changed_lines(PYTHON, is_python=True) == [
        "if a and b < 10:",
        "if not a or b < 10:",
        "if not a and b <= 10:",
        "if not a and b < 11:",
        "pass",
        "return c + b",
    ]


def test_changes_of_cpp_leave_strings_comments_templates_and_includes() -> None:
    assert changed_lines(CPP, is_python=False) == [
        'if (!a.size() > 9) count(a, "a + b");',
        'if (a.size() >= 9) count(a, "a + b");',
        'if (a.size() > 10) count(a, "a + b");',
        "return 'x' != *b && true;",
        "return 'x' == *b || true;",
        "return 'x' == *b && false;",
    ]


@pytest.mark.parametrize(("exit_code", "survivors"), [(0, 2), (1, 0)])
def test_fault_survives_only_if_all_tests_pass(
    exit_code: int,
    survivors: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The copy is real; instead of the project's tests a program fails for a changed file."""
    name = "python/ngram_npu/scopes.py"
    original = (mutate.ROOT / name).read_bytes()

    def run(self: Any, command: list[str]) -> int:
        is_test = "pytest" in command
        is_changed = (tmp_path / name).read_bytes() != original
        return exit_code if is_test and is_changed else 0

    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "STAGE", tmp_path / "stage")
    monkeypatch.setattr(mutate.Copy, "_run", run)
    (tmp_path / "build" / "libraries").mkdir(parents=True)
    assert mutate.main([name, "--count", "2", "--", "tests"]) == 0
    report = capsys.readouterr().out
    assert len(json.loads(report[report.index("{\n") :])["survivors"]) == survivors
    assert (tmp_path / name).read_bytes() == original


def test_tests_that_fail_without_a_fault_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "STAGE", tmp_path / "stage")
    monkeypatch.setattr(mutate, "_CONFIGURE", [sys.executable, "-c", "print('no compiler'); 1 / 0"])
    with pytest.raises(SystemExit, match=r"without a fault:\n.*no compiler"):
        mutate.main(["python/ngram_npu/scopes.py", "--", "tests"])
