"""Contains what the reports of all commands have in common: record of the run, and text."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ngram_npu._C as _C
from ngram_npu.doctor import find_version
from ngram_npu.errors import escape_unprintable

BYTES_WARNING = (
    "WARNING: each token is a byte. These figures are far too high and not comparable with others, "
    "because no model has such tokens. Choose another --tokenizer."
)

TOKENIZER_WARNING = (
    "WARNING: this is not your model's tokenizer, on which the figures depend. Choose it: "
    "--tokenizer FOLDER, or --tokenizer ORG/NAME from the local cache."
)

_NAME_WIDTH = 22


class Run:
    """Records the command, start, machine and versions of a measurement, for its report."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._start = time.monotonic()
        now = datetime.datetime.now(datetime.timezone.utc)
        self._date = now.isoformat(timespec="seconds")

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return round(time.monotonic() - self._start, 2)

    def describe(self) -> dict[str, Any]:
        """Returns the fields that every report has."""
        return {
            "command": self._command,
            "date": self._date,
            "machine": describe_machine(),
            "versions": find_versions(),
        }


def describe_machine() -> dict[str, Any]:
    """Returns CPU model, operating system, and the number of cores that this process may use."""
    return {
        "cpu": _find_cpu_model(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": count_usable_cores(),
    }


def find_versions() -> dict[str, str | None]:
    """Returns versions by package; torch is None if it has not been loaded."""
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "numpy": find_version("numpy"),
        "torch": None if torch is None else str(torch.__version__),
        "ngram_npu": _C.__version__,
    }


def count_usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _find_cpu_model() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in cpuinfo.splitlines():
            # x86 has "model name"; some ARM kernels have "Model" or "Hardware" only.
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Table:
    """A part of a report: rows of cells, the header first. `left` are the columns to align left."""

    rows: Sequence[Sequence[str]]
    left: Sequence[int] = ()

    def format_lines(self, indent: str) -> list[str]:
        """Returns the rows as lines, with columns aligned to the right except those in `left`."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = []
        for row in self.rows:
            cells = [
                cell.ljust(width) if column in self.left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append((indent + "  ".join(cells)).rstrip())
        return lines


@dataclass(frozen=True)
class Command:
    """A part of a report: lines for copying into a shell."""

    text: str


Block = str | Table | Command
"""A part of a report. A string is a line of text; an empty string separates parts."""


def format_blocks(blocks: Iterable[Block], indent: str = "") -> str:
    """Returns a report as plain text, without a final newline."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Table):
            lines += block.format_lines(indent)
        else:
            lines.append(block.text if isinstance(block, Command) else escape_unprintable(block))
    return "\n".join(lines)


def format_number(value: float | None, digits: int = 2) -> str:
    """Returns a number as text, and "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def shorten_name(name: str) -> str:
    """Returns the name of an input for tables: at most the last 22 characters."""
    shown = escape_unprintable(name)
    return shown if len(shown) <= _NAME_WIDTH else f"...{shown[3 - _NAME_WIDTH :]}"
