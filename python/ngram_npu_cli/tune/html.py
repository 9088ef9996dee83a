"""Writes the report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu.errors import escape_unprintable, import_optional

from ngram_npu_cli.report import Block, Command, Table
from ngram_npu_cli.tune.tune_report import TuneReport, describe

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>N-gram drafting: does it pay?</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } p { margin: .3rem 0; } tr:first-child { color: #5b6675; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f6f9; padding: .8rem 1rem; }
figure, table { display: block; overflow-x: auto; margin: 1rem 0; }
svg { width: 100%; min-width: 44rem; height: auto; } table { border-collapse: collapse; }
td { padding: .2rem .8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #d5dae1; }
td:first-child, td:last-child { text-align: left; }
</style></head><body>
<h1>N-gram drafting: does it pay?</h1>
"""


def save_html(report: TuneReport, path: Path) -> None:
    """Writes the report to a file. Raises an InputError if matplotlib is not installed."""
    about = report.about
    footer = f"{about['command']}; {about['date']}; ngram_npu {about['versions']['ngram_npu']}"
    parts = [_render_block(block) for block in (*describe(report), footer)]
    page = "\n".join([_HEAD, f"<figure>{_render_svg(report)}</figure>", *parts, "</body></html>\n"])
    path.write_text(page, encoding="utf-8")


def _render_block(block: Block) -> str:
    if isinstance(block, Command):
        return f"<pre>{html.escape(block.text)}</pre>"
    if not isinstance(block, Table):
        return f"<p>{_escape(block)}</p>" if block else ""
    rows = ["".join(f"<td>{_escape(cell)}</td>" for cell in row) for row in block.rows]
    return "\n".join(["<table>", *(f"<tr>{row}</tr>" for row in rows), "</table>"])


def _escape(text: str) -> str:
    return html.escape(escape_unprintable(text))


def _render_svg(report: TuneReport) -> str:
    buffer = io.StringIO()
    matplotlib = import_optional("matplotlib", "--html", "html")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_figure(report).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_figure(report: TuneReport) -> Any:
    """Returns a matplotlib figure: speed-up by batch size, tokens and drafts per step, and a
    histogram of the conversations."""
    figure_class = import_optional("matplotlib.figure", "--html", "html").Figure
    figure = figure_class(figsize=(12, 3.6), layout="constrained")
    batch_axes, yield_axes, gain_axes = figure.subplots(1, 3)
    curves = [
        ("tab:blue", report.candidate, [r.speedup for r in report.batches]),
        ("tab:orange", report.against, [r.against for r in report.batches]),
    ]
    positions = np.arange(len(report.batches))
    points = {
        candidate: (setting.held_out.drafted_per_step, setting.held_out.tokens_per_step)
        for candidate, setting in report.settings.items()
    }
    yield_axes.scatter(*zip(*points.values(), strict=True), s=8, color="lightgray")
    yield_axes.plot(*zip(*(points[c] for c in report.frontier), strict=True), color="tab:blue")
    for offset, (color, candidate, speedups) in zip((-0.1, 0.1), curves, strict=True):
        lows, highs = [s.low for s in speedups], [s.high for s in speedups]
        batch_axes.vlines(positions + offset, lows, highs, color=color)
        values = [s.value for s in speedups]
        batch_axes.plot(positions + offset, values, "o", color=color, label=candidate.label)
        yield_axes.plot(*points[candidate], "o", color=color)
    samples = [
        [result.speedup for result in report.conversations],
        [result.against for result in report.conversations],
    ]
    # Large gains are clipped, because otherwise most conversations would be in one column.
    max_gain = max(1.2, float(np.quantile(samples, 0.99)))
    gain_axes.hist(
        [np.minimum(speedups, max_gain) for speedups in samples],
        bins=24,
        color=[c for c, *_ in curves],
    )
    batch_axes.set_xticks(positions, [report.format_batch(row.batch) for row in report.batches])
    batch_axes.set(title="Speed-up by batch size", xlabel="batch size", ylabel="speed-up")
    batch_axes.set_xlim(-0.5, len(report.batches) - 0.5)
    batch_axes.axhline(1.0, color="gray", linestyle=":")
    yield_axes.set(title="Tokens and drafts per step")
    yield_axes.set(xlabel="drafted tokens per step", ylabel="tokens per step")
    gain_axes.set(title="Speed-up by conversation")
    gain_axes.set(xlabel="speed-up of the conversation", ylabel="conversations")
    gain_axes.yaxis.get_major_locator().set_params(integer=True)
    gain_axes.axvline(1.0, color="gray", linestyle=":")
    figure.legend(*batch_axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
