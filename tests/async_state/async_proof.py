"""Runs many scenarios of the asynchronous loop from committed seeds, and records the results.

    python -m async_state.async_proof --json tools/bench/results/async-proof.json

A scenario is wholly determined by its number: seed and device policy follow from it.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from async_state.engine import Engine, run
from async_state.mutants import MUTANTS
from async_state.scenario import DEVICES, Scenario
from tools.bench import provenance

FIRST_SEED = 1_000_000
SCENARIOS = 10_000
_MUTANT_TRIES = 200


def scenario(number: int) -> Scenario:
    return Scenario(random.Random(FIRST_SEED + number), DEVICES[number % len(DEVICES)])


def prove(count: int, first: int = 0) -> dict[str, Any]:
    """Runs that many scenarios from number `first` on; the failed ones are listed by number."""
    begun = time.perf_counter()
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failed = {}
    for number in range(first, first + count):
        case = scenario(number)
        kinds += Counter(
            {
                f"device {case.device_name}": 1,
                f"engine {case.engine}{', ladder' if case.ladder else ''}": 1,
                f"drafts {case.drafting}": 1,
                f"reconciled {case.reconciling}": 1,
                "unpadded drafter batch" if case.unpadded else "padded drafter batch": 1,
                "dense rows" if case.dense_rows else "row indices": 1,
            }
        )
        try:
            engine = run(case)
        except Exception as error:
            failed[number] = f"{type(error).__name__}: {error}"
            continue
        total += Counter(_figures(engine))
    return {
        "scenarios": count,
        "first_seed": FIRST_SEED,
        "lossless": count - len(failed),
        "failed": failed,
        "kinds": dict(sorted(kinds.items())),
        "totals": dict(total),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def _figures(engine: Engine) -> dict[str, int]:
    requests = engine.scenario.requests
    return {
        "steps": engine.steps,
        "requests": len(requests),
        "tokens": sum(len(r.tokens) - len(r.prompt) for r in requests),
        "readmissions": sum(r.residency - 1 for r in requests),
        **engine.counts,
    }


def caught_by(name: str, first: int = 0) -> tuple[int, str] | None:
    """The first scenario on a late device that notices a fault, and how; None if none does.
    Those before number `first` are left out.

    Raises:
        AttributeError, TypeError, NameError: the fault no longer fits what it is put into. That is
            a broken test, not a fault noticed.
    """
    for number in range(first, first + _MUTANT_TRIES):
        if DEVICES[number % len(DEVICES)] == "cpu":
            continue
        with MUTANTS[name]():
            try:
                run(scenario(number))
            except (AttributeError, TypeError, NameError):
                raise
            except Exception as error:
                return number, f"{type(error).__name__}: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    result = {
        "command": "python -m async_state.async_proof "
        + shlex.join(sys.argv[1:] if arguments is None else arguments),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": provenance.machine(),
        **prove(SCENARIOS),
    }
    faults = {name: caught_by(name) for name in MUTANTS}
    result["faults"] = {
        name: {"scenario": found[0], "error": found[1][:120]} if found else None
        for name, found in faults.items()
    }
    result["faults_caught"] = sum(found is not None for found in faults.values())
    result["versions"] = provenance.versions()
    text = json.dumps(result, indent=2)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")
    print(text)
    return 1 if result["failed"] or not all(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
