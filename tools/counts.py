"""Counts the project's lines, and the files and argument lists of an operator, for the working tree
or a commit.

    python -m tools.counts [COMMIT] [--op ngram_step_]

- own files: those whose name, without its suffix, is the operator's
- argument lists: places of the product that spell its arguments behind its name (schema,
  signatures, calls that pass them on); its document shows the schema once more
- lines by part; a part is a set of folders (PARTS)
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

PARTS = {
    "product": ("csrc/", "python/", "examples/", "cmake/", "CMakeLists.txt"),
    "tests": ("tests/",),
    "tools": ("tools/", "Makefile", ".ci/"),
    "documents": ("docs/", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
}
CODE = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".md", ""}


def files_of(commit: str | None) -> dict[str, str]:
    """Text of every tracked file of the kinds in CODE, by path."""
    command = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    texts = {}
    for name in filter(None, names):
        if PurePosixPath(name).suffix not in CODE:
            continue
        if commit:
            show = ["git", "show", f"{commit}:{name}"]
            texts[name] = subprocess.run(show, capture_output=True, check=True).stdout.decode()
        else:
            texts[name] = Path(name).read_text()
    return texts


def part_of(name: str) -> str:
    return next((part for part, starts in PARTS.items() if name.startswith(starts)), "other")


def own_files(op: str, names: list[str]) -> list[str]:
    stems = {op, op.rstrip("_"), f"{op}_tiling", f"{op.rstrip('_')}_tiling", f"{op}_test"}
    return [name for name in names if PurePosixPath(name).name.partition(".")[0] in stems]


def argument_lists(op: str, texts: dict[str, str]) -> list[str]:
    """File and line of each, known by ``min_n`` and ``max_n``: for a lookup."""
    found = []
    for name, text in texts.items():
        if part_of(name) != "product" or "/replay/" in name:
            continue
        for match in re.finditer(rf"\b(?:{op}|{op.rstrip('_')})\(", text):
            following = text[match.end() : match.end() + 900].partition(")\n")[0]
            if re.search(r"\bmin_n\b", following) and re.search(r"\bmax_n\b", following):
                found.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--op", default="ngram_step_")
    given = parser.parse_args()
    texts = files_of(given.commit)
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        lines[part_of(name)] += text.count("\n")
    own = own_files(given.op, list(texts))
    lists = argument_lists(given.op, texts)
    print("lines:", ", ".join(f"{part} {lines[part]}" for part in PARTS))
    print(f"files of {given.op}: {len(own)}", *own, sep="\n  ")
    print(f"argument lists of {given.op}: {len(lists)}", *lists, sep="\n  ")


if __name__ == "__main__":
    main()
