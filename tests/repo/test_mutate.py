"""Tests that tools/mutate.py changes code, not comments or strings, and reports survivors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import mutate

CODE = """#include <vector>
// a + b
int total(std::vector<int> a, const char* b) {
  if (a.size() > 9) count(a, "a + b");
  return 'x' == *b && true;
}
"""


def test_find_changes_skips_strings_comments_templates_and_includes() -> None:
    changed_lines = []
    for change in mutate.find_changes(CODE):
        lines = zip(CODE.splitlines(), change.apply(CODE).splitlines(), strict=True)
        changed_lines += [new.strip() for old, new in lines if old != new]
    assert changed_lines == [
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
    name = "csrc/core/store.h"
    original = (mutate.ROOT / name).read_bytes()

    def execute(self: Any, command: list[str]) -> int:
        is_changed = (tmp_path / name).read_bytes() != original
        return exit_code if "pytest" in command and is_changed else 0

    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "STAGE", tmp_path / "stage")
    monkeypatch.setattr(mutate.ProjectCopy, "_execute", execute)
    assert mutate.main([name, "--count", "2", "--", "tests"]) == 0
    report = capsys.readouterr().out
    assert len(json.loads(report[report.index("{\n") :])["survivors"]) == survivors
    assert (tmp_path / name).read_bytes() == original
