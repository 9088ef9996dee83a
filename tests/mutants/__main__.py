"""All mutants, or those whose names contain a text.

PYTHONPATH=tests python -m mutants [--json FILE] [TEXT]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants.catch import noticed
from mutants.common import write_record
from mutants.faults import MUTANTS


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if how := noticed(None):
        print(f"the tests fail without a fault: {how}")
        return 1
    found = {}
    unexpected = 0
    for mutant in MUTANTS:
        if given.text in mutant.name:
            found[mutant.name] = how = noticed(mutant)
            unexpected += bool(how) == bool(mutant.equivalent)
            print(
                f"{mutant.name}: {how.split(':')[0] or 'SURVIVED'} {mutant.equivalent}", flush=True
            )
    print(f"{sum(map(bool, found.values()))} of {len(found)} noticed, {unexpected} not as expected")
    if given.json:
        write_record(given.json, "mutants", arguments, found)
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
