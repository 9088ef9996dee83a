"""Tests that examples in the documents run unchanged, that links have targets, that lines are not
too long, and that all environment variables are named."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from ngram_npu.engines.vllm.options import CORRECTION, OPTION_TYPES, PREFIX

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_examples_in_document_pass(path: Path) -> None:
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def find_problems(path: Path) -> list[str]:
    """Returns the problems of a document's links and lines."""
    problems = []
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > 160 and not line.startswith("|") and not re.search(r"\]\(| -> \(", line):
            problems.append(f"{path.name}:{number}: {len(line)} characters")
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", text):
        file = path.parent / target if target else path
        if not file.exists():
            problems.append(f"{path.name}: no {target}")
        elif anchor and anchor not in _list_anchors(file.read_text()):
            problems.append(f"{path.name}: no {target}#{anchor}")
    return problems


def _list_anchors(text: str) -> list[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return slugs + re.findall(r'<a id="([^"]+)">', text)


def test_documents_have_valid_links_and_lines() -> None:
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/**/*.md")]
    problems = [problem for path in paths for problem in find_problems(path)]
    assert not problems, "\n".join(problems)


def test_documents_name_all_environment_variables() -> None:
    """Those of options are documented by their prefix."""
    pattern = re.compile(r'"(NGRAM_NPU_[A-Z_]*[A-Z])"')
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    names = {name for path in sources for name in pattern.findall(path.read_text())} | {CORRECTION}
    documents = "".join(
        path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    )
    named = set(re.findall(r"NGRAM_NPU_[A-Z_]*[A-Z]", documents))
    assert "NGRAM_NPU_INSTRUCTION_SET" in names
    assert names - named <= {f"{PREFIX}{option.upper()}" for option in OPTION_TYPES}


def test_wrong_link_or_long_line_is_reported(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("## `a_b`: one, two\n")
    path = tmp_path / "a.md"
    path.write_text(
        "[a](other.md) [b](other.md#a_b-one-two) [c](https://x.y/z) [d](no.md) [e](other.md#no)\n"
        f"[f](#no) {'x' * 160}\n| {'x' * 160} |\n{'x' * 161}\n"
    )
    problems = ["a.md:4: 161 characters", "a.md: no no.md", "a.md: no other.md#no", "a.md: no #no"]
    assert find_problems(path) == problems
