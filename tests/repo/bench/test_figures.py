"""The figures and the curve in the documents are those of the results; a wrong one is caught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import docs_tables
from tools.bench import pictures
from tools.bench.figures import RESULTS

DATA = {
    "results": [
        {"size": "1x1k", "idle": 0.0, "ratio": {"vllm-numba": 9.87, "ours:threads=1": 0.5}},
        {"size": "128x32k", "idle": 0.0, "us": 381.4},
        {"size": "128x32k", "idle": 5.0, "us": 1234567.0},
    ],
    "op": "ngram_step_",
}
NINE = "results[0].ratio.vllm-numba"
LARGE = "results[size=128x32k,idle=0.0]"


TABLES = f"""
[one]
what | ratio | us
@ a.json {LARGE}
step | {{a.json {NINE} .1f}}x | {{.us ,.0f}}

[two]
idle | us
@ a.json results[size=128x32k,idle=$]
$ | {{.us .1f}}
- none = 0.0; 5.0
"""
RIGHT = """# Title

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


def test_documents_say_what_was_measured() -> None:
    tables = docs_tables.tables()
    texts = [path.read_text() for path in docs_tables.documents()]
    for text in texts:
        assert docs_tables.updated(text, tables) == text, "run python -m tools.docs_tables"
    assert [name for name in tables if f"<!-- table: {name} -->" not in "".join(texts)] == []


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("9.9x", "9.8x"), ("| 5.0 | 1234567.0 |\n", ""), ("| us |", "|  |")]
)
def test_tables_are_written(old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    text = RIGHT.replace(old, new)
    assert docs_tables.updated(text, docs_tables.parse(TABLES), tmp_path) == RIGHT


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("<!-- table: one", "<!-- table: three", "no table 'three'"),
        ("# Title", "9 <!-- bench: a.json op -->", "not a table's marker"),
        ("1234567.0 |\n<!-- end -->", "1234567.0 |", "not a table's marker"),
    ],
)
def test_wrong_markers_are_caught(old: str, new: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    with pytest.raises(LookupError, match=says):
        docs_tables.updated(RIGHT.replace(old, new), docs_tables.parse(TABLES), tmp_path)


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        ("{b.json results[0].us .1f}", "FileNotFoundError"),
        ("{a.json results[0].us .1f}", "KeyError"),
        ("{a.json results[size=128x32k].us .1f}", "2 entries"),
        ("{a.json results[7].us .1f}", "IndexError"),
        ("{a.json op .1f}", "ValueError"),
        ("{a.json results[0].ratio .1f}", "TypeError"),
        ("{ a.json op s}", "not a figure"),
    ],
)
def test_figures_that_do_not_exist_are_caught(figure: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    with pytest.raises(LookupError, match=says):
        docs_tables.render(["figure", figure], tmp_path)


def test_the_curve_shows_the_medians(tmp_path: Path) -> None:
    results = json.loads((RESULTS / "ngram_index_step_-curve.json").read_text())["results"]
    (axes,) = pictures.draw_curve({"results": results}).axes
    for line, contestant in zip(axes.get_lines(), pictures.LINES, strict=True):
        for result, x, y in zip(results, line.get_xdata(), line.get_ydata(), strict=True):
            figures = result["ours"] if contestant == "ours" else result["peers"][contestant]
            assert (x, y) == (result["context"], figures["median_us"])
    (tmp_path / "design").mkdir()
    pictures.main(tmp_path)
    for name in ("step-time.svg", "design/drafts.svg", "learn.svg"):
        assert (tmp_path / name).read_text().lstrip().startswith("<?xml")
