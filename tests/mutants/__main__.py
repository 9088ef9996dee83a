"""All mutants that the record lacks, or those whose names contain one of the texts.

PYTHONPATH=tests python -m mutants [--json FILE] [TEXT ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants.catch import noticed
from mutants.common import read_record, write_record
from mutants.faults import MUTANTS

_NOTE = "made in several runs, each of what the record lacked or of chosen faults; date: the last"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    recorded = read_record(given.json) if given.json and given.json.exists() else {}
    found = {mutant.name: recorded[mutant.name] for mutant in MUTANTS if mutant.name in recorded}
    if given.texts:
        chosen = [m for m in MUTANTS if any(text in m.name for text in given.texts)]
    else:
        chosen = [m for m in MUTANTS if m.name not in found]
    for mutant in chosen:
        found[mutant.name] = how = noticed(mutant)
        stage = how.split(":")[0] or "SURVIVED"
        print(f"{mutant.name}: {stage} {mutant.equivalent}", flush=True)
        if how and mutant.equivalent:  # then the others' tests fail without their faults
            print(how)
            return 1
        if given.json:
            write_record(given.json, "mutants", ["--json", str(given.json)], found, _NOTE)
    survived = [m.name for m in chosen if not found[m.name] and not m.equivalent]
    print(f"{len(chosen)} tried, survived: {survived}")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
