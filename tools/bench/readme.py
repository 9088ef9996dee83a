"""Do the documents say what was measured? The marks are described in README.md beside this.

python -m tools.bench.readme [FILE ...]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).parents[2]

_COMMENT = re.compile(r"<!--\s*bench:\s*(.*?)\s*-->")
_MARK = re.compile(r"(\S+\.json)\s+(.+?)(?:\s+([*/])\s*([\d.]+))?")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STEP = re.compile(r"\.?([^.\[\]]+(?:(?<==0)\.\d+)?)|\[(\d+)\]|\[([^=\]]+=[^\]]*)\]")


def documents() -> list[Path]:
    """README.md and all of docs."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def check(files: Iterable[Path], results: Path = RESULTS) -> tuple[int, list[str]]:
    """Compares every marked figure with its result.

    Returns:
        How many marks there are, and a line for each that is wrong.
    """
    marks = 0
    wrong: list[str] = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            since = 0
            for comment in _COMMENT.finditer(line):
                marks += 1
                error = _check_one(line[since : comment.start()], comment[1], results)
                since = comment.end()
                if error:
                    wrong.append(f"{file.name}:{number}: {error}")
    return marks, wrong


def _check_one(before: str, mark: str, results: Path) -> str:
    """What is wrong with one figure; empty: nothing."""
    shown = _NUMBER.findall(before)
    if not shown:
        return f"no figure in front of the mark {mark!r}"
    parts = _MARK.fullmatch(mark)
    if not parts:
        return f"mark {mark!r}: expected FILE.json PATH, perhaps with * NUMBER or / NUMBER"
    name, path, operator, factor = parts.groups()
    try:
        value = lookup(json.loads((results / name).read_text(encoding="utf-8")), path)
    except (OSError, ValueError, LookupError) as error:
        return f"mark {mark!r}: {type(error).__name__}: {error}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"mark {mark!r}: not a number: {value!r}"
    if operator == "*":
        value *= float(factor)
    elif operator == "/":
        value /= float(factor)
    text = shown[-1].replace(",", "")
    decimals = len(text.partition(".")[2])
    # Half a unit of the last digit shown, and a little for what binary fractions cannot hold.
    if abs(float(text) - value) <= 0.5 * 10**-decimals * (1 + 1e-9) + 1e-12:
        return ""
    return f"says {shown[-1]}, but {name} {path} is {value:.{decimals}f}"


def lookup(data: Any, path: str) -> Any:
    """The value at ``results[0].ratio.read``; ``[key=value,...]`` takes the one
    entry that has these.

    Raises:
        LookupError: there is no such value, or more than one such entry.
        ValueError: the path cannot be read.
    """
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if not step:
            raise ValueError(f"path {path!r} at {path[at:]!r}")
        at = step.end()
        key, index, wanted = step.groups()
        if key is not None:
            data = data[key]
        elif index is not None:
            data = data[int(index)]
        else:
            data = _entry(data, wanted)
    return data


def _entry(data: Any, wanted: str) -> Any:
    pairs = [part.partition("=") for part in wanted.split(",")]
    found = [e for e in data if all(str(e.get(key)) == value for key, _, value in pairs)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} entries with {wanted}")
    return found[0]


if __name__ == "__main__":
    marks, wrong = check([Path(name) for name in sys.argv[1:]] or documents())
    print(*wrong, f"{marks} marked figures, {len(wrong)} wrong", sep="\n")
    sys.exit(1 if wrong else 0)
