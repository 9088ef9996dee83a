"""Deliberate faults: tries each of them and records the test that noticed it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest
from twins import ROOT

_NOTE = "made in several runs, each of what the record lacked or of chosen faults; date: the last"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    """From the project's root."""
    old: str
    """Text that occurs there exactly once."""
    new: str
    equivalent: str = ""
    """Why no test can notice the fault; empty if one must."""

    def changed(self) -> str:
        """
        Raises:
            ValueError: the old text stands elsewhere as well, or nowhere.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text stands at {text.count(self.old)} places")
        return text.replace(self.old, self.new)


def failing_tests(arguments: Sequence[str], environment: Mapping[str, str], seconds: int) -> str:
    """pytest's output up to the first failure; empty if all tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "CI": "1", **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "the tests do not end"
    if done.returncode == pytest.ExitCode.OK:
        return ""
    if done.returncode != pytest.ExitCode.TESTS_FAILED and done.returncode > 0:
        raise RuntimeError(f"the tests could not be run: {done.stdout}{done.stderr}")
    # A process that dies at once prints nothing, but that is not a success.
    return done.stdout[-4000:] or f"pytest ended with {done.returncode}"


def main(
    program: str, mutants: Sequence[Mutant], caught: Callable[[Mutant], str], *, jobs: int = 1
) -> int:
    """The command line of a list of mutants: tries those that the record lacks, or those whose
    names contain one of the texts.

    Args:
        caught: by what a mutant is noticed ("stage: how"); empty where by nothing.
    """
    command = f"python -m tools.verify.{program}"
    parser = argparse.ArgumentParser(prog=command)
    parser.add_argument("texts", nargs="*", help="of names; without: all that the record lacks")
    parser.add_argument("--json", type=Path, help="the record")
    given = parser.parse_args()
    recorded = _read_record(given.json) if given.json and given.json.exists() else {}
    found = {mutant.name: recorded[mutant.name] for mutant in mutants if mutant.name in recorded}
    if given.texts:
        chosen = [m for m in mutants if any(text in m.name for text in given.texts)]
    else:
        chosen = [m for m in mutants if m.name not in found]
    with ProcessPoolExecutor(jobs) as pool:
        for mutant, how in zip(chosen, pool.map(caught, chosen), strict=True):
            found[mutant.name] = how
            print(f"{mutant.name}: {how[:150] or 'SURVIVED'} {mutant.equivalent}", flush=True)
            if how and mutant.equivalent:  # then the others' tests fail without their faults
                print(how)
                pool.shutdown(cancel_futures=True)
                return 1
            if given.json:
                _write_record(given.json, command, found)
    survived = [m.name for m in chosen if not found[m.name] and not m.equivalent]
    print(f"{len(chosen)} tried, survived: {survived}")
    return bool(survived)


def _write_record(file: Path, command: str, found: Mapping[str, str]) -> None:
    record = {
        "command": f"{command} --json {shlex.quote(str(file))}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "note": _NOTE,
        "mutants": len(found),
        "survived": [name for name, how in found.items() if not how],
        "caught_by": {name: how.split(":")[0] for name, how in found.items() if how},
    }
    file.write_text(json.dumps(record, indent=2) + "\n")


def _read_record(file: Path) -> dict[str, str]:
    """What noticed each fault; empty if nothing did."""
    record = json.loads(file.read_text())
    return {**record["caught_by"], **dict.fromkeys(record["survived"], "")}
