"""The report as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ngram_npu.replay.errors import printable
from ngram_npu.tune.report import BatchRow, Single, TuneReport, describe, store_lines
from ngram_npu.tune.search import Interval

__all__ = ["to_html"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d5dae1; --paper: #fff;
  --box: #f4f6f9; --ours: #0b6bcb; --other: #b45309; --dot: #9aa5b4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b4; --line: #3a4350;
  --paper: #14181e; --box: #1e242c; --ours: #5aa9f8; --other: #f0a04b; --dot: #6b7686; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.advice { background: var(--box); border-left: 4px solid var(--ours); padding: .8rem 1rem;
  margin: 1rem 0; } .advice b { font-size: 1.15rem; }
.warning { border-left-color: var(--other); }
pre { background: var(--box); white-space: pre-wrap; margin: .6rem 0 0; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right;
  border-bottom: 1px solid var(--line); } th { font-weight: 600; color: var(--soft); }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
.charts h2 { margin-top: .5rem; } svg { width: 100%; height: auto; } svg text { fill: var(--soft);
  font: 12px system-ui, sans-serif; } .key text { fill: var(--ink); }
.grid { stroke: var(--line); } .ours { fill: var(--ours); stroke: var(--ours); }
.other { fill: var(--other); stroke: var(--other); } .dot { fill: var(--dot); stroke: none; }
.path { fill: none; stroke: var(--ours); stroke-width: 1.5; } .one { stroke: var(--soft);
  stroke-dasharray: 4 3; } .bar { stroke: none; }
"""

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 30, 40


def to_html(report: TuneReport) -> str:
    """The whole page."""
    chosen = report.candidate.label
    other = report.settings[report.against].candidate.label
    off = report.off_above == 0
    verdict = report.advice if off else f"{chosen}. {report.advice}"
    command = "vllm serve MODEL \\\n  " + " \\\n  ".join(report.vllm_options)
    title = "N-gram drafting: does it pay?"
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *(f'<p class="soft">{_text(line)}</p>' for line in describe(report)),
        f'<div class="advice{" warning" if off else ""}"><b>{_text(verdict)}</b>',
        "" if off else f"<pre>{_text(command)}</pre>",
        *(f"<p>{_text(line)}</p>" for line in store_lines(report)),
        "</div>",
        '<div class="charts"><div><h2>Speed-up by batch size</h2>',
        _speedups(report, chosen, other),
        "</div><div><h2>Tokens and drafts per step</h2>",
        _frontier(report, chosen, other),
        "</div><div><h2>Which conversations gain</h2>",
        _histogram(report.singles, chosen, other),
        "</div></div>",
        "<h2>By batch size</h2>",
        _batches(report, other),
        "<h2>By input</h2>",
        _groups(report, other),
        "<h2>The conversations that gain most and least</h2>",
        _singles(report.singles, other),
        "<h2>Two settings side by side</h2>",
        _side_by_side(report),
        "<h2>Frontier</h2>",
        _table(
            ["setting", "tokens per step", "drafted per step"],
            [
                [
                    report.settings[i].candidate.label,
                    f"{report.settings[i].held_out.tokens_per_step:.3f}",
                    f"{report.settings[i].held_out.drafted_per_step:.3f}",
                ]
                for i in report.frontier
            ],
        ),
        f'<p class="soft">{_text(str(report.about.get("command", "")))}</p>',
        f'<p class="soft">{_text(str(report.about.get("date", "")))}; '
        f"{_text(_versions(report))}</p></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


# Tables


def _batches(report: TuneReport, other: str) -> str:
    return _table(
        ["batch", "recommended", other, "ratio", "expected", "best for this batch alone"],
        [
            [
                _batch(report, row),
                _interval(row.speedup),
                _interval(row.against),
                _interval(row.ratio),
                f"{row.expected:.3f}",
                f"{report.settings[row.best].candidate.label}: {row.best_speedup:.3f}",
            ]
            for row in report.batches
        ],
    ) + (
        '<p class="soft">Brackets: 95 % interval over 1000 resamplings of the conversations. '
        "Expected: the speed-up on the half that the setting was chosen on.</p>"
    )


