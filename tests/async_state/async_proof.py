"""Runs many scenarios of the asynchronous scheduler from fixed seeds, and records the results.

    python -m async_state.async_proof --json tools/bench/results/async-proof.json

The number of a scenario determines its seed and the policy of its device.
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
from pathlib import Path
from typing import Any

from async_state.devices import POLICIES
from async_state.engine import Engine, run_scenario
from async_state.faults import FAULTS
from async_state.scenario import Scenario
from tools.bench.measure import describe_run

FIRST_SEED = 1_000_000
NUM_SCENARIOS = 10_000
_MAX_ATTEMPTS = 200


def make_scenario(number: int, has_all_options: bool = False) -> Scenario:
    rng = random.Random(FIRST_SEED + number)
    return Scenario(rng, POLICIES[number % len(POLICIES)], has_all_options)


def run_scenarios(count: int, first: int = 0, has_all_options: bool = False) -> dict[str, Any]:
    """Runs the `count` scenarios from number `first` on. The result lists failures by number."""
    start = time.perf_counter()
    totals: Counter[str] = Counter()
    failures = {}
    for number in range(first, first + count):
        scenario = make_scenario(number, has_all_options)
        try:
            engine = run_scenario(scenario)
        except Exception as error:
            failures[number] = f"{type(error).__name__}: {error}"
            continue
        totals += _count_events(engine)
    return {
        "scenarios": count,
        "first_seed": FIRST_SEED,
        "lossless": count - len(failures),
        "failed": failures,
        "totals": dict(totals),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _count_events(engine: Engine) -> Counter[str]:
    requests = engine.scenario.requests
    return Counter(
        {
            **Counter(f"launches of {name}" for name in engine.device.launches),
            **engine.event_counts,
            "steps": engine.steps,
            "requests": len(requests),
            "steps with graphs": engine.steps * engine.scenario.uses_graphs,
            "steps with M-RoPE": engine.steps * (engine.scenario.position_dims > 1),
            "steps with two stages": engine.steps * (engine.scenario.num_stages > 1),
            "tokens": sum(len(r.tokens) - len(r.prompt) for r in requests),
            "readmissions": sum(r.num_admissions - 1 for r in requests),
        }
    )


def find_detection(name: str) -> tuple[int, str] | None:
    """Returns the first scenario that detects a fault, and its error.

    The result is None if no scenario detects the fault.

    Raises:
        AttributeError, TypeError, NameError: The fault does not fit the current code.
    """
    for number in range(_MAX_ATTEMPTS):
        with FAULTS[name]():
            try:
                run_scenario(make_scenario(number))
            except (AttributeError, TypeError, NameError):
                raise
            except Exception as error:
                return number, f"{type(error).__name__}: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    detections = {name: find_detection(name) for name in FAULTS}
    words = sys.argv[1:] if arguments is None else arguments
    result = {
        **describe_run(f"python -m async_state.async_proof {shlex.join(words)}"),
        **run_scenarios(NUM_SCENARIOS),
        "faults": {
            name: detection and {"scenario": detection[0], "error": detection[1][:120]}
            for name, detection in detections.items()
        },
        "faults_caught": sum(detection is not None for detection in detections.values()),
    }
    text = json.dumps(result, indent=2)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    print(text)
    return 1 if result["failed"] or not all(detections.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
