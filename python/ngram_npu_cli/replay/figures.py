"""The figures of one replayed input: integer counts, one time, and ratios of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ReplayFigures:
    """Counts over one input; every ratio is over the whole input, not a mean of ratios.

    K is the number of draft tokens requested per step. A step belongs to one request; one call of
    the proposer makes a step of every request in the batch.

    Attributes:
        name: of the input.
        num_requests: conversations replayed.
        num_turns: turns of them.
        num_prompt_tokens: tokens of all prompts, template included.
        num_tokens: tokens generated in steps: all completion tokens but the first of each.
        num_steps: steps taken to generate them.
        num_calls: calls of the proposer.
        draft_time_ns: time spent inside those calls, in nanoseconds.
        num_drafts: steps that had at least one draft token.
        num_draft_tokens: draft tokens proposed.
        num_accepted_tokens: draft tokens accepted.
        draft_tokens_per_pos: [K], steps that proposed a draft token at each position.
        accepted_tokens_per_pos: [K], steps that accepted the one at each position.
        accepted_length_counts: [K+1], steps that accepted exactly 0, 1, ..., K drafts.
        notes: remarks that readers of the figures need (such as missing sources).
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
        """Tokens generated per step (1.0: drafting gained nothing); None without a step."""
        return _ratio(self.num_tokens, self.num_steps)

    @property
    def draft_tokens_per_step(self) -> float | None:
        """Draft tokens proposed per step."""
        return _ratio(self.num_draft_tokens, self.num_steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the proposed draft tokens that were accepted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> tuple[float | None, ...]:
        """[K], steps that accepted position j over the steps with a draft, as vLLM reports it."""
        return tuple(_ratio(n, self.num_drafts) for n in self.accepted_tokens_per_pos)

    @property
    def no_draft_share(self) -> float | None:
        """Share of the steps for which nothing was proposed."""
        return _ratio(self.num_steps - self.num_drafts, self.num_steps)

    @property
    def draft_us_per_call(self) -> float | None:
        """Drafting time of one call of the proposer (a whole batch), in microseconds."""
        return _ratio(self.draft_time_ns / 1e3, self.num_calls)

    @property
    def draft_us_per_step(self) -> float | None:
        """Drafting time of one step of one request, in microseconds."""
        return _ratio(self.draft_time_ns / 1e3, self.num_steps)

    @property
    def draft_us_per_token(self) -> float | None:
        """Drafting time per generated token, in microseconds."""
        return _ratio(self.draft_time_ns / 1e3, self.num_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Counts and ratios under their names, ready for JSON."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        ratios = {name: getattr(self, name) for name in _RATIOS}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in {**counts, **ratios}.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReplayFigures:
        """The inverse of `to_dict`; ratios are computed from the counts.

        Raises:
            KeyError: a count is missing.
        """
        values: dict[str, Any] = {f.name: data[f.name] for f in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    @classmethod
    def total(cls, parts: Iterable[ReplayFigures], name: str = "total") -> ReplayFigures:
        """The figures of several inputs taken together (all with the same K).

        Raises:
            ValueError: no parts, or parts with different K.
        """
        items = list(parts)
        if not items:
            raise ValueError("no figures to add up")
        summed: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(item, field.name) for item in items]
            if field.name in ("name", "notes"):
                continue
            if isinstance(values[0], tuple):
                summed[field.name] = tuple(map(sum, zip(*values, strict=True)))
            else:
                summed[field.name] = sum(values)
        return cls(name=name, **summed)


_RATIOS = (
    "tokens_per_step",
    "draft_tokens_per_step",
    "acceptance_rate",
    "acceptance_rate_per_pos",
    "no_draft_share",
    "draft_us_per_call",
    "draft_us_per_step",
    "draft_us_per_token",
)


def _ratio(numerator: float, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
