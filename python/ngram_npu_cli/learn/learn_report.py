"""The result of learning: its data class, its text, its JSON form and its plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, escape_unprintable, import_optional

from ngram_npu_cli.learn.curve import Point
from ngram_npu_cli.report import JsonReport, align_columns

FORMAT = "ngram_npu.learn/1"
"""Written into every JSON result; the number grows when a field changes its meaning."""


@dataclass(frozen=True)
class LearnReport(JsonReport):
    """What was learned, and its gain.

    Attributes:
        command, date, machine, versions: As in `ReplayReport`.
        config: Of the drafts, and how the logs were read.
        stores: Files of stores that were read.
        conversations, answers, answer_tokens: Numbers read from logs.
        tokenizer: Its name; None if all were token ids.
        tokenizer_digest: Of its vocabulary; empty if it is not known.
        evaluated: Number of conversations at the end of the logs that are replayed for each point;
            0: there is no curve.
        sizes: Points with all earlier answers, by size of the store, the largest first; empty with
            `store_tokens`.
        curve: Without a store, then by the share of the earlier answers that is known.
        by_k: Points with all earlier answers, by maximum draft length; empty without a curve.
        costs: Comparison of fitted costs with the package's on every second conversation: tokens
            per step at equal drafts, without a store (``shipped``, ``fitted``), whether they are
            ``recommended``, and their file; None: no costs were fitted.
        store_tokens: Size of the store.
        tokens_held: Tokens in it.
        output, file_bytes: Of the file; None without one.
        notes: What was skipped, and what limits the figures.
        seconds: Wall time.
    """

    command: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    config: Mapping[str, Any]
    stores: tuple[str, ...]
    conversations: int
    answers: int
    answer_tokens: int
    tokenizer: str | None
    tokenizer_digest: str
    evaluated: int
    sizes: tuple[Point, ...]
    curve: tuple[Point, ...]
    by_k: Mapping[int, Point]
    costs: Mapping[str, Any] | None
    store_tokens: int
    tokens_held: int
    output: str | None
    file_bytes: int | None
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        data = {"format": FORMAT, **vars(self)}
        for name in ("sizes", "curve"):
            data[name] = [self._describe_point(point) for point in data[name]]
        data["by_k"] = {k: self._describe_point(point) for k, point in self.by_k.items()}
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in data.items()
        }

    def _describe_point(self, point: Point) -> dict[str, Any]:
        return {
            **vars(point),
            "tokens_per_step": point.tokens_per_step,
            "drafted_per_step": point.drafted_per_step,
            "speedup": point.speedup(self.config["cost"]),
        }


def label_point(point: Point) -> str:
    """Returns the share of the earlier answers in a point's store."""
    if point.share is None:
        return "no store"
    names = {0.0: "nothing", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "all"}
    return names.get(point.share, f"{point.share:.1%}")


