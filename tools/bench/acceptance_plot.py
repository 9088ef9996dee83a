"""Plots the tokens per step that drafting yields on each set, and how well costs are calibrated,
from a committed result file: ``python -m tools.bench.acceptance_plot``."""

from __future__ import annotations

import argparse
import io
import json
import re
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
"""Their names in the legend, and their markers."""
DRAWN = slice(3, None, 4)
"""Limits 8, 16, ... 96: more points would only make the file larger."""


def draw(document: dict[str, Any]) -> Figure:
    """One panel per set, and one of predicted against actual acceptance."""
    sets = [result for result in document["results"] if "whole_by_limit" in result]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = list(figure.subplots(3, 4).flat)
    for result, axes in zip(sets, panels, strict=False):
        _yield_of(result, axes)
    _calibration(sets, panels[len(sets)])
    for axes in panels:
        axes.grid(visible=True, alpha=0.4)
        axes.tick_params(bottom=False, left=False)
        axes.locator_params(nbins=5)
    for axes in panels[8:11]:
        axes.set_xlabel("drafted tokens per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    figure.supylabel("tokens per step")
    return figure


def _yield_of(result: dict[str, Any], axes: Axes) -> None:
    by_limit = result["whole_by_limit"]
    drafted, tokens = (by_limit[f"{what}_per_step"][DRAWN] for what in ("drafted", "tokens"))
    axes.plot(drafted, tokens, label="ours, k = 8, by limit")
    default = result["whole"]["k8"]["limit_40"]
    axes.plot(
        default["drafted_per_step"], default["tokens_per_step"], "o", label="ours, the default"
    )
    for peer, (label, mark) in PEERS.items():
        of = result["whole"]["peers"][peer]
        axes.plot(of["drafted_per_step"], of["tokens_per_step"], mark, label=label)
    axes.set_title(result["set"], fontsize="medium")


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


def main(arguments: Sequence[str] | None = None) -> None:
    program = "python -m tools.bench.acceptance_plot"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    given = parser.parse_args(arguments)
    # No date, and ids that do not change: the same figures give the same file.
    style = {"svg.hashsalt": "", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    with rc_context(style), io.StringIO() as drawn:
        draw(json.loads(given.result.read_text())).savefig(
            drawn, format="svg", metadata={"Date": None, "Creator": None}
        )
        given.picture.write_text(lighter(drawn.getvalue()))


def lighter(svg: str) -> str:
    """The same picture in a third of the bytes: each style once, coordinates with one decimal, no
    rotations by 0 and no groups that only have a name."""
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    group = re.compile(r'<g(?: id="[^"]*")?>((?:(?!<g[ >]|</g>).)*)</g>', re.DOTALL)
    while (flat := group.sub(r"\1", svg)) != svg:  # innermost first
        svg = flat
    svg = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", ">\n<")
    for number, name in enumerate(sorted(set(re.findall(r' id="([mp][0-9a-f]{10})"', svg)))):
        svg = svg.replace(name, f"i{number}")
    styles = sorted(set(re.findall(r' style="([^"]*)"', svg)))
    for number, style in enumerate(styles):
        svg = svg.replace(f' style="{style}"', f' class="s{number}"')
    rules = " ".join(f".s{number}{{{style}}}" for number, style in enumerate(styles))
    return svg.replace("</style>", f" {rules}</style>", 1) + "\n"


if __name__ == "__main__":
    main()
