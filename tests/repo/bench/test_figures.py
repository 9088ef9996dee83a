"""The tables in the documents equal the committed results; wrong tables are detected."""

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
    tables = docs_tables.tables()
    texts = [path.read_text() for path in docs_tables.documents()]
    for text in texts:
        assert docs_tables.updated(text, tables) == text, "run python -m tools.docs_tables"
    assert [name for name in tables if f"<!-- table: {name} -->" not in "".join(texts)] == []


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("9.9x", "9.8x"), ("| 5.0 | 1234567.0 |\n", ""), ("| us |", "|  |")]
)
def test_tables_are_rewritten_from_results(old: str, new: str, results: Path) -> None:
    text = DOCUMENT.replace(old, new)
    assert docs_tables.updated(text, docs_tables.parse(TABLES), results) == DOCUMENT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- table: one", "<!-- table: three", "no table 'three'"),
        ("# Title", "9 <!-- bench: a.json op -->", "not a table's marker"),
        ("1234567.0 |\n<!-- end -->", "1234567.0 |", "not a table's marker"),
    ],
)
def test_wrong_marker_is_rejected(old: str, new: str, message: str, results: Path) -> None:
    with pytest.raises(LookupError, match=message):
        docs_tables.updated(DOCUMENT.replace(old, new), docs_tables.parse(TABLES), results)


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ("{a.json results[0].us .1f}", "KeyError"),
        ("{a.json results[size=128x32k].us .1f}", "2 entries"),
        ("{a.json results[0].ratio .1f}", "TypeError"),
        ("{ a.json op s}", "not a figure"),
    ],
)
def test_missing_figure_is_rejected(figure: str, message: str, results: Path) -> None:
    with pytest.raises(LookupError, match=message):
        docs_tables.render(["figure", figure], results)
