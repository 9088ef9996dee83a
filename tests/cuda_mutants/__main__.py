"""All mutants, or those whose names contain a text.

PYTHONPATH=tests python -m cuda_mutants [--json FILE] [--jobs N] [TEXT]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mutants.common import write_record

from cuda_mutants.catch import caught
from cuda_mutants.mutants import MUTANTS


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="cuda_mutants")
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if given.text in mutant.name]
    found = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        for mutant, how in zip(chosen, pool.map(caught, chosen), strict=True):
            found[mutant.name] = how
            print(f"{mutant.name}: {how[:150] or 'SURVIVED'}", flush=True)
    survived = [name for name, how in found.items() if not how]
    print(f"{len(found) - len(survived)} of {len(found)} caught")
    if given.json:
        write_record(given.json, "cuda_mutants", arguments, found)
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