def format_report(report: LearnReport) -> str:
    """Returns the report as plain text, without a final newline."""
    read = f"{report.conversations} conversations, {report.answers} answers of "
    read += f"{report.answer_tokens} tokens"
    if report.stores:
        read = f"{len(report.stores)} stores, {read}"
    lines = [read + f", tokenizer: {report.tokenizer or 'token ids as recorded'}"]
    cost = report.config["cost"]
    if report.sizes:
        sizes = [
            [str(point.store_tokens), f"{point.tokens_per_step:.3f}"] for point in report.sizes
        ]
        lines += ["", *align_columns([["size, all known", "tokens/step"], *sizes])]
    if report.curve:
        lines += [
            "",
            f"the last {report.evaluated} conversations, by the earlier answers in a store of "
            f"{report.store_tokens} tokens,",
            f"k={report.config['k']} trimmed, "
            f"min_draft_probability={report.config['min_draft_probability']:g}; speed-up if a "
            f"drafted token costs {cost:g} of a step:",
            "",
        ]
        rows = [["known", "tokens", "tokens/step", "drafted/step", "speed-up"]]
        rows += [
            [
                label_point(point),
                str(point.known_tokens),
                f"{point.tokens_per_step:.3f}",
                f"{point.drafted_per_step:.3f}",
                f"{point.speedup(cost):.2f}x",
            ]
            for point in report.curve
        ]
        lines += align_columns(rows, left=[0])
        speedups = {k: point.speedup(cost) for k, point in report.by_k.items()}
        lines += [
            "",
            "all known, by k: "
            + ", ".join(f"{k}: {speedup:.2f}x" for k, speedup in speedups.items())
            + f"; best at this cost: k={max(speedups, key=lambda k: speedups[k])}",
        ]
    if (costs := report.costs) is not None:
        lines += [
            "",
            f"{costs['output']}: costs fitted on these logs, "
            + ("recommended" if costs["recommended"] else "NOT recommended")
            + f": fitted on one half, {costs['gain']:.3f}x the tokens per step of the shipped "
            f"costs on the other, {costs['conversations']} conversations, at equal drafts",
        ]
    lines += ["", *(f"note: {note}" for note in report.notes)]
    lines.append(
        "the store is not saved: no -o FILE"
        if report.output is None
        else f"{report.output}: {report.tokens_held} tokens in a store of {report.store_tokens}, "
        f"{(report.file_bytes or 0) / 1e6:.0f} MB; it holds text of users: protect it as you "
        "protect the logs"
    )
    return "\n".join(map(escape_unprintable, lines))


def format_store(info: Mapping[str, Any]) -> str:
    """Returns the result of `describe` as plain text."""
    held = f"{info['tokens_held']} of {info['token_capacity']}"
    lines = [
        f"file        {info['file']}, {info['file_bytes'] / 1e6:.1f} MB",
        f"tokens      {held}, in {info['texts']} texts",
        f"scopes      {info['scopes']}",
        f"visibility  {info['visibility']}",
        f"tokenizer   {info['tokenizer'] or 'not known'}",
    ]
    return "\n".join(map(escape_unprintable, lines))


# Plot


def check_plot(path: Path) -> None:
    """Checks before any work that a plot can be made.

    Raises:
        InputError: matplotlib is not installed, or does not know the format of `path`'s suffix.
    """
    canvas = _import_matplotlib("backend_bases").FigureCanvasBase
    known: dict[str, str] = canvas.get_supported_filetypes()
    plot_format = _get_format(path.suffix)
    if plot_format not in known:
        raise InputError(
            f'{path}: unknown plot format "{plot_format}"; one of: {", ".join(sorted(known))}'
        )


def draw_curve(axes: Any, yields: Mapping[str, float], name: str) -> None:
    """Adds a curve to axes of matplotlib: tokens per step by label, the first one without a store.

    The points are at equal distances, because shares double.
    """
    (_, without_store), *curve = yields.items()
    (line,) = axes.plot(*zip(*curve, strict=True), "o-", label=name)
    axes.axhline(without_store, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set_xlabel("known of the earlier answers (dotted: no store)")
    axes.set_ylabel("tokens per step")
    axes.grid(visible=True, alpha=0.4)
    axes.legend()


def save_plot(report: LearnReport, path: Path, suffix: str) -> None:
    """Draws the curve into the file `path`, in the format of `suffix`.

    Raises:
        InputError: matplotlib is not installed.
    """
    # Figure instead of pyplot, which would look for a display and keep global state.
    figure = _import_matplotlib("figure").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    if report.curve:
        yields = {label_point(point): point.tokens_per_step for point in report.curve}
        draw_curve(axes, yields, f"store of {report.store_tokens} tokens")
    figure.savefig(path, format=_get_format(suffix), dpi=150)


def _get_format(suffix: str) -> str:
    return suffix.lstrip(".").lower()


def _import_matplotlib(module: str) -> Any:
    return import_optional(f"matplotlib.{module}", "--plot", "plot")
