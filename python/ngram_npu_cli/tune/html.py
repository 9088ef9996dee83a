"""The report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

import io
from importlib import resources
from typing import Any

import numpy as np
from ngram_npu.errors import escape_unprintable, import_optional

from ngram_npu_cli.tune.tune_report import (
    TuneReport,
    describe_advice,
    describe_store,
    describe_traffic,
)


def check_html() -> None:
    """Checks before any work that a page can be made.

    Raises:
        InputError: The package jinja2 or matplotlib is not installed.
    """
    for module in ("jinja2", "matplotlib.figure"):
        import_optional(module, "--html", "html")


def to_html(report: TuneReport) -> str:
    """Returns the page.

    Raises:
        InputError: As for `check_html`.
    """
    jinja2 = import_optional("jinja2", "--html", "html")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escape_text,
    )
    environment.filters["three"] = "{:.3f}".format
    template = resources.files("ngram_npu_cli.tune").joinpath("report.html")
    page: str = environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        described=describe_traffic(report),
        advised=lambda part: [*filter(None, describe_advice(part)), *describe_store(part)],
        drawing=_render_svg(report),
        faster=sum(s.speedup > s.against for s in report.singles),
        slower=sum(s.speedup < s.against for s in report.singles),
    )
    return page + "\n"


def _escape_text(value: Any) -> Any:
    """Escapes control characters of everything but HTML."""
    return value if hasattr(value, "__html__") else escape_unprintable(str(value))


def _render_svg(report: TuneReport) -> str:
    buffer = io.StringIO()
    with import_optional("matplotlib", "--html", "html").rc_context({"svg.fonttype": "none"}):
        draw(report).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw(report: TuneReport) -> Any:
    """Returns a figure of matplotlib: speed-up by batch size, tokens and drafts per step, and a
    histogram of the conversations."""
    figure = import_optional("matplotlib.figure", "--html", "html").Figure(
        figsize=(12, 3.6), layout="constrained"
    )
    by_batch, yields, gains = figure.subplots(1, 3)
    pair = [
        ("tab:blue", report.settings[report.recommended], [r.speedup for r in report.batches]),
        ("tab:orange", report.settings[report.against], [r.against for r in report.batches]),
    ]
    places = np.arange(len(report.batches))
    points = [(s.held_out.drafted_per_step, s.held_out.tokens_per_step) for s in report.settings]
    yields.scatter(*zip(*points, strict=True), s=8, color="lightgray")
    yields.plot(*zip(*(points[i] for i in report.frontier), strict=True), color="tab:blue")
    for offset, (color, setting, speedups) in zip((-0.1, 0.1), pair, strict=True):
        held_out = setting.held_out
        lows, highs = [s.low for s in speedups], [s.high for s in speedups]
        by_batch.vlines(places + offset, lows, highs, color=color)
        values = [s.value for s in speedups]
        by_batch.plot(places + offset, values, "o", color=color, label=setting.candidate.label)
        yields.plot(held_out.drafted_per_step, held_out.tokens_per_step, "o", color=color)
    singles = [[s.speedup for s in report.singles], [s.against for s in report.singles]]
    # A few very large gains would put all others into one column.
    top = max(1.2, float(np.quantile(singles, 0.99)))
    gains.hist(
        [np.minimum(speedups, top) for speedups in singles], bins=24, color=[c for c, *_ in pair]
    )
    by_batch.set_xticks(places, [report.batch_name(row.batch) for row in report.batches])
    by_batch.set(title="Speed-up by batch size", xlabel="batch size")
    by_batch.margins(y=0.25)  # space for the legend
    by_batch.axhline(1.0, color="gray", linestyle=":")
    by_batch.legend(fontsize="small")
    yields.set(title="Tokens and drafts per step", xlabel="drafted tokens per step")
    gains.set(title="Which conversations gain", xlabel="speed-up of the conversation")
    gains.axvline(1.0, color="gray", linestyle=":")
    return figure