def _groups(report: TuneReport, other: str) -> str:
    return _table(
        ["input", "conversations", "speed-up", other, "gaining"],
        [
            [
                g.name,
                str(g.conversations),
                f"{g.speedup:.3f}",
                f"{g.against:.3f}",
                f"{g.gaining / g.conversations:.0%}",
            ]
            for g in sorted(report.groups, key=lambda g: -g.speedup)
        ],
    )


def _singles(singles: Sequence[Single], other: str) -> str:
    ends = singles if len(singles) <= 12 else [*singles[:6], *singles[-6:]]
    return _table(
        ["conversation", "input", "tokens", "speed-up", other],
        [
            [s.name, s.input, str(s.tokens), f"{s.speedup:.3f}", f"{s.against:.3f}"]
            for s in reversed(ends)
        ],
    )


def _side_by_side(report: TuneReport) -> str:
    pair = [report.settings[report.recommended], report.settings[report.against]]
    better = sum(s.speedup > s.against for s in report.singles)
    worse = sum(s.speedup < s.against for s in report.singles)
    rows = [
        ["tokens per step", *(f"{s.held_out.tokens_per_step:.3f}" for s in pair)],
        ["drafted tokens per step", *(f"{s.held_out.drafted_per_step:.3f}" for s in pair)],
        ["accepted share of drafted tokens", *(_accepted(s.held_out) for s in pair)],
        ["conversations that are faster with it", str(better), str(worse)],
    ]
    return _table(["held out", *(s.candidate.label for s in pair)], rows)


