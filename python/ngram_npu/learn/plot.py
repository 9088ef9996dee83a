"""Draws the learning curve (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngram_npu.errors import optional
from ngram_npu.learn.learn_report import LearnReport, label


def draw(axes: Any, yields: Mapping[str, float], name: str) -> None:
    """Adds a curve to axes of matplotlib: tokens per step by what is known, the first one without a
    store. Their places are at equal distances, because shares double."""
    (_, alone), *curve = yields.items()
    (line,) = axes.plot(*zip(*curve, strict=True), "o-", label=name)
    axes.axhline(alone, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set_xlabel("known of the earlier answers (dotted: no store)")
    axes.set_ylabel("tokens per step")
    axes.grid(visible=True, alpha=0.4)
    axes.legend()


def save_plot(report: LearnReport, path: Path, file_format: str) -> None:
    """Draws the curve into the file `path`.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    figure = optional("matplotlib.figure", "--plot", "plot").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    if report.curve:
        yields = {label(of): of.tokens_per_step for of in report.curve}
        draw(axes, yields, f"store of {report.store_tokens} tokens")
    figure.savefig(path, format=file_format, dpi=150)
