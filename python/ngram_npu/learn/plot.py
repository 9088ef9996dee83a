"""Draws the learning curve (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ngram_npu.learn.report import LearnReport, label
from ngram_npu.replay.extras import optional

__all__ = ["draw", "save_plot"]


def draw(axes: Any, report: LearnReport, name: str) -> None:
    """Adds the curve to axes of matplotlib: places at equal distances, because shares double."""
    alone, *curve = report.curve
    line = axes.plot([label(of) for of in curve], [of.tokens_per_step for of in curve], "o-")
    line[0].set_label(name)
    axes.axhline(alone.tokens_per_step, color=line[0].get_color(), linewidth=0.8, linestyle=":")


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
        draw(axes, report, f"store of {report.store_tokens} tokens")
    axes.set_xlabel("known of the earlier answers (dotted: no store)")
    axes.set_ylabel("tokens per step")
    axes.grid(visible=True, alpha=0.4)
    axes.legend()
    figure.savefig(path, format=file_format, dpi=150)
