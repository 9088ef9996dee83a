"""Runs a fuzz target and reports the results of the run.

    python -m tools.verify.fuzz build/fuzz/tests/cpp/fuzz_index --seconds 3600 --json FILE

``make fuzz`` builds the target and calls this. A finding is a failure; so is anything that the
episodes never reached (page splits, for example), because drafts were then not compared across it.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_MAX_BYTES = 400
"""Some fifteen events; longer inputs are slower and reach nothing else."""
_FIRST_INPUTS = 50
_REACHED = re.compile(r"^reached (.+): (\d+)$", re.M)
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+)")
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)$", re.M)


def summary(output: str) -> dict[str, Any]:
    """What libFuzzer and the target printed, in numbers.

    Raises:
        ValueError: the output lacks one of them.
    """
    executed = _EXECUTED.search(output)
    coverage = _COVERAGE.findall(output)
    reached = {name: int(times) for name, times in _REACHED.findall(output)}
    if not (executed and coverage and reached):
        raise ValueError("expected libFuzzer's final statistics and the target's counts")
    return {
        "executions": int(executed[1]),
        "coverage": {"edges": int(coverage[-1][0]), "features": int(coverage[-1][1])},
        "reached": reached,
    }


def problems(exit_status: int, output: str) -> list[str]:
    """Why a run is a failure; empty if it is not."""
    if exit_status != 0:
        return [f"the target ended with {exit_status}; its output names the input"]
    reached = summary(output)["reached"]
    return [f"{name}: never reached" for name, times in reached.items() if times == 0]


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
        "-print_final_stats=1",
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--json", type=Path, help="needs ngram_npu installed, for the machine")
    given = parser.parse_args(arguments)
    if given.json is not None:
        from tools.bench import provenance, report  # now: not after an hour
    begun = time.perf_counter()
    status, output = run(given.target, given.seconds, given.seed)
    seconds = time.perf_counter() - begun
    found = problems(status, output)
    if given.json is not None:
        result = {
            "command": f"make fuzz FUZZ_SECONDS={given.seconds} FUZZ_SEED={given.seed}"
            f" FUZZ_JSON={given.json.parent}",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": provenance.machine(),
            "seconds": round(seconds, 1),
            **({} if status else summary(output)),
            "findings": found,
        }
        report.write(given.json, result)
    for problem in found:
        print(f"fuzz: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
