"""Plots a replay: tokens per step by input and acceptance by position (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ngram_npu.errors import ReplayError, optional, printable
from ngram_npu.replay.replay_report import ReplayReport


def check_plot(path: Path) -> None:
    """Check before any work that a plot can be made.

    Raises:
        ReplayError: matplotlib is not installed, or does not know the format of `path`'s suffix.
    """
    known: dict[str, str] = _matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in known:
        raise ReplayError(
            f'{path}: unknown plot format "{suffix}"; one of: {", ".join(sorted(known))}'
        )


def save_plot(report: ReplayReport, path: Path, file_format: str) -> None:
    """Draw `report` into the file `path`.

    Args:
        report: the figures.
        path: the file to write; its suffix does not matter.
        file_format: "png", "svg", "pdf" or another that matplotlib knows.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    # Figure instead of pyplot, which would look for a display and keep global state.
    inputs = report.inputs
    figure: Any = _matplotlib("figure").Figure(
        figsize=(12, 1.8 + max(2.4, 0.36 * len(inputs))), layout="constrained"
    )
    gain, positions = figure.subplots(1, 2)
    # matplotlib reads text between two dollar signs as a formula.
    names = [printable(figures.name).replace("$", r"\$") for figures in inputs]
    values = [figures.tokens_per_step or 0.0 for figures in inputs]
    # By index, because two inputs of the same name would share a bar.
    bars = gain.barh(range(len(names)), values)
    gain.set_yticks(range(len(names)), names)
    gain.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    gain.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    gain.set_xlim(0, 1.15 * max([1.0, *values]))
    gain.set_xlabel("tokens per step (1.0: no gain)")
    gain.invert_yaxis()
    for figures, name in zip(inputs, names, strict=True):
        rates = [rate or 0.0 for rate in figures.acceptance_rate_per_pos]
        # Colours repeat after ten lines; the second ten are dashed.
        style = "-" if len(positions.lines) < 10 else "--"
        positions.plot(range(1, len(rates) + 1), rates, style, marker=".", label=name)
    positions.set_ylim(0, 1)
    positions.set_xlabel("draft position")
    positions.set_ylabel("accepted, of the steps with a draft")
    positions.xaxis.get_major_locator().set_params(integer=True)
    positions.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    config = report.config
    figure.suptitle(
        f"{config['match_policy']} match of {config['min_n']}-{config['max_n']} tokens, "
        f"k={config['k']}"
    )
    figure.savefig(path, format=file_format, dpi=150)


def _matplotlib(module: str) -> Any:
    return optional(f"matplotlib.{module}", "--plot", "plot")
