"""What a run came to, as numbers: tests passed, what ncu counted, and the targets."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.readme import lookup
from tools.gpu.runner import Outcome

_TESTS = re.compile(r"(\d+) (passed|failed|skipped|deselected|errors?)")
_RESULT = re.compile(r"^RESULT (\{.*\})$", re.MULTILINE)


def results(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Per stage, what it said of itself: pytest's last line, or a line ``RESULT {json}``."""
    found: dict[str, Any] = {}
    for outcome in outcomes:
        if said := _RESULT.findall(outcome.tail):
            found[outcome.name] = json.loads(said[-1])
        elif outcome.name in ("tests", "parity") and outcome.tail:
            last = outcome.tail.strip().splitlines()[-1]
            found[outcome.name] = {what: int(n) for n, what in _TESTS.findall(last)}
    return found


def ncu(file: Path) -> list[dict[str, Any]]:
    """ncu's CSV: one entry a kernel launch, with its name and each metric as a number."""
    if not file.is_file():
        return []
    lines = [line for line in file.read_text(errors="replace").splitlines() if line[:1] == '"']
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines):
        name = re.sub(r"^.*::", "", row["Kernel Name"].partition("(")[0])
        launch = launches.setdefault(row["ID"], {"kernel": name})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue
        launch[f"{row['Metric Name']} ({row['Metric Unit']})".removesuffix(" ()")] = value
    return list(launches.values())


def _index_growth(results: Any) -> float:
    one_m = lookup(results, "results[size=128x1m].ours.median_us")
    return float(one_m / lookup(results, "results[size=128x1k].ours.median_us"))


def _index_gain(results: Any) -> float:
    sizes = ("128x16k", "128x32k", "128x128k", "128x1m")
    path = "results[size={}].ratio.ours:engine=scan"
    return min(float(lookup(results, path.format(size))) for size in sizes)


def _at(path: str) -> Callable[[Any], float]:
    return lambda results: float(lookup(results, path))


TARGETS: tuple[tuple[str, str, Callable[[Any], float], str, float], ...] = (
    ("ngram_step_ at 256x128k, in times of reading the live tokens once", "ngram_step_-cuda",
     _at("results[size=256x128k].floors.ours_over_read"), "at most", 1.3),
    ("ngram_step_ at 128x4k, us above an empty graph node", "ngram_step_-cuda",
     _at("results[size=128x4k].floors.ours_above_empty_us"), "at most", 5.0),
    ("V2's Triton pair over ngram_step_ at 128x32k", "ngram_step_-cuda",
     _at("results[size=128x32k].ratio.vllm-v2"), "at least", 3.0),
    ("V1's ngram_gpu over ngram_step_ at 128x32k", "ngram_step_-cuda-v1",
     _at("results[size=128x32k].ratio.vllm-v1"), "at least", 15.0),
    ("ngram_index_step_ at 128 rows, 1m over 1k tokens, L2 cold", "ngram_index_step_-cuda",
     _index_growth, "at most", 2.0),
    ("the rescan over ngram_index_step_, worst from 16k up, L2 cold", "ngram_index_step_-cuda",
     _index_gain, "at least", 1.0),
    ("vLLM's sequence over correct_spec_state_ at 128 requests", "correct_spec_state_-cuda",
     _at("results[size=128x4k].ratio.vllm-correction"), "at least", 4.0),
)  # fmt: skip
"""What it is, the result file, how to read it there, and the bound."""


def targets(out: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    """Each target, what was measured, and whether it is met; None where it was not measured.

    Args:
        files: those in ``out`` that this run wrote; an earlier run's say nothing of it.
    """
    found = []
    for name, file, read, bound, value in TARGETS:
        entry: dict[str, Any] = {"target": name, "bound": bound, "value": value}
        try:
            if f"{file}.json" not in files:
                raise LookupError(f"no {file}.json")
            measured = read(json.loads((out / f"{file}.json").read_text(encoding="utf-8")))
            met = measured <= value if bound == "at most" else measured >= value
            entry |= {"measured": round(measured, 3), "met": met}
        except (OSError, ValueError, LookupError) as error:
            entry |= {"measured": None, "met": None, "reason": f"{type(error).__name__}: {error}"}
        found.append(entry)
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The targets, for people."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    return [
        f"{words[t['met']]:<13}{t['target']}: {t['bound']} {t['value']:g}, "
        f"measured {'-' if t['measured'] is None else t['measured']}"
        for t in found["targets"]
    ]