def _accepted(figures: object) -> str:
    tokens, steps, drafted = (getattr(figures, n) for n in ("tokens", "steps", "drafted"))
    # Each step yields one token more than it accepts, unless the answer ends within a draft.
    return f"{(tokens - steps) / drafted:.1%}" if drafted else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table><tr>", *(f"<th>{_text(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        lines += ["<tr>", *(f"<td>{_text(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])


# Charts


class _Axes:
    """A frame with ticks; maps data coordinates to those of the drawing."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], names: tuple[str, str]):
        self._x, self._y = x, y
        self.parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
        for value in _ticks(*y):
            self.parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{self.v(value):.1f}" '
                f'y2="{self.v(value):.1f}"/><text x="{_LEFT - 6}" y="{self.v(value) + 4:.1f}" '
                f'text-anchor="end">{value:g}</text>'
            )
        self.text(_WIDTH / 2, _HEIGHT - 4, names[0], "middle")
        self.text(_LEFT - 40, _TOP - 16, names[1], "start")

    def h(self, x: float) -> float:
        low, high = self._x
        return _LEFT + (x - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def v(self, y: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'
        )

    def x_tick(self, x: float, text: str) -> None:
        self.text(self.h(x), _HEIGHT - _BOTTOM + 16, text)

    def key(self, names: Sequence[tuple[str, str]]) -> None:
        """Draws the legend at the top right: (class, name) of each series."""
        for number, (kind, name) in enumerate(names):
            y = _TOP - 16 + 15 * number
            self.parts.append(
                f'<g class="key"><circle class="{kind}" cx="{_WIDTH - _RIGHT - 4}" cy="{y - 4}" '
                f'r="4"/><text x="{_WIDTH - _RIGHT - 14}" y="{y}" text-anchor="end">{_text(name)}'
                "</text></g>"
            )

    def done(self) -> str:
        return "".join([*self.parts, "</svg>"])


def _speedups(report: TuneReport, chosen: str, other: str) -> str:
    rows = report.batches
    highs = [max(row.speedup.high, row.against.high) for row in rows]
    lows = [min(row.speedup.low, row.against.low) for row in rows]
    axes = _Axes(
        (-0.5, len(rows) - 0.5), (min(0.95, *lows), 1.12 * max(highs)), ("batch size", "speed-up")
    )
    one = axes.v(1)
    axes.parts.append(
        f'<line class="one" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{one:.1f}" y2="{one:.1f}"/>'
    )
    for number, row in enumerate(rows):
        axes.x_tick(number, _batch(report, row))
        for kind, of, aside in (("ours", row.speedup, -7), ("other", row.against, 7)):
            x = axes.h(number) + aside
            axes.parts.append(
                f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{axes.v(of.low):.1f}" '
                f'y2="{axes.v(of.high):.1f}" stroke-width="2"/>'
                f'<circle class="{kind}" cx="{x:.1f}" cy="{axes.v(of.value):.1f}" r="4">'
                f"<title>{_interval(of)}</title></circle>"
            )
    axes.key([("ours", chosen), ("other", other)])
    return axes.done()


def _frontier(report: TuneReport, chosen: str, other: str) -> str:
    points = [
        (s.held_out.drafted_per_step, s.held_out.tokens_per_step, s.candidate.label)
        for s in report.settings
    ]
    right = 1.05 * max(x for x, _, _ in points) or 1.0
    axes = _Axes(
        (0, right),
        (1, 1 + 1.2 * max(0.05, max(y for _, y, _ in points) - 1)),
        ("drafted tokens per step", "tokens per step"),
    )
    for value in _ticks(0, right):
        axes.x_tick(value, f"{value:g}")
    line = " ".join(
        f"{axes.h(points[i][0]):.1f},{axes.v(points[i][1]):.1f}" for i in report.frontier
    )
    axes.parts.append(f'<polyline class="path" points="{line}"/>')
    marked = {report.recommended: "ours", report.against: "other"}
    order = sorted(range(len(points)), key=lambda i: i in marked)
    for i in order:
        x, y, label = points[i]
        axes.parts.append(
            f'<circle class="{marked.get(i, "dot")}" cx="{axes.h(x):.1f}" cy="{axes.v(y):.1f}" '
            f'r="{5 if i in marked else 3}">'
            f"<title>{_text(label)}: {y:.3f} / {x:.3f}</title></circle>"
        )
    axes.key([("ours", chosen), ("other", other)])
    return axes.done()


def _histogram(singles: Sequence[Single], chosen: str, other: str) -> str:
    """Number of conversations by speed-up, for both settings."""
    values = [[s.speedup for s in singles], [s.against for s in singles]]
    low = min(0.9, *(min(of) for of in values))
    # A few very large gains would put all others into one column.
    ordered = sorted(values[0] + values[1])
    high = max(1.2, ordered[int(0.99 * (len(ordered) - 1))])
    if ordered[-1] - low < 2 * (high - low):
        high = ordered[-1]
    columns = 24
    width = (high - low) / columns
    counts = [[0] * columns for _ in values]
    for counted, of in zip(counts, values, strict=True):
        for value in of:
            counted[min(columns - 1, max(0, int((value - low) / width)))] += 1
    top = 1.15 * max(max(of) for of in counts)
    axes = _Axes((low, high), (0, top), ("speed-up of the conversation", "conversations"))
    for value in _ticks(low, high):
        axes.x_tick(value, f"{value:g}")
    for kind, counted, aside in (("ours", counts[0], 0.05), ("other", counts[1], 0.5)):
        for number, count in enumerate(counted):
            x, y = axes.h(low + (number + aside) * width), axes.v(count)
            wide = axes.h(low + 0.45 * width) - axes.h(low)
            axes.parts.append(
                f'<rect class="{kind} bar" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="{axes.v(0) - y:.1f}"><title>{count}</title></rect>'
            )
    one = axes.h(1)
    axes.parts.append(
        f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{_TOP}" y2="{axes.v(0):.1f}"/>'
    )
    axes.key([("ours", chosen), ("other", other)])
    return axes.done()


def _ticks(low: float, high: float) -> list[float]:
    """Round values, four to eight of them."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 8)
    first = math.ceil(low / step)
    return [round(n * step, 10) for n in range(first, math.floor(high / step) + 1)]


# Text


def _text(value: str) -> str:
    return escape("\n".join(printable(line) for line in value.split("\n")))


def _interval(of: Interval) -> str:
    return f"{of.value:.3f} [{of.low:.3f}, {of.high:.3f}]"


def _batch(report: TuneReport, row: BatchRow) -> str:
    return "any" if report.cost.same_for_any_batch else str(row.batch)


def _versions(report: TuneReport) -> str:
    versions = report.about.get("versions", {})
    return f"ngram_npu {versions.get('ngram_npu')}, Python {versions.get('python')}"
