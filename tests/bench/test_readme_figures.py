"""Every figure that the documents mark as measured is in the results; a wrong one is caught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import readme
from tools.bench.cli import main

DATA = {
    "results": [
        {"size": "1x1k", "idle": 0.0, "ratio": {"vllm-numba": 9.87, "ours:threads=1": 0.5}},
        {"size": "128x32k", "idle": 0.0, "us": 381.4, "ratio": {"vllm-numba": 11.249}},
        {"size": "128x32k", "idle": 5.0, "us": 1234567.0},
    ],
    "op": "ngram_step_",
}
LARGE = "results[size=128x32k,idle=0.0]"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps(DATA))
    return tmp_path


def check(line: str, results: Path) -> tuple[int, list[str]]:
    document = results / "README.md"
    document.write_text(f"# Title\n\n{line}\n")
    return readme.check([document], results)


def test_documents_say_what_was_measured() -> None:
    _, wrong = readme.check(readme.documents())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "| 9.9x <!-- bench: a.json results[0].ratio.vllm-numba --> |",
        "10 times <!-- bench: a.json results[0].ratio.vllm-numba -->",
        f"11.25 <!-- bench: a.json {LARGE}.ratio.vllm-numba -->",
        f"11.2x <!--bench: a.json {LARGE}.ratio.vllm-numba-->",
        f"0.38 ms <!-- bench: a.json {LARGE}.us / 1000 -->",
        f"381,400 ns <!-- bench: a.json {LARGE}.us * 1000 -->",
        "1,234,567 <!-- bench: a.json results[2].us -->",
        "0.50 <!-- bench: a.json results[size=1x1k].ratio.ours:threads=1 -->",
        "no mark: 99.9",
    ],
)
def test_right_figures(line: str, results: Path) -> None:
    marks, wrong = check(line, results)
    assert wrong == []
    assert marks == line.count("<!--")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("9.8x <!-- bench: a.json results[0].ratio.vllm-numba -->", "is 9.9"),
        (f"0.39 ms <!-- bench: a.json {LARGE}.us / 1000 -->", "is 0.38"),
        (f"381 ms <!-- bench: a.json {LARGE}.us / 1000 -->", "says 381"),
        ("many <!-- bench: a.json results[0].ratio.vllm-numba -->", "no figure"),
        ("1 <!-- bench: b.json results[0].us -->", "FileNotFoundError"),
        ("1 <!-- bench: a.json results[7].us -->", "IndexError"),
        ("1 <!-- bench: a.json results[0].us -->", "KeyError"),
        ("1 <!-- bench: a.json results[size=9x9].us -->", "0 entries"),
        ("1 <!-- bench: a.json results[size=128x32k].us -->", "2 entries"),
        ("1 <!-- bench: a.json op -->", "not a number"),
        ("1 <!-- bench: a.json -->", "expected FILE.json PATH"),
    ],
)
def test_wrong_figures_are_caught(line: str, says: str, results: Path) -> None:
    marks, wrong = check(line, results)
    assert marks == 1
    assert len(wrong) == 1
    assert wrong[0].startswith("README.md:3: ")
    assert says in wrong[0]


def test_each_figure_of_a_line_has_its_own_mark(results: Path) -> None:
    mark = "<!-- bench: a.json results[0].ratio.vllm-numba -->"
    marks, wrong = check(f"| 9.9 {mark} | 9.9 {mark} | 7.7 {mark} |", results)
    assert marks == 3
    assert len(wrong) == 1
    assert "says 7.7" in wrong[0]
    _, wrong = check(f"| 9.9 {mark} {mark}", results)
    assert "no figure" in wrong[0]


def test_command(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = results / "README.md"
    document.write_text("5 <!-- bench: none.json a -->\n")
    assert main(["--check-readme", str(document)]) == 1
    assert main(["--check-readme"]) == 0
    assert "0 wrong" in capsys.readouterr().out
