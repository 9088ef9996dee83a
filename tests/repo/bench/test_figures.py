"""Tests that tables in documents equal the committed results and that errors are detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import docs_tables

DATA = {
    "results": [
        {"size": "1x1k", "idle": 0.0, "ratio": {"vllm-numba": 9.87, "ours:threads=1": 0.5}},
        {"size": "128x32k", "idle": 0.0, "us": 381.4},
        {"size": "128x32k", "idle": 5.0, "us": 1234567.0},
    ],
    "op": "ngram_step_",
}
# "@" selects a file and values, "$" is each item of the last line, "label =" is the shown text.
TABLES = """
[one]
what | ratio | us
@ a.json results[size=128x32k,idle=0.0]
step | {a.json results[0].ratio.vllm-numba .1f}x | {.us ,.0f}

[two]
idle | us
@ a.json results[size=128x32k,idle=$]
$ | {.us .1f}
- none = 0.0; 5.0
"""
DOCUMENT = """# Title

<!-- table: one -->
| what | ratio | us |
| --- | --- | --- |
| step | 9.9x | 381 |
<!-- end -->

<!-- table: two -->
| idle | us |
| --- | --- |
| none | 381.4 |
| 5.0 | 1234567.0 |
<!-- end -->
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    return tmp_path


def test_documents_equal_the_results() -> None:
    tables = docs_tables.read_tables()
    texts = [path.read_text() for path in docs_tables.find_documents()]
    for text in texts:
        assert docs_tables.update_document(text, tables) == text, "run python -m tools.docs_tables"
    assert [name for name in tables if f"<!-- table: {name} -->" not in "".join(texts)] == []


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("9.9x", "9.8x"), ("| 5.0 | 1234567.0 |\n", ""), ("| us |", "|  |")]
)
def test_update_document_rewrites_tables_from_results(old: str, new: str, results: Path) -> None:
    text = DOCUMENT.replace(old, new)
    assert docs_tables.update_document(text, docs_tables.parse_tables(TABLES), results) == DOCUMENT
