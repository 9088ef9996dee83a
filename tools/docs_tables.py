"""Writes the tables of figures in the documents from the committed results.

python -m tools.docs_tables            # rewrites the tables
python -m tools.docs_tables --check    # lists the tables that differ from the results

A table stands in a document between ``<!-- table: NAME -->`` and ``<!-- end -->``;
``tools/bench/tables.txt`` says what is in it. Figures stand in these tables and nowhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tools.bench.figures import RESULTS, lookup

REPOSITORY = Path(__file__).parents[1]
TABLES = REPOSITORY / "tools" / "bench" / "tables.txt"

Table = list[list[str]]
"""Rows of cells, the header first; ``{FILE.json PATH FORMAT}`` stands for a figure."""

_BLOCK = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
_FIGURE = re.compile(r"\{(\S+\.json) (.+?) (\S+)\}")


def parse(text: str) -> dict[str, Table]:
    """The tables of a file such as ``tables.txt``, whose head describes the format."""
    tables: dict[str, Table] = {}
    source = pattern = ""
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            tables[line[1:-1]] = table = []
            source = ""
        elif line.startswith("@ "):
            source = line[2:]
        elif line.startswith("- "):
            for item in line[2:].split("; "):
                label, _, key = item.partition(" = ")
                first, *cells = _cells(pattern, source)
                table.append(
                    [
                        first.replace("$", label),
                        *(cell.replace("$", key or label) for cell in cells),
                    ]
                )
        elif line and not line.startswith("#"):
            pattern = line
            if "$" not in line:
                table.append(_cells(line, source))
    return tables


def _cells(line: str, source: str) -> list[str]:
    """A row's cells, their paths made complete."""
    file, _, base = source.partition(" ")
    line = re.sub(r"\{(?=\.[^.]|\[)", lambda _: f"{{{file} {base}", line)
    line = re.sub(r"\{(\S+\.json) \.", lambda match: f"{{{match[1]} {base}.", line)
    return [cell.strip() for cell in line.split("|")]


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

    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    shown = [_FIGURE.sub(figure, " | ".join(line)) for line in lines]
    if left := [line for line in shown if "{" in line]:
        raise LookupError(f"not a figure: {left[0]}")
    return "".join(f"| {line} |\n" for line in shown)


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


def differences(
    files: Iterable[Path], tables: dict[str, Table], results: Path = RESULTS
) -> list[str]:
    """A line for each document that is not as the results have it."""
    wrong = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        try:
            new = updated(text, tables, results)
        except LookupError as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if text != new:
            pairs = zip([*text.splitlines(), ""], [*new.splitlines(), ""], strict=False)
            number, (old, right) = next((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1])
            wrong.append(f"{path.name}:{number}: says {old!r}, the results {right!r}")
    return wrong


def main() -> None:
    tables = parse(TABLES.read_text(encoding="utf-8"))
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(differences(documents(), tables)) or 0)
    for path in documents():
        path.write_text(updated(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
