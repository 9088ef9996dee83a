"""All mutants that the record lacks, or those whose names contain a text.

PYTHONPATH=tests python -m mutants [--json FILE] [TEXT]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants.catch import noticed
from mutants.common import read_record, write_record
from mutants.faults import MUTANTS


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    recorded = read_record(given.json) if given.json and given.json.exists() else {}
    found = {mutant.name: recorded[mutant.name] for mutant in MUTANTS if mutant.name in recorded}
    chosen = [m for m in MUTANTS if (given.text in m.name if given.text else m.name not in found)]
    for mutant in chosen:
        found[mutant.name] = how = noticed(mutant)
        print(f"{mutant.name}: {how[:150] or 'SURVIVED'} {mutant.equivalent}", flush=True)
        if given.json:
            write_record(given.json, "mutants", arguments, found)
    unexpected = [m.name for m in chosen if bool(found[m.name]) == bool(m.equivalent)]
    print(f"{len(chosen)} tried, not as expected: {unexpected}")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
