"""Writes the tables of measured numbers in the documents from the committed results.

    python -m tools.docs_tables

A table is in a document between ``<!-- table: NAME -->`` and ``<!-- end -->``;
``tools/bench/tables.txt`` defines its content. Documents have such numbers only in these tables.
A *figure* is a position in a table that is filled with a number from a results file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "tools" / "bench" / "results"

Table = list[str]
"""The rows of a table, the header first. Bars separate the cells of a row, and
``{FILE.json PATH FORMAT}`` is a figure."""

_BLOCK = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
_FIGURE = re.compile(r"\{(?:(\S+\.json) )?(\S.*?) (\S+)\}")
_PATH_STEP = re.compile(
    r"\.?([^.\[\]]+(?:(?<==0)\.\d+)?)|\[(\d+)\]|\[([^=\]]+=(?:[^\[\]]|\[[\d, ]*\])*)\]"
)


def find_value(data: Any, path: str) -> Any:
    """Returns the value at a path such as ``results[0].ratio.read``. ``[key=value,...]`` selects
    the only entry of a list with these values.

    Raises:
        LookupError: There is no such value, or not exactly one such entry.
        ValueError: The path cannot be parsed.
    """
    offset = 0
    while offset < len(path):
        step = _PATH_STEP.match(path, offset)
        if not step:
            raise ValueError(f"path {path!r}: expected .key or [...] at {path[offset:]!r}")
        offset = step.end()
        key, index, values = step.groups()
        if key is None:
            key = int(index) if index is not None else _find_entry(data, values)
        data = data[key]
    return data


def _find_entry(data: Any, values: str) -> int:
    # In the text of a value, such as [2, 5], a comma is followed by a space.
    pairs = [part.partition("=") for part in re.split(",(?! )", values)]
    matches = [
        index
        for index, entry in enumerate(data)
        if all(str(entry.get(key)) == value for key, _, value in pairs)
    ]
    if len(matches) != 1:
        raise LookupError(f"expected one entry with {values}, got {len(matches)}")
    return matches[0]


def parse_tables(text: str) -> dict[str, Table]:
    """Returns the tables in a text with the format that ``tables.txt`` describes."""
    tables: dict[str, Table] = {}
    file = base_path = pattern = ""

    def complete_figure(figure: re.Match[str]) -> str:
        path = base_path + figure[2] if figure[2].startswith(".") else figure[2]
        return f"{{{figure[1] or file} {path} {figure[3]}}}"

    for line in text.splitlines():
        if line.startswith("["):
            table = tables[line[1:-1]] = []
        elif line.startswith("@ "):
            file, _, base_path = line[2:].partition(" ")
        elif line.startswith("- "):
            first_cell, other_cells = pattern.split("|", 1)
            for item in line[2:].split("; "):
                label, _, key = item.partition(" = ")
                values = other_cells.replace("$", key or label)
                table.append(f"{first_cell.replace('$', label)}|{values}")
        elif line and not line.startswith("#"):
            pattern = _FIGURE.sub(complete_figure, line)
            if "$" not in pattern:
                table.append(pattern)
    return tables


@cache
def read_tables() -> dict[str, Table]:
    """Returns the tables of the documents, from ``tables.txt``."""
    return parse_tables((REPOSITORY / "tools" / "bench" / "tables.txt").read_text(encoding="utf-8"))


@cache
def _load_results(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def render_table(table: Table, results: Path = RESULTS) -> str:
    """Returns the table as Markdown.

    Raises:
        LookupError: A figure is malformed, its value does not exist in the results, or the value
            does not fit the format.
    """

    def format_figure(match: re.Match[str]) -> str:
        file, path, format_spec = match.groups()
        try:
            return format(find_value(_load_results(results / file), path), format_spec)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{file} {path}: {type(error).__name__}: {error}") from error

    rows = []
    for row in table:
        rows.append([cell.strip() for cell in _FIGURE.sub(format_figure, row).split("|")])
    rows.insert(1, ["---"] * len(rows[0]))
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if malformed := re.search("{.*", text):
        raise LookupError(f"expected a figure {{FILE.json PATH FORMAT}}, got {malformed[0]}")
    return text


def update_document(text: str, tables: dict[str, Table], results: Path = RESULTS) -> str:
    """Returns the document with its tables rendered from the results.

    Raises:
        LookupError: A table or a figure does not exist, or a comment is not a table's marker.
    """
    if comment := re.search("<!--.*", _BLOCK.sub("", text)):
        raise LookupError(f"expected a table's markers, got {comment[0]}")

    def render_block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise LookupError(f"expected a table in tables.txt, got {name!r}")
        return f"<!-- table: {name} -->\n{render_table(tables[name], results)}<!-- end -->\n"

    return _BLOCK.sub(render_block, text)


def find_documents() -> list[Path]:
    """Returns README.md, the other documents next to it, and all documents in docs."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for path in find_documents():
        text = update_document(path.read_text(encoding="utf-8"), read_tables())
        path.write_text(text, encoding="utf-8")
