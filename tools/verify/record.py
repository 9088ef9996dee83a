"""The record of a check: its results with command, date and machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from tools.bench import environment, report


def publish(
    module: str, arguments: Sequence[str] | None, given: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Prints it, and writes it to ``given.json`` where that is a file; ``given.note`` is in it."""
    result = {
        "command": shlex.join(["python", "-m", module, *(arguments or sys.argv[1:])]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": environment.machine(),
        "note": given.note,
        **found,
    }
    if given.json is not None:
        report.write(given.json, result)
    print(report.laid_out(result))
