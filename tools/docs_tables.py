"""Writes the tables of figures in the documents from the committed results.

python -m tools.docs_tables

A table stands in a document between ``<!-- table: NAME -->`` and ``<!-- end -->``;
``tools/bench/tables.txt`` says what is in it. Figures stand in these tables and nowhere else.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from tools.bench.figures import RESULTS, lookup

REPOSITORY = Path(__file__).parents[1]

Table = list[str]
"""Rows, the header first, of cells between bars; ``{FILE.json PATH FORMAT}`` is a figure."""

_BLOCK = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
_FIGURE = re.compile(r"\{(?:(\S+\.json) )?(\S.*?) (\S+)\}")


def parse(text: str) -> dict[str, Table]:
    """The tables of a file such as ``tables.txt``, whose head describes the format."""
    tables: dict[str, Table] = {}
    file = base = pattern = ""

    def complete(figure: re.Match[str]) -> str:
        path = base + figure[2] if figure[2].startswith(".") else figure[2]
        return f"{{{figure[1] or file} {path} {figure[3]}}}"

    for line in text.splitlines():
        if line.startswith("["):
            table = tables[line[1:-1]] = []
        elif line.startswith("@ "):
            file, _, base = line[2:].partition(" ")
        elif line.startswith("- "):
            first, rest = pattern.split("|", 1)
            for item in line[2:].split("; "):
                label, _, key = item.partition(" = ")
                table.append(f"{first.replace('$', label)}|{rest.replace('$', key or label)}")
        elif line and not line.startswith("#"):
            pattern = _FIGURE.sub(complete, line)
            if "$" not in pattern:
                table.append(pattern)
    return tables


@cache
def tables() -> dict[str, Table]:
    """The documents'."""
    return parse((REPOSITORY / "tools" / "bench" / "tables.txt").read_text(encoding="utf-8"))


@cache
def _load(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def render(table: Table, results: Path = RESULTS) -> str:
    """The table as Markdown.

    Raises:
        LookupError: a figure is malformed, not in the results, or cannot be shown in its format.
    """

    def figure(match: re.Match[str]) -> str:
        file, path, form = match.groups()
        try:
            return format(lookup(_load(results / file), path), form)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{file} {path}: {type(error).__name__}: {error}") from error

    rows = [[cell.strip() for cell in _FIGURE.sub(figure, row).split("|")] for row in table]
    rows.insert(1, ["---"] * len(rows[0]))
    shown = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if "{" in shown:
        raise LookupError(f"not a figure: {shown[shown.index('{') :].splitlines()[0]}")
    return shown


def updated(text: str, tables: dict[str, Table], results: Path = RESULTS) -> str:
    """The document with its tables as the results have them.

    Raises:
        LookupError: a table or a figure that does not exist, or a comment that is no marker.
    """
    rest = _BLOCK.sub("", text)
    if "<!--" in rest:
        raise LookupError(f"not a table's marker: {rest[rest.index('<!--') :].splitlines()[0]}")

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise LookupError(f"no table {name!r}")
        return f"<!-- table: {name} -->\n{render(tables[name], results)}<!-- end -->\n"

    return _BLOCK.sub(block, text)


def documents() -> list[Path]:
    """README.md and its like, and all of docs."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for path in documents():
        path.write_text(updated(path.read_text(encoding="utf-8"), tables()), encoding="utf-8")
