"""Tries the faults and records what noticed each.

    python -m verify.mutants {cuda,ascendc} [part of a name ...] [--json FILE]

Without a part of a name: those that the record lacks.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from repo.verify.mutants import ascendc, by_ascendc_twin, by_twin, cuda

LISTS = {
    "cuda": (cuda.MUTANTS, by_twin.caught),
    "ascendc": (ascendc.MUTANTS, by_ascendc_twin.caught),
}
"""Faults, and the function that says by what one is noticed."""
NOTE = "made in several runs, each of what the record lacked or of chosen faults; date: the last"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.mutants")
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("texts", nargs="*", help="of names; without: all that the record lacks")
    parser.add_argument("--json", type=Path, help="the record")
    given = parser.parse_args()
    mutants, caught = LISTS[given.list]
    recorded = _read_record(given.json) if given.json and given.json.exists() else {}
    found = {mutant.name: recorded[mutant.name] for mutant in mutants if mutant.name in recorded}
    if given.texts:
        chosen = [m for m in mutants if any(text in m.name for text in given.texts)]
    else:
        chosen = [m for m in mutants if m.name not in found]
    with ProcessPoolExecutor() as pool:
        for mutant, how in zip(chosen, pool.map(caught, chosen), strict=True):
            found[mutant.name] = how
            print(f"{mutant.name}: {how[:150] or 'SURVIVED'}", flush=True)
            if given.json:
                _write_record(given.json, given.list, found)
    survived = [m.name for m in chosen if not found[m.name]]
    print(f"{len(chosen)} tried, survived: {survived}")
    return bool(survived)


def _write_record(file: Path, program: str, found: Mapping[str, str]) -> None:
    command = f"python -m verify.mutants {program} --json {shlex.quote(str(file))}"
    record = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "note": NOTE,
        "mutants": len(found),
        "survived": [name for name, how in found.items() if not how],
        "caught_by": {name: how.split(":")[0] for name, how in found.items() if how},
    }
    whole = file.with_suffix(".new")  # others may be reading
    whole.write_text(json.dumps(record, indent=2) + "\n")
    whole.replace(file)


def _read_record(file: Path) -> dict[str, str]:
    """What noticed each fault; empty if nothing did."""
    record = json.loads(file.read_text())
    return {**record["caught_by"], **dict.fromkeys(record["survived"], "")}


if __name__ == "__main__":
    sys.exit(main())
