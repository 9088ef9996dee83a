"""Writes the tables of figures in the documents from the committed results.

python -m tools.docs_tables

A table is in a document between ``<!-- table: NAME -->`` and ``<!-- end -->``;
``tools/bench/tables.txt`` defines its content. Documents have figures only in these tables.
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
"""Rows, the header first, of cells between bars; ``{FILE.json PATH FORMAT}`` is a figure."""

_BLOCK = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
_FIGURE = re.compile(r"\{(?:(\S+\.json) )?(\S.*?) (\S+)\}")
_PATH_STEP = re.compile(
    r"\.?([^.\[\]]+(?:(?<==0)\.\d+)?)|\[(\d+)\]|\[([^=\]]+=(?:[^\[\]]|\[[\d, ]*\])*)\]"
)


def lookup(data: Any, path: str) -> Any:
    """Returns the value at a path such as ``results[0].ratio.read``; ``[key=value,...]`` is the one
    entry with these values.

    Raises:
        LookupError: There is no such value, or more than one such entry.
        ValueError: The path cannot be parsed.
    """
    at = 0
    while at < len(path):
        step = _PATH_STEP.match(path, at)
        if not step:
            raise ValueError(f"path {path!r} at {path[at:]!r}")
        at = step.end()
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
        raise LookupError(f"{len(matches)} entries with {values}")
    return matches[0]


def parse(text: str) -> dict[str, Table]:
    """Returns the tables of a file such as ``tables.txt``, which describes its format."""
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
    """Returns the tables of the documents."""
    return parse((REPOSITORY / "tools" / "bench" / "tables.txt").read_text(encoding="utf-8"))


@cache
def _load(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def render(table: Table, results: Path = RESULTS) -> str:
    """Returns the table as Markdown.

    Raises:
        LookupError: A figure is malformed, missing in the results, or does not fit its format.
    """

    def format_figure(match: re.Match[str]) -> str:
        file, path, form = match.groups()
        try:
            return format(lookup(_load(results / file), path), form)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise LookupError(f"{file} {path}: {type(error).__name__}: {error}") from error

    rows = []
    for row in table:
        rows.append([cell.strip() for cell in _FIGURE.sub(format_figure, row).split("|")])
    rows.insert(1, ["---"] * len(rows[0]))
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if "{" in text:
        raise LookupError(f"not a figure: {text[text.index('{') :].splitlines()[0]}")
    return text


def updated(text: str, tables: dict[str, Table], results: Path = RESULTS) -> str:
    """Returns the document with its tables rendered from the results.

    Raises:
        LookupError: A table or a figure does not exist, or a comment is not a marker.
    """
    rest = _BLOCK.sub("", text)
    if "<!--" in rest:
        raise LookupError(f"not a table's marker: {rest[rest.index('<!--') :].splitlines()[0]}")

    def render_block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise LookupError(f"no table {name!r}")
        return f"<!-- table: {name} -->\n{render(tables[name], results)}<!-- end -->\n"

    return _BLOCK.sub(render_block, text)


def documents() -> list[Path]:
    """Returns README.md, the other documents next to it, and all of docs."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for path in documents():
        path.write_text(updated(path.read_text(encoding="utf-8"), tables()), encoding="utf-8")
