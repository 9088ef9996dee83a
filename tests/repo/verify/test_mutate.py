"""Tests that tools/mutate.py changes code but neither comments nor strings, and reports survivors,
and that tools/fuzz.py reports failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import fuzz, mutate

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


def list_changed_lines(text: str, *, is_python: bool) -> list[str]:
    lines = []
    for change in mutate.find_changes(text, is_python=is_python):
        old_lines, new_lines = text.splitlines(), change.apply(text).splitlines()
        (line,) = (new for old, new in zip(old_lines, new_lines, strict=True) if old != new)
        lines.append(line.strip())
    return lines


def test_find_changes_skips_strings_and_comments_of_python() -> None:
    assert list_changed_lines(PYTHON, is_python=True) == [
        "if a and b < 10:",
        "if not a or b < 10:",
        "if not a and b <= 10:",
        "if not a and b < 11:",
        "pass",
        "return c + b",
    ]


def test_find_changes_skips_strings_comments_templates_and_includes_of_cpp() -> None:
    assert list_changed_lines(CPP, is_python=False) == [
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
    """The copy of the project is real. In place of pytest, a function fails for a changed file."""
    name = "python/ngram_npu/store/identifiers.py"
    original = (mutate.ROOT / name).read_bytes()

    def execute(self: Any, command: list[str]) -> int:
        is_changed = (tmp_path / name).read_bytes() != original
        return exit_code if "pytest" in command and is_changed else 0

    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "STAGE", tmp_path / "stage")
    monkeypatch.setattr(mutate.ProjectCopy, "_execute", execute)
    (tmp_path / "build" / "libraries").mkdir(parents=True)
    assert mutate.main([name, "--count", "2", "--", "tests"]) == 0
    report = capsys.readouterr().out
    assert len(json.loads(report[report.index("{\n") :])["survivors"]) == survivors
    assert (tmp_path / name).read_bytes() == original


def test_fault_of_python_is_tested_with_libraries_that_have_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "csrc/core/store.h"
    original = (mutate.ROOT / name).read_bytes()
    built: list[bytes] = []

    def execute(self: Any, command: list[str]) -> int:
        if "_C" in command:
            built.append((tmp_path / name).read_bytes())
        return 0

    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "STAGE", tmp_path / "stage")
    monkeypatch.setattr(mutate.ProjectCopy, "_execute", execute)
    (tmp_path / "build" / "libraries").mkdir(parents=True)
    copy = mutate.ProjectCopy([], [], twins=False)
    for content, is_python in ((original + b"\n", False), (original, True), (original, True)):
        copy.write(name, content)
        assert copy.build(is_python=is_python)
    assert built == [original + b"\n", original]


FUZZ_OUTPUT = "Done 70 runs in 2 second(s)\nreached page splits: 12\nreached slots disabled: 3\n"


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, FUZZ_OUTPUT, []),
        (0, FUZZ_OUTPUT.replace("splits: 12", "splits: 0"), ["page splits: never reached"]),
        (77, "", ["the target ended with status 77; see the name of the input above"]),
        (0, "Done 70 runs in 2 second(s)\n", ["expected counts `reached ...`, got none"]),
    ],
)
def test_fuzz_run_fails_on_fault_or_event_that_never_occurred(
    status: int, output: str, expected: list[str]
) -> None:
    assert fuzz.find_problems(status, output) == expected
