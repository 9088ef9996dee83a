"""Plots the README's curve, time per step against context, from a committed result file:
``python -m tools.bench.curve``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tools" / "bench" / "results" / "ngram_index_step_-curve.json"
PICTURE = ROOT / "docs" / "step-time.svg"

LINES = {
    "vllm-numba": "vLLM's numba code",
    "ours:engine=scan": "ngram_npu, scan",
    "ours": "ngram_npu, index",
}
"""Contestants, slowest first, with their names in the legend."""


def draw(document: dict[str, Any]) -> Figure:
    """Both axes are logarithmic. The results have one batch size and are ordered by context."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    contexts = [result["context"] for result in document["results"]]
    for contestant, label in LINES.items():
        found = [{"ours": r["ours"], **r["peers"]}[contestant] for r in document["results"]]
        axes.plot(contexts, [of["median_us"] for of in found], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
    batch = document["results"][0]["batch"]
    axes.set_xlabel("tokens of context a request")
    axes.set_ylabel(f"us a step, {batch} requests")
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.curve", description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    given = parser.parse_args(arguments)
    figure = draw(json.loads(given.result.read_text()))
    # No date: the same figures give the same file.
    figure.savefig(given.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
