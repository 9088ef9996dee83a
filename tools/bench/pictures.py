"""Draws the documents' pictures from the committed results: ``python -m tools.bench.pictures``.

They are the README's curve, time per step against context; for docs/design/drafts.md the tokens per
step that drafting yields on each set, with how well costs are calibrated; and for
docs/guides/learn.md the learning curves.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ngram_npu_cli.learn.plot import draw

from tools.bench.figures import RESULTS

DOCS = Path(__file__).parents[2] / "docs"

LINES = {
    "vllm-numba": "vLLM's numba code",
    "ours:engine=scan": "ngram_npu, scan",
    "ours": "ngram_npu, index",
}
"""Contestants, slowest first, with their names in the legend."""
PEERS = {
    "vllm-ngram-k5": ("vLLM's n-gram, k = 5", "s"),
    "vllm-ngram-k8": ("vLLM's n-gram, k = 8", "D"),
    "arctic-local": ("suffix decoding, k = 8", "^"),
}
"""Their names in the legend, and their markers."""
DRAWN = slice(3, None, 4)
"""Limits 8, 16, ... 96: more points would only make the file larger."""


def draw_curve(document: dict[str, Any]) -> Figure:
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


def draw_acceptance(document: dict[str, Any]) -> Figure:
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


def draw_learning(document: dict[str, Any]) -> Figure:
    """Tokens per step by what a store knows."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for result in document["results"]:
        if "known" in result:
            yields = {known: of["tokens_per_step"] for known, of in result["known"].items()}
            draw(axes, yields, result["set"])
    return figure


def main(docs: Path = DOCS) -> None:
    curve, acceptance, learning = (
        json.loads((RESULTS / name).read_text())
        for name in ("ngram_index_step_-curve.json", "acceptance.json", "learn.json")
    )
    # No date, and ids that do not change: the same figures give the same file.
    draw_curve(curve).savefig(docs / "step-time.svg", metadata={"Date": None})
    style = {"svg.hashsalt": "", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    for figure, name in (
        (draw_acceptance(acceptance), "design/drafts.svg"),
        (draw_learning(learning), "learn.svg"),
    ):
        with rc_context(style), io.StringIO() as drawn:
            figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
            (docs / name).write_text(lighter(drawn.getvalue()))


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
