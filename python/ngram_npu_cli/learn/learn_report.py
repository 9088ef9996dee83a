"""The result of learning: its data class, the text and the JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngram_npu.errors import printable

from ngram_npu_cli.learn.curve import Point

FORMAT = "ngram_npu.learn/1"
"""Written into every JSON result; the number grows when a field changes its meaning."""


@dataclass(frozen=True)
class LearnReport:
    """What was learned, and what it would bring.

    Attributes:
        command, date, machine, versions: as in `ReplayReport`.
        config: of the drafts, and how the logs were read.
        stores: files of stores that were read.
        conversations, answers, answer_tokens: read from logs.
        tokenizer: its name; None if all were token ids.
        tokenizer_digest: of its vocabulary; empty if it is not known.
        evaluated: conversations at the end of the logs that the points are replays of; 0: there is
            no curve.
        sizes: all known, by size of the store, the largest first; empty if a size was asked for.
        curve: without a store, then by the share of the earlier answers that is known.
        by_k: all known, by the most tokens of a draft; empty without a curve.
        costs: what costs fitted on every second conversation bring on the others (tokens per step
            at equal drafts, without a store: ``shipped``, ``fitted``), whether they are
            ``recommended``, and their file; None: not asked for.
        store_tokens: size of the store.
        tokens_held: tokens in it.
        output, file_bytes: of the file; None if none was asked for.
        notes: what was skipped, and what limits the figures.
        seconds: wall time of all of it.
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
        """Plain dicts, lists, numbers and strings."""
        found = {"format": FORMAT, **vars(self)}
        for name in ("sizes", "curve"):
            found[name] = [self._point(point) for point in found[name]]
        found["by_k"] = {k: self._point(point) for k, point in self.by_k.items()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
        }

    def to_json(self) -> str:
        """`to_dict` as indented JSON with a final newline."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def _point(self, point: Point) -> dict[str, Any]:
        return {
            **vars(point),
            "tokens_per_step": point.tokens_per_step,
            "drafted_per_step": point.drafted_per_step,
            "speedup": point.speedup(self.config["cost"]),
        }


def label(point: Point) -> str:
    """What a point's store knew."""
    if point.share is None:
        return "no store"
    names = {0.0: "nothing", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "all"}
    return names.get(point.share, f"{point.share:.1%}")


def format_report(report: LearnReport) -> str:
    """The report as plain text, without a final newline."""
    read = f"{report.conversations} conversations, {report.answers} answers of "
    read += f"{report.answer_tokens} tokens"
    if report.stores:
        read = f"{len(report.stores)} stores, {read}"
    lines = [read + f", tokenizer: {report.tokenizer or 'token ids as recorded'}"]
    cost = report.config["cost"]
    if report.sizes:
        lines += ["", "size, all known   tokens/step"]
        lines += [f"{of.store_tokens:>15}{of.tokens_per_step:>14.3f}" for of in report.sizes]
    if report.curve:
        lines += [
            "",
            f"the last {report.evaluated} conversations, by what is known of the earlier answers; "
            f"store of {report.store_tokens} tokens,",
            f"k={report.config['k']} trimmed, "
            f"min_draft_probability={report.config['min_draft_probability']:g}; speed-up if a "
            f"drafted token costs {cost:g} of a step:",
            "",
            "known        tokens  tokens/step  drafted/step  speed-up",
        ]
        lines += [
            f"{label(of):<9}{of.known_tokens:>10}{of.tokens_per_step:>13.3f}"
            f"{of.drafted_per_step:>14.3f}{of.speedup(cost):>9.2f}x"
            for of in report.curve
        ]
        speedups = {k: of.speedup(cost) for k, of in report.by_k.items()}
        lines += [
            "",
            "all known, by k: "
            + ", ".join(f"{k}: {of:.2f}x" for k, of in speedups.items())
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
        "nothing is saved: no -o FILE"
        if report.output is None
        else f"{report.output}: {report.tokens_held} tokens in a store of {report.store_tokens}, "
        f"{(report.file_bytes or 0) / 1e6:.0f} MB; it holds text of users: share it as you would "
        "the logs"
    )
    return "\n".join(map(printable, lines))


def format_store(found: Mapping[str, Any]) -> str:
    """What `describe` found, as plain text."""
    held = f"{found['tokens_held']} of {found['token_capacity']}"
    lines = [
        f"file        {found['file']}, {found['file_bytes'] / 1e6:.1f} MB",
        f"tokens      {held}, in {found['texts']} texts",
        f"scopes      {found['scopes']}",
        f"visibility  {found['visibility']}",
        f"tokenizer   {found['tokenizer'] or 'not known'}",
    ]
    return "\n".join(map(printable, lines))
