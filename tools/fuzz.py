"""Runs a fuzz target built by ``make test-sanitizers`` and checks the run.

    python -m tools.fuzz build/fuzz/tests/cpp/fuzz_store --seconds 3600

A run fails if the target finds a fault. It also fails if an event such as a replaced block never
occurs, because then the target did not test drafting across that event.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path

_MAX_BYTES = 400
"""Maximum size of an input, about fifteen events; longer inputs reach no other code."""
_FIRST_INPUTS = 50
"""Number of random inputs in a new corpus."""
_EVENT_COUNT = re.compile(r"^reached (.+): (\d+)$", re.M)


def find_problems(exit_status: int, output: str) -> list[str]:
    """Returns the reasons why a run failed; empty if it passed."""
    if exit_status != 0:
        return [f"the target ended with status {exit_status}; see the name of the input above"]
    counts = _EVENT_COUNT.findall(output)
    if not counts:
        return ["expected counts `reached ...`, got none"]
    return [f"{name}: never reached" for name, count in counts if int(count) == 0]


def run_target(target: Path, seconds: int, seed: int) -> tuple[int, str]:
    """Returns libFuzzer's exit status and output, and prints the output as it appears."""
    corpus = target.parent / f"corpus-{target.name}"
    corpus.mkdir(exist_ok=True)
    # From an empty corpus, libFuzzer needs a minute until inputs have this length.
    for number in range(_FIRST_INPUTS):
        (corpus / f"first-{number}").write_bytes(random.Random(number).randbytes(_MAX_BYTES))
    command = [
        str(target),
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={_MAX_BYTES}",
        "-len_control=0",  # otherwise inputs stay at about 30 bytes
        "-entropic=0",  # computing the weights of -entropic takes half of the time
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
    parser.add_argument("--seed", type=int, default=0, help="0: a new seed in each run")
    options = parser.parse_args()
    problems = find_problems(*run_target(options.target, options.seconds, options.seed))
    for problem in problems:
        print(f"fuzz: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
