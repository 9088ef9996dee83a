"""The report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

import io
from importlib import resources
from typing import Any

import numpy as np
from ngram_npu.errors import optional, printable

from ngram_npu_cli.tune.text import advice_lines, describe, store_lines
from ngram_npu_cli.tune.tune_report import TuneReport


def check_html() -> None:
    """Check before any work that a page can be made.

    Raises:
        InputError: jinja2 or matplotlib is not installed.
    """
    for module in ("jinja2", "matplotlib.figure"):
        optional(module, "--html", "html")


def to_html(report: TuneReport) -> str:
    """The whole page.

    Raises:
        InputError: as for `check_html`.
    """
    jinja2 = optional("jinja2", "--html", "html")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda shown: shown if hasattr(shown, "__html__") else printable(str(shown)),
    )
    environment.filters["three"] = "{:.3f}".format
    template = resources.files("ngram_npu_cli.tune").joinpath("report.html")
    page: str = environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        described=describe(report),
        advised=lambda part: [*filter(None, advice_lines(part)), *store_lines(part)],
        drawing=_svg(report),
        faster=sum(s.speedup > s.against for s in report.singles),
        slower=sum(s.speedup < s.against for s in report.singles),
    )
    return page + "\n"


def _svg(report: TuneReport) -> str:
    drawn = io.StringIO()
    with optional("matplotlib", "--html", "html").rc_context({"svg.fonttype": "none"}):
        draw(report).savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def draw(report: TuneReport) -> Any:
    """Speed-up by batch size, tokens against drafts, and a histogram of the conversations, as a
    figure of matplotlib."""
    figure = optional("matplotlib.figure", "--html", "html").Figure(
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
    for aside, (color, setting, speedups) in zip((-0.1, 0.1), pair, strict=True):
        of = setting.held_out
        lows, highs = [s.low for s in speedups], [s.high for s in speedups]
        by_batch.vlines(places + aside, lows, highs, color=color)
        values = [s.value for s in speedups]
        by_batch.plot(places + aside, values, "o", color=color, label=setting.candidate.label)
        yields.plot(of.drafted_per_step, of.tokens_per_step, "o", color=color)
    singles = [[s.speedup for s in report.singles], [s.against for s in report.singles]]
    # A few very large gains would put all others into one column.
    top = max(1.2, float(np.quantile(singles, 0.99)))
    gains.hist([np.minimum(of, top) for of in singles], bins=24, color=[c for c, *_ in pair])
    by_batch.set_xticks(places, [report.batch_name(row.batch) for row in report.batches])
    by_batch.set(title="Speed-up by batch size", xlabel="batch size")
    by_batch.margins(y=0.25)  # a place for the legend
    by_batch.axhline(1.0, color="gray", linestyle=":")
    by_batch.legend(fontsize="small")
    yields.set(title="Tokens and drafts per step", xlabel="drafted tokens per step")
    gains.set(title="Which conversations gain", xlabel="speed-up of the conversation")
    gains.axvline(1.0, color="gray", linestyle=":")
    return figure
