"""Every example in the documents is run as it stands."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_examples(path: Path) -> None:
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_wrong_example_fails(tmp_path: Path) -> None:
    path = tmp_path / "wrong.md"
    path.write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    assert doctest.testfile(str(path), module_relative=False, report=False).failed == 1
