"""Tests that measured figures in the documents occur in the committed results.

A line ``<!-- figures: a.json b.json -->`` before a table names its files in tools/bench/results.
Every number of the table, except in the first column and in the header, must be a number of these
files, rounded as in the document. Numbers in backticks are settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_TABLE = re.compile(r"<!-- figures: (.+) -->\n+\|.*\n\|[-:| ]+\n((?:\|.*\n?)+)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from list_numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def find_unknown_figures(text: str, results: Path) -> list[str]:
    """Returns the figures of a document that do not occur in the files that their tables name."""
    unknown = []
    for names, body in _TABLE.findall(text):
        files = [json.loads((results / name).read_text()) for name in names.split()]
        values = list(list_numbers(files))
        for row in body.splitlines():
            cells = re.sub("`[^`]*`", "", row).strip("|").split("|")[1:]
            for figure in _NUMBER.findall(" ".join(cells)):
                plain = figure.replace(",", "")
                digits = len(plain.partition(".")[2])
                if not any(f"{value:.{digits}f}" == plain for value in values):
                    unknown.append(figure)
    return unknown


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_of_document_occur_in_the_results(path: Path) -> None:
    assert find_unknown_figures(path.read_text(), RESULTS) == []


def test_wrong_figure_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"x": [{"us": 1234.56, "ok": True}, 0.98765]}))
    table = "<!-- figures: a.json -->\n| 5 | a |\n|---|---|\n| 7 | 1,235 us, 0.99x, `k=3` |\n"
    assert find_unknown_figures(table, tmp_path) == []
    wrong = table.replace("0.99", "0.98").replace("`k=3`", "3")
    assert find_unknown_figures(wrong, tmp_path) == ["0.98", "3"]
