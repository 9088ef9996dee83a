"""Draws the learning curve (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, optional

from ngram_npu_cli.learn.learn_report import LearnReport, label


def check_plot(path: Path) -> None:
    """Checks before any work that a plot can be made.

    Raises:
        InputError: matplotlib is not installed, or does not know the format of `path`'s suffix.
    """
    canvas = _matplotlib("backend_bases").FigureCanvasBase
    known: dict[str, str] = canvas.get_supported_filetypes()
    suffix = _format_of(path.suffix)
    if suffix not in known:
        raise InputError(
            f'{path}: unknown plot format "{suffix}"; one of: {", ".join(sorted(known))}'
        )


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


def save_plot(report: LearnReport, path: Path, suffix: str) -> None:
    """Draws the curve into the file `path`, in the format of `suffix`, whatever the file's own.

    Raises:
        InputError: matplotlib is not installed.
    """
    # Figure instead of pyplot, which would look for a display and keep global state.
    figure = _matplotlib("figure").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    if report.curve:
        yields = {label(of): of.tokens_per_step for of in report.curve}
        draw(axes, yields, f"store of {report.store_tokens} tokens")
    figure.savefig(path, format=_format_of(suffix), dpi=150)


def _format_of(suffix: str) -> str:
    return suffix.lstrip(".").lower()


def _matplotlib(module: str) -> Any:
    return optional(f"matplotlib.{module}", "--plot", "plot")
