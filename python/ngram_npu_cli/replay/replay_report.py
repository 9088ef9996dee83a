"""The result of a replay: its data class, the plain-text table and the JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ngram_npu.errors import printable

from ngram_npu_cli.replay.figures import ReplayFigures

FORMAT = "ngram_npu.replay/1"
"""Written into every JSON result; the number grows when a field changes its meaning."""

BYTES_WARNING = (
    "WARNING: a token is a byte here. These figures compare with nothing: no model has such "
    "tokens, and they come out far too high. Choose another --tokenizer."
)

TOKENIZER_WARNING = (
    "WARNING: this is not your model's tokenizer, on which the figures depend. Choose it: "
    "--tokenizer FOLDER, or --tokenizer ORG/NAME from the local cache."
)

_MAX_POSITIONS = 8
_NAME_WIDTH = 22


@dataclass(frozen=True)
class ReplayReport:
    """Figures per input with everything needed to repeat the measurement.

    Attributes:
        command: the command line, or empty when called from Python.
        date: start of the replay, UTC, ISO 8601.
        machine: CPU model, cores, threads.
        versions: of Python, NumPy, torch (None if it was not loaded) and ngram_npu.
        config: the drafting configuration, under the names of `NgramConfig`.
        batch_size: rows of the batch.
        limit: conversations per input, or None for all.
        tokenizer: name, source, vocab_size, and `chosen` if it was not; None if the input was
            token ids.
        inputs: figures per input, in order.
    """

    command: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    config: Mapping[str, Any]
    batch_size: int
    limit: int | None
    tokenizer: Mapping[str, Any] | None
    inputs: tuple[ReplayFigures, ...]

    @property
    def total(self) -> ReplayFigures:
        """All inputs taken together."""
        return ReplayFigures.total(self.inputs)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return {
            "format": FORMAT,
            **vars(self),
            "inputs": [figures.to_dict() for figures in self.inputs],
            "total": self.total.to_dict(),
        }

    def to_json(self) -> str:
        """`to_dict` as indented JSON with a final newline."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReplayReport:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another format.
            KeyError: a field is missing.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}, got {data.get('format')!r}")
        inputs = tuple(ReplayFigures.from_dict(item) for item in data["inputs"])
        return cls(**{**{f.name: data[f.name] for f in fields(cls)}, "inputs": inputs})


def format_table(report: ReplayReport) -> str:
    """The figures as aligned plain text, without a final newline.

    One line per input and, with more than one, a line for the total. Below it, of all inputs
    together, acceptance at up to eight positions; the JSON has all, by input.
    """
    rows = [_HEADER, *(_row(figures) for figures in report.inputs)]
    if len(report.inputs) > 1:
        rows.append(_row(report.total))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [_caption(report)]
    if report.tokenizer is not None and report.tokenizer["name"] == "bytes":
        lines.append(BYTES_WARNING)
    if report.tokenizer is not None and not report.tokenizer.get("chosen", True):
        lines.append(TOKENIZER_WARNING)
    lines.append("")
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    figures = report.total
    rates = " ".join(_number(rate) for rate in figures.acceptance_rate_per_pos[:_MAX_POSITIONS])
    more = " ..." if len(figures.acceptance_rate_per_pos) > _MAX_POSITIONS else ""
    lines += ["", f"accepted by position: {rates or '-'}{more}"]
    lines.append(
        f"drafting: {_number(figures.draft_us_per_call, 1)} us per call, "
        f"{_number(figures.draft_us_per_step)} per step, "
        f"{_number(figures.draft_us_per_token)} per token"
    )
    for figures in report.inputs:
        lines += [printable(f"note ({figures.name}): {note}") for note in figures.notes]
    return "\n".join(lines)


def short_name(name: str) -> str:
    """An input's name as tables show it: at most 22 characters, its end."""
    shown = printable(name)
    return shown if len(shown) <= _NAME_WIDTH else f"...{shown[3 - _NAME_WIDTH :]}"


_HEADER = (
    "input",
    "requests",
    "tokens",
    "tokens/step",
    "drafted/step",
    "no draft",
)


def _row(figures: ReplayFigures) -> tuple[str, ...]:
    return (
        short_name(figures.name),
        str(figures.num_requests),
        str(figures.num_tokens),
        _number(figures.tokens_per_step),
        _number(figures.draft_tokens_per_step),
        "-" if figures.no_draft_share is None else f"{figures.no_draft_share:.1%}",
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _caption(report: ReplayReport) -> str:
    config = report.config
    # Older results do not have the field `sizes`.
    is_ladder = config.get("sizes") == "ladder"
    found = "1, 2, 4, 8 or 16" if is_ladder else f"{config['min_n']}-{config['max_n']}"
    # Nor the field `drafts`.
    drafts = config.get("drafts", "trimmed")
    parts = [f"{config['match_policy']} match of {found} tokens", f"k={config['k']} {drafts}"]
    if config.get("min_draft_probability") is not None:
        parts.append(f"min_draft_probability={config['min_draft_probability']:g}")
    if config.get("costs") is not None:
        parts.append(f"costs={config['costs']}")
    if config.get("store") is not None:
        parts.append(f"store={config['store']} of {config['store_tokens']} tokens")
        if config["generated_only"]:
            parts.append("each turn a request")
    if is_ladder and not config["overlap"]:
        parts.append("no overlap")
    elif config["overlap"] and not is_ladder:
        parts.append("overlap")
    if config["max_len"] is not None:
        parts.append(f"max_len={config['max_len']}")
    parts.append(f"batch size {report.batch_size}")
    if report.limit is not None:
        parts.append(f"first {report.limit} of each input")
    tokenizer = "token ids as recorded" if report.tokenizer is None else report.tokenizer["name"]
    parts.append(f"tokenizer: {tokenizer}")
    return printable(", ".join(parts))
