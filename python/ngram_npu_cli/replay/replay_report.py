"""Contains the result of a replay: counts of each input, the report, its table and its JSON
form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngram_npu_cli.report import (
    BYTES_WARNING,
    TOKENIZER_WARNING,
    Block,
    Table,
    format_blocks,
    format_number,
    shorten_name,
)

FORMAT = "ngram_npu.replay/1"
"""Format name in every JSON result. The number increases when a field changes its meaning."""

_MAX_POSITIONS = 8


@dataclass(frozen=True)
class ReplayFigures:
    """Counts over one input. Every ratio is that of sums over the whole input, not a mean of
    ratios.

    K is the number of draft tokens requested per step. A step belongs to one request; one call of
    the proposer makes a step of every request in the batch.

    Attributes:
        num_requests: Number of replayed conversations.
        num_prompt_tokens: Number of tokens of all prompts, including the chat template.
        num_tokens: Number of tokens generated in steps: all except each completion's first one.
        num_calls: Number of calls of the proposer.
        draft_time_ns: Time spent inside those calls, in nanoseconds.
        num_drafts: Number of steps with at least one draft token.
        draft_tokens_per_pos: [K], number of steps that drafted a token at each position.
        accepted_tokens_per_pos: [K], number of steps that accepted the token at each position.
        accepted_length_counts: [K+1], number of steps that accepted 0, 1, ..., K draft tokens.
        notes: Notes about the input, such as skipped records.
    """

    name: str
    num_requests: int
    num_turns: int
    num_prompt_tokens: int
    num_tokens: int
    num_steps: int
    num_calls: int
    draft_time_ns: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_tokens_per_pos: tuple[int, ...]
    accepted_tokens_per_pos: tuple[int, ...]
    accepted_length_counts: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens generated per step (1.0: no gain from drafting); None without a step."""
        return _divide(self.num_tokens, self.num_steps)

    @property
    def draft_tokens_per_step(self) -> float | None:
        return _divide(self.num_draft_tokens, self.num_steps)

    @property
    def acceptance_rate(self) -> float | None:
        return _divide(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> tuple[float | None, ...]:
        """[K], for each position the ratio of steps that accepted the token there to steps with a
        draft, as vLLM reports it."""
        return tuple(_divide(n, self.num_drafts) for n in self.accepted_tokens_per_pos)

    @property
    def no_draft_share(self) -> float | None:
        return _divide(self.num_steps - self.num_drafts, self.num_steps)

    @property
    def draft_us_per_call(self) -> float | None:
        """Drafting time of one call of the proposer (a whole batch), in microseconds."""
        return _divide(self.draft_time_ns / 1e3, self.num_calls)

    @property
    def draft_us_per_step(self) -> float | None:
        return _divide(self.draft_time_ns / 1e3, self.num_steps)

    @property
    def draft_us_per_token(self) -> float | None:
        return _divide(self.draft_time_ns / 1e3, self.num_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and ratios by name, ready for JSON."""
        values = {name: getattr(self, name) for name in (*vars(self), *_RATIOS)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


_RATIOS = [name for name, value in vars(ReplayFigures).items() if isinstance(value, property)]


def _divide(numerator: float, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class ReplayReport:
    """Figures per input, with everything that is needed to repeat the measurement.

    `tokenizer` is None if the input was token ids. `tokenizer["chosen"]` is False if the user chose
    no tokenizer; otherwise this key is missing.
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
        """The sums over all inputs, which have the same K."""
        sums: dict[str, Any] = {}
        for name in vars(self.inputs[0]).keys() - {"name", "notes"}:
            values = [getattr(figures, name) for figures in self.inputs]
            if isinstance(values[0], tuple):
                sums[name] = tuple(map(sum, zip(*values, strict=True)))
            else:
                sums[name] = sum(values)
        return ReplayFigures("total", **sums)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **vars(self),
            "inputs": [figures.to_dict() for figures in self.inputs],
            "total": self.total.to_dict(),
        }


def format_table(report: ReplayReport) -> str:
    """Returns the figures as aligned plain text, without a final newline."""
    total = report.total
    parts = [*report.inputs, total] if len(report.inputs) > 1 else report.inputs
    header = ("input", "requests", "tokens", "tokens/step", "drafted/step", "no draft")
    blocks: list[Block] = [_describe_setting(report)]
    if report.tokenizer is not None and report.tokenizer["name"] == "bytes":
        blocks.append(BYTES_WARNING)
    if report.tokenizer is not None and not report.tokenizer.get("chosen", True):
        blocks.append(TOKENIZER_WARNING)
    per_position = total.acceptance_rate_per_pos
    rates = " ".join(format_number(rate) for rate in per_position[:_MAX_POSITIONS])
    more = " ..." if len(per_position) > _MAX_POSITIONS else ""
    blocks += [
        "",
        Table([header, *map(_make_row, parts)], left=[0]),
        "",
        f"accepted by position: {rates or '-'}{more}",
        f"drafting: {format_number(total.draft_us_per_call, 1)} us per call, "
        f"{format_number(total.draft_us_per_step)} per step, "
        f"{format_number(total.draft_us_per_token)} per token",
    ]
    blocks += [f"note ({part.name}): {note}" for part in report.inputs for note in part.notes]
    return format_blocks(blocks)


def _make_row(figures: ReplayFigures) -> tuple[str, ...]:
    return (
        shorten_name(figures.name),
        str(figures.num_requests),
        str(figures.num_tokens),
        format_number(figures.tokens_per_step),
        format_number(figures.draft_tokens_per_step),
        "-" if figures.no_draft_share is None else f"{figures.no_draft_share:.1%}",
    )


def _describe_setting(report: ReplayReport) -> str:
    config = report.config
    is_ladder = config["sizes"] == "ladder"
    sizes = "1, 2, 4, 8 or 16" if is_ladder else f"{config['min_n']}-{config['max_n']}"
    parts = [
        f"{config['match_policy']} match of {sizes} tokens",
        f"k={config['k']} {config['drafts']}",
    ]
    if config["min_draft_probability"] is not None:
        parts.append(f"min_draft_probability={config['min_draft_probability']:g}")
    if config["costs"] is not None:
        parts.append(f"costs={config['costs']}")
    if config["store"] is not None:
        parts.append(f"store={config['store']} of {config['store_tokens']} tokens")
        if config["generated_only"]:
            parts.append("each turn is a separate request, only its answer is stored")
    if is_ladder != bool(config["overlap"]):  # by default, only a ladder has overlap
        parts.append("no overlap" if is_ladder else "overlap")
    if config["max_len"] is not None:
        parts.append(f"max_len={config['max_len']}")
    parts.append(f"batch size {report.batch_size}")
    if report.limit is not None:
        parts.append(f"first {report.limit} of each input")
    tokenizer = "token ids as recorded" if report.tokenizer is None else report.tokenizer["name"]
    parts.append(f"tokenizer: {tokenizer}")
    return ", ".join(parts)
