"""The figures and the curve in the documents are those of the results; a wrong one is caught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import curve, readme

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


def test_documents_say_what_was_measured() -> None:
    marks, wrong = readme.check(readme.documents())
    assert marks > 100
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"| 9.9x <!-- bench: a.json {NINE} --> | 10 <!--bench: a.json {NINE}-->", ""),
        (f"0.38 ms <!-- bench: a.json {LARGE}.us / 1000 -->", ""),
        (f"381,400 ns <!-- bench: a.json {LARGE}.us * 1000 -->", ""),
        ("0.50 <!-- bench: a.json results[size=1x1k].ratio.ours:threads=1 -->", ""),
        (f"| 9.9 <!-- bench: a.json {NINE} --> | 9.8x <!-- bench: a.json {NINE} -->", "is 9.9"),
        (f"0.39 ms <!-- bench: a.json {LARGE}.us / 1000 -->", "is 0.38"),
        (f"many <!-- bench: a.json {NINE} -->", "no figure"),
        (f"9.9 <!-- bench: a.json {NINE} --><!-- bench: a.json {NINE} -->", "no figure"),
        ("1 <!-- bench: b.json results[0].us -->", "FileNotFoundError"),
        ("1 <!-- bench: a.json results[0].us -->", "KeyError"),
        ("1 <!-- bench: a.json results[size=128x32k].us -->", "2 entries"),
        ("1 <!-- bench: a.json op -->", "not a number"),
        ("1 <!-- bench: a.json -->", "expected FILE.json PATH"),
    ],
)
def test_wrong_figures_are_caught(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    document = tmp_path / "README.md"
    document.write_text(f"# Title\n\n{line}\n")
    marks, wrong = readme.check([document], tmp_path)
    assert marks == line.count("<!--")
    assert len(wrong) == bool(says)
    if says:
        assert wrong[0].startswith("README.md:3: ")
        assert says in wrong[0]


def test_the_curve_shows_the_medians(tmp_path: Path) -> None:
    results = json.loads(curve.RESULT.read_text())["results"]
    (axes,) = curve.draw({"results": results}).axes
    for line, contestant in zip(axes.get_lines(), curve.LINES, strict=True):
        for result, x, y in zip(results, line.get_xdata(), line.get_ydata(), strict=True):
            figures = result["ours"] if contestant == "ours" else result["peers"][contestant]
            assert (x, y) == (result["context"], figures["median_us"])
    curve.main([str(curve.RESULT), str(tmp_path / "curve.svg")])
    assert (tmp_path / "curve.svg").read_text().lstrip().startswith("<?xml")
