"""The targets for a run's figures (docs/design/gpu-targets.md), and ncu's counters."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.figures import lookup

At = Callable[[str], Any]
"""The value at a path of a result file."""


def _index_growth(at: At) -> float:
    one_m = at("results[size=128x1m].ours.median_us")
    return float(one_m / at("results[size=128x1k].ours.median_us"))


def _index_gain(at: At) -> float:
    sizes = ("128x16k", "128x32k", "128x128k", "128x1m")
    return min(float(at(f"results[size={size}].ratio.ours:engine=scan")) for size in sizes)


TARGETS: tuple[tuple[str, str, Callable[[At], float], str, float], ...] = (
    ("ngram_step_ at 256x128k, in times of reading the live tokens once", "ngram_step_-cuda",
     lambda at: at("results[size=256x128k].floors.ours_over_read"), "at most", 1.3),
    ("ngram_step_ at 128x4k, us above an empty graph node", "ngram_step_-cuda",
     lambda at: at("results[size=128x4k].floors.ours_above_empty_us"), "at most", 5.0),
    ("V2's Triton pair over ngram_step_ at 128x32k", "ngram_step_-cuda",
     lambda at: at("results[size=128x32k].ratio.vllm-v2"), "at least", 3.0),
    ("V1's ngram_gpu over ngram_step_ at 128x32k", "ngram_step_-cuda-v1",
     lambda at: at("results[size=128x32k].ratio.vllm-v1"), "at least", 15.0),
    ("ngram_index_step_ at 128 rows, 1m over 1k tokens, L2 cold", "ngram_index_step_-cuda",
     _index_growth, "at most", 2.0),
    ("the rescan over ngram_index_step_, worst from 16k up, L2 cold", "ngram_index_step_-cuda",
     _index_gain, "at least", 1.0),
    ("vLLM's sequence over correct_spec_state_ at 128 requests", "correct_spec_state_-cuda",
     lambda at: at("results[size=128x4k].ratio.vllm-correction"), "at least", 4.0),
)  # fmt: skip
"""Target, result file, how to read the value from it, and the bound."""


def targets(out: Path, files: Collection[str]) -> list[dict[str, Any]]:
    """Returns for each target the measured value and whether it is met.

    Args:
        files: the files in ``out`` that this run wrote; an earlier run's are ignored.
    """
    found = []
    for name, file, read, bound, value in TARGETS:
        try:
            if f"{file}.json" not in files:
                raise LookupError(f"no {file}.json")
            results = json.loads((out / f"{file}.json").read_text(encoding="utf-8"))
            measured: Any = round(read(partial(lookup, results)), 3)
            met = measured <= value if bound == "at most" else measured >= value
            verdict = "met" if met else "MISSED"
        except (OSError, ValueError, LookupError) as error:
            verdict, measured = "not measured", str(error)
        found.append(
            {"verdict": verdict, "target": name, "bound": f"{bound} {value:g}", "found": measured}
        )
    return found


def launches(output: str) -> list[dict[str, Any]]:
    """Parses the output of ``ncu --csv``: per kernel launch its name and each metric as a number.

    Raises:
        ValueError: there is none; ncu exits with 0 even if it may not read the counters.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in output.splitlines() if line[:1] == '"'):
        name = re.sub(r"^.*::", "", row["Kernel Name"].partition("(")[0])
        launch = found.setdefault(row["ID"], {"kernel": name})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue
        launch[f"{row['Metric Name']} ({row['Metric Unit']})".removesuffix(" ()")] = value
    if not found:
        raise ValueError("no launch was read")
    return list(found.values())
