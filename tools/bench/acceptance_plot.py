"""What drafting yields, set by set, and how far costs can be believed, drawn from a committed
result file: ``python -m tools.bench.acceptance_plot``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tools" / "bench" / "results" / "acceptance.json"
PICTURE = ROOT / "docs" / "design" / "drafts.svg"

PEERS = {
    "vllm-ngram-k5": ("vLLM's n-gram, k = 5", "s"),
    "vllm-ngram-k8": ("vLLM's n-gram, k = 8", "D"),
    "arctic-local": ("suffix decoding, k = 8", "^"),
}
"""As the legend calls them, and their marks."""


def draw(document: dict[str, Any]) -> Figure:
    """A panel for each set, and one of predicted against actual acceptance."""
    sets = [result for result in document["results"] if "whole_by_limit" in result]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = list(figure.subplots(3, 4).flat)
    for result, axes in zip(sets, panels, strict=False):
        _yield_of(result, axes)
    _calibration(sets, panels[len(sets)])
    for axes in panels[8:11]:
        axes.set_xlabel("drafted tokens per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    figure.supylabel("tokens per step")
    return figure


def _yield_of(result: dict[str, Any], axes: Axes) -> None:
    curve = result["whole_by_limit"]
    axes.plot(curve["drafted_per_step"], curve["tokens_per_step"], label="ours, k = 8, by limit")
    default = result["whole"]["k8"]["limit_40"]
    axes.plot(
        default["drafted_per_step"], default["tokens_per_step"], "o", label="ours, the default"
    )
    for peer, (label, mark) in PEERS.items():
        of = result["whole"]["peers"][peer]
        axes.plot(of["drafted_per_step"], of["tokens_per_step"], mark, label=label)
    axes.set_title(result["set"], fontsize="medium")
    axes.grid(visible=True, alpha=0.4)


def _calibration(sets: Sequence[dict[str, Any]], axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    for result in sets:
        bins = result["odd_calibration"]["token"]
        often = [i for i, tokens in enumerate(bins["bin_tokens"]) if tokens >= 30]
        axes.plot(
            [bins["predicted"][i] for i in often],
            [bins["accepted"][i] for i in often],
            marker=".",
            linewidth=0.8,
        )
    axes.set_title("a drafted token's acceptance", fontsize="medium")
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")
    axes.grid(visible=True, alpha=0.4)


def main(arguments: Sequence[str] | None = None) -> None:
    program = "python -m tools.bench.acceptance_plot"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    given = parser.parse_args(arguments)
    figure = draw(json.loads(given.result.read_text()))
    # No date, and ids that do not change: the same figures give the same file.
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
        figure.savefig(given.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
