"""Contains the result of learning, and formats it as text, JSON or a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, escape_unprintable, import_optional

from ngram_npu_cli.learn.curve import Point
from ngram_npu_cli.report import Block, Table, format_blocks

FORMAT = "ngram_npu.learn/1"
"""Format name in every JSON result. The number increases when a field changes its meaning."""


@dataclass(frozen=True)
class LearnReport:
    """Result of learning: the contents of the store, and its gain.

    Attributes:
        about: Command, date, machine, versions and seconds, as in `ReplayReport`; the configuration
            of the drafts (`config`); files of stores that were read (`stores`); numbers read from
            logs (`conversations`, `answers`, `answer_tokens`); the tokenizer's name, None for
            recorded token ids, and the digest of its vocabulary; and the number of conversations at
            the end of the logs that are replayed for each point (`evaluated`, 0 without a curve).
        curve: The point without a store, then one point for each share of the earlier answers.
        by_k: Points with all earlier answers, by maximum draft length; empty without a curve.
        store_tokens, tokens_held: Size of the store, and tokens in it.
        output, file_bytes: Name and size of the file; None if none was written.
        notes: Notes about skipped input and unreliable results.
    """

    about: Mapping[str, Any]
    curve: tuple[Point, ...]
    by_k: Mapping[int, Point]
    store_tokens: int
    tokens_held: int
    output: str | None
    file_bytes: int | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        figures = {name: value for name, value in vars(self).items() if name != "about"}
        return {
            "format": FORMAT,
            **self.about,
            **figures,
            "curve": [self._describe_point(point) for point in self.curve],
            "by_k": {k: self._describe_point(point) for k, point in self.by_k.items()},
            "notes": list(self.notes),
        }

    def _describe_point(self, point: Point) -> dict[str, Any]:
        return {
            **vars(point),
            "tokens_per_step": point.tokens_per_step,
            "drafted_per_step": point.drafted_per_step,
            "speedup": point.compute_speedup(self.about["config"]["cost"]),
        }


def label_point(point: Point) -> str:
    """Returns the share of the earlier answers in a point's store, as text."""
    names = {None: "no store", 0.0: "nothing", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "all"}
    return names[point.share]


def format_report(report: LearnReport) -> str:
    """Returns the report as plain text, without a final newline."""
    about = report.about
    stores = f"{len(about['stores'])} stores, " if about["stores"] else ""
    blocks: list[Block] = [
        f"{stores}{about['conversations']} conversations, {about['answers']} answers of "
        f"{about['answer_tokens']} tokens, tokenizer: "
        f"{about['tokenizer'] or 'token ids as recorded'}"
    ]
    if report.curve:
        blocks += _describe_curve(report)
    blocks += ["", *(f"note: {note}" for note in report.notes)]
    blocks.append(
        "the store is not saved: no -o FILE"
        if report.output is None
        else f"{report.output}: {report.tokens_held} tokens in a store of {report.store_tokens}, "
        f"{(report.file_bytes or 0) / 1e6:.0f} MB; it holds text of users: protect it as you "
        "protect the logs"
    )
    return format_blocks(blocks)


def _describe_curve(report: LearnReport) -> list[Block]:
    config = report.about["config"]
    cost = config["cost"]
    rows = [
        [
            label_point(point),
            str(point.known_tokens),
            f"{point.tokens_per_step:.3f}",
            f"{point.drafted_per_step:.3f}",
            f"{point.compute_speedup(cost):.2f}x",
        ]
        for point in report.curve
    ]
    speedups = {k: point.compute_speedup(cost) for k, point in report.by_k.items()}
    by_k = ", ".join(f"{k}: {speedup:.2f}x" for k, speedup in speedups.items())
    return [
        "",
        f"the last {report.about['evaluated']} conversations, by the earlier answers in a store of "
        f"{report.store_tokens} tokens,",
        f"k={config['k']} trimmed, min_draft_probability={config['min_draft_probability']:g}; "
        f"speed-up if a drafted token costs {cost:g} of a step:",
        "",
        Table([["known", "tokens", "tokens/step", "drafted/step", "speed-up"], *rows], left=[0]),
        "",
        f"all known, by k: {by_k}; best at this cost: k={max(speedups, key=speedups.__getitem__)}",
    ]


def format_store(contents: Mapping[str, Any]) -> str:
    """Returns the result of `describe` as plain text."""
    tokens_held = f"{contents['tokens_held']} of {contents['token_capacity']}"
    lines = [
        f"file        {contents['file']}, {contents['file_bytes'] / 1e6:.1f} MB",
        f"tokens      {tokens_held}, in {contents['texts']} texts",
        f"scopes      {contents['scopes']}",
        f"visibility  {contents['visibility']}",
        f"tokenizer   {contents['tokenizer'] or 'not known'}",
    ]
    return "\n".join(map(escape_unprintable, lines))


# Plot


def check_plot(path: Path) -> None:
    """Raises an InputError if matplotlib is missing or does not know the format of `path`."""
    canvas = import_optional("matplotlib.backend_bases", "--plot", "plot").FigureCanvasBase
    formats: dict[str, str] = canvas.get_supported_filetypes()
    if (plot_format := path.suffix[1:].lower()) not in formats:
        known = ", ".join(sorted(formats))
        raise InputError(f'{path}: unknown plot format "{plot_format}"; one of: {known}')


def save_plot(report: LearnReport, path: Path, target: Path) -> None:
    """Draws the curve into the file `path`, in the format of `target`.

    The points are at equal distances, because each share is twice the previous one.
    """
    # Figure instead of pyplot, which would look for a display and keep global state.
    figure_class = import_optional("matplotlib.figure", "--plot", "plot").Figure
    figure = figure_class(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    if report.curve:
        without_store, *curve = report.curve
        labels = [label_point(point) for point in curve]
        tokens_per_step = [point.tokens_per_step for point in curve]
        name = f"store of {report.store_tokens} tokens"
        (line,) = axes.plot(labels, tokens_per_step, "o-", label=name)
        color = line.get_color()
        axes.axhline(without_store.tokens_per_step, color=color, linewidth=0.8, linestyle=":")
        axes.set_xlabel("known of the earlier answers (dotted: no store)")
        axes.set_ylabel("tokens per step")
        axes.grid(visible=True, alpha=0.4)
        axes.legend()
    figure.savefig(path, format=target.suffix[1:].lower(), dpi=150)
