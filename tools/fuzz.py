"""Runs a fuzz target, which ``make fuzz`` builds, and judges the run.

    python -m tools.fuzz build/fuzz/tests/cpp/fuzz_index --seconds 3600

A finding is a failure; so is anything that the episodes never reached (page splits, for example),
because drafts were then not compared across it.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path

_MAX_BYTES = 400
"""Some fifteen events; longer inputs are slower and reach nothing else."""
_FIRST_INPUTS = 50
_REACHED = re.compile(r"^reached (.+): (\d+)$", re.M)


def problems(exit_status: int, output: str) -> list[str]:
    """Why a run is a failure; empty if it is not."""
    if exit_status != 0:
        return [f"the target ended with {exit_status}; its output names the input"]
    reached = _REACHED.findall(output)
    if not reached:
        return ["the target did not say what it reached"]
    return [f"{name}: never reached" for name, times in reached if int(times) == 0]


def run(target: Path, seconds: int, seed: int) -> tuple[int, str]:
    """libFuzzer's exit status and its output, which is also printed at once."""
    corpus = target.parent / f"corpus-{target.name}"
    corpus.mkdir(exist_ok=True)
    for number in range(_FIRST_INPUTS):  # an empty corpus takes a minute to grow as long
        opening = random.Random(number).randbytes(_MAX_BYTES)
        (corpus / f"first-{number}").write_bytes(opening)
    command = [
        str(target),
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={_MAX_BYTES}",
        "-len_control=0",  # else inputs stay at some 30 bytes
        "-entropic=0",  # half of the time went into its weights
        f"-artifact_prefix={target.parent}/",
        str(corpus),
    ]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    given = parser.parse_args()
    found = problems(*run(given.target, given.seconds, given.seed))
    for problem in found:
        print(f"fuzz: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
