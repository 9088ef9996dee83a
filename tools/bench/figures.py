"""Reads single values out of the committed results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

_STEP = re.compile(
    r"\.?([^.\[\]]+(?:(?<==0)\.\d+)?)|\[(\d+)\]|\[([^=\]]+=(?:[^\[\]]|\[[\d, ]*\])*)\]"
)


def lookup(data: Any, path: str) -> Any:
    """The value at ``results[0].ratio.read``; ``[key=value,...]`` takes the one
    entry that has these values.

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
        if key is None:
            key = int(index) if index is not None else _entry(data, wanted)
        data = data[key]
    return data


def _entry(data: Any, wanted: str) -> int:
    # In the text of a value, such as [2, 5], a comma is followed by a space.
    pairs = [part.partition("=") for part in re.split(",(?! )", wanted)]
    found = [
        i for i, e in enumerate(data) if all(str(e.get(key)) == value for key, _, value in pairs)
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} entries with {wanted}")
    return found[0]
