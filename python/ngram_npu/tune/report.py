"""The result of tuning: its data classes, its text and its JSON. `html` draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ngram_npu.config import STORE_TOKENS
from ngram_npu.replay.errors import printable
from ngram_npu.replay.report import BYTES_WARNING, short_name
from ngram_npu.tune.candidates import Candidate, vllm_options
from ngram_npu.tune.costs import VerificationCost
from ngram_npu.tune.runners import SYNCHRONOUS, Runner
from ngram_npu.tune.search import (
    STORE_GAIN,
    Figures,
    Interval,
    Measured,
    advice,
    best,
    frontier,
    interval,
    ranked,
)
from ngram_npu.tune.traffic import Traffic

__all__ = ["FORMAT", "BatchRow", "Setting", "TuneReport", "format_report", "make_report"]

FORMAT = "ngram_npu.tune/1"
"""Written into every JSON result; the number grows when a field changes its meaning."""

LEAST_HELD_OUT = 20
"""With fewer, nothing is recommended: resamplings of so few conversations are too alike."""

_MOST_SHOWN = 12


@dataclass(frozen=True)
class Setting:
    """Figures of one setting, on the half for choosing and on the held-out half."""

    candidate: Candidate
    chosen: Figures
    held_out: Figures


@dataclass(frozen=True)
class BatchRow:
    """Speed-ups on the held-out half at one batch size.

    Attributes:
        speedup, against: of the recommended setting and of the one it is compared with.
        ratio: of the two, over the same resampled conversations.
        expected: of the recommended setting, on the half that it was chosen on.
        best: number of the setting that is best on that half at this batch size alone.
        best_speedup: of that setting, on the held-out half.
    """

    batch: int
    speedup: Interval
    against: Interval
    ratio: Interval
    expected: float
    best: int
    best_speedup: float


@dataclass(frozen=True)
class Group:
    """Held-out conversations of one input.

    Attributes:
        speedup, against: at the smallest batch size, of all of them together.
        gaining: number of conversations that are faster with the recommended setting.
    """

    name: str
    conversations: int
    speedup: float
    against: float
    gaining: int


@dataclass(frozen=True)
class Single:
    """A held-out conversation; speed-ups of a batch of equal conversations, at the smallest batch
    size."""

    input: str
    name: str
    tokens: int
    speedup: float
    against: float


@dataclass(frozen=True)
class StoreRow:
    """Gain of a store on the held-out half, at the smallest batch size.

    Attributes:
        best, without: numbers of the best settings with and without a store.
        ratio: of their speed-ups, over the same resampled conversations.
    """

    best: int
    without: int
    ratio: Interval


@dataclass(frozen=True)
class TuneReport:
    """Result of tuning.

    Attributes:
        about: command, date, machine, versions, seconds taken.
        traffic: the conversations that were read, and those that were replayed.
        cost: the time of verification.
        settings: all settings that were tried.
        frontier: numbers of settings on the Pareto front of the held-out half: no other setting
            yields as many tokens per step with fewer drafts.
        recommended, against: numbers of settings.
        batches: by batch size, ascending.
        advice: one sentence.
        off_above: batch size above which drafting should be off; 0: for all, None: for none.
        groups: by input.
        singles: the held-out conversations, by speed-up, ascending.
        store: None if no store was tried.
        runner: where drafts are made.
        others: reports for other runners, on the same conversations.
    """

    about: Mapping[str, Any]
    traffic: Mapping[str, Any]
    cost: VerificationCost
    settings: tuple[Setting, ...]
    frontier: tuple[int, ...]
    recommended: int
    against: int
    batches: tuple[BatchRow, ...]
    advice: str
    off_above: int | None
    groups: tuple[Group, ...]
    singles: tuple[Single, ...]
    store: StoreRow | None
    runner: Runner
    others: tuple[TuneReport, ...] = ()

    @property
    def is_too_few(self) -> bool:
        """Whether there are too few held-out conversations for a recommendation."""
        return len(self.singles) < LEAST_HELD_OUT

    @property
    def candidate(self) -> Candidate:
        """The recommended one."""
        return self.settings[self.recommended].candidate

    @property
    def vllm_options(self) -> tuple[str, str]:
        """Options of `vllm serve` for the recommended setting."""
        return vllm_options(self.candidate, self.runner.method)

    def batch_name(self, batch: int) -> str:
        """As shown: "any" where the batch size does not matter."""
        return "any" if self.cost.same_for_any_batch else str(batch)

    @property
    def vllm_command(self) -> str:
        """The command line of `vllm serve` for the recommended setting."""
        words = " ".join([*self.runner.variables, "vllm serve MODEL"])
        return " \\\n  ".join([words, *self.vllm_options])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        return {
            "format": FORMAT,
            **self.about,
            "traffic": dict(self.traffic),
            "cost": {
                "name": self.cost.name,
                "is_example": self.cost.is_example,
                "synchronous": self.cost.synchronous,
            },
            "runner": {"name": self.runner.name, "about": self.runner.about},
            "too_few": self.is_too_few,
            "advice": self.advice,
            "off_above_batch": self.off_above,
            "recommended": {
                "label": self.candidate.label,
                "config": dict(self.candidate.options),
                "drafts": self.candidate.drafts,
                "vllm_options": list(self.vllm_options),
                **_pair(self.settings[self.recommended]),
            },
            "against": {
                "label": self.settings[self.against].candidate.label,
                **_pair(self.settings[self.against]),
            },
            "store": self.store
            and {
                "best": self.settings[self.store.best].candidate.label,
                "without": self.settings[self.store.without].candidate.label,
                "ratio": asdict(self.store.ratio),
                "is_recommended": self.candidate.has_store,
            },
            "batches": [
                {**asdict(row), "best": self.settings[row.best].candidate.label}
                for row in self.batches
            ],
            "frontier": [self.settings[i].candidate.label for i in self.frontier],
            "settings": [
                {
                    "label": s.candidate.label,
                    "config": dict(s.candidate.options),
                    **_pair(s),
                }
                for s in self.settings
            ],
            "inputs": [asdict(group) for group in self.groups],
            "conversations": [asdict(single) for single in self.singles],
            "others": [other.to_dict() for other in self.others],
        }

    def to_json(self) -> str:
        """`to_dict` as indented JSON with a final newline."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"


def _pair(setting: Setting) -> dict[str, Any]:
    return {
        half: {
            **asdict(figures),
            "tokens_per_step": figures.tokens_per_step,
            "drafted_per_step": figures.drafted_per_step,
        }
        for half, figures in (("chosen_half", setting.chosen), ("held_out", setting.held_out))
    }


def make_report(
    measured: Measured,
    cost: VerificationCost,
    traffic: Traffic,
    *,
    against: Candidate,
    runner: Runner,
    about: Mapping[str, Any],
) -> TuneReport:
    """Choose on one half of the conversations and judge on the other."""
    compared = measured.candidates.index(against)
    half = measured.chosen_half
    recommended = best(measured, cost)
    settings = tuple(
        Setting(c, measured.figures(i, half), measured.figures(i, ~half))
        for i, c in enumerate(measured.candidates)
    )
    rows = []
    for batch in cost.batch_sizes:
        best_here = best(measured, cost.at([batch]))
        rows.append(
            BatchRow(
                batch=batch,
                speedup=interval(measured, recommended, cost, batch),
                against=interval(measured, compared, cost, batch),
                ratio=interval(measured, recommended, cost, batch, compared),
                expected=measured.speedup(recommended, cost, batch, half),
                best=best_here,
                best_speedup=measured.speedup(best_here, cost, batch, ~half),
            )
        )
    sentence, off_above = advice([(row.batch, row.speedup) for row in rows], cost)
    smallest = cost.batch_sizes[0]
    own = measured.each(recommended, cost, smallest)
    other = measured.each(compared, cost, smallest)
    singles = [
        Single(
            traffic.inputs[traffic.input_of[n]],
            traffic.names[n],
            int(measured.tokens[n]),
            round(float(own[n]), 4),
            round(float(other[n]), 4),
        )
        for n in np.flatnonzero(~half)
    ]
    groups = []
    for number, name in enumerate(traffic.inputs):
        where = ~half & (traffic.input_of == number)
        if where.any():
            groups.append(
                Group(
                    name,
                    int(where.sum()),
                    measured.speedup(recommended, cost, smallest, where),
                    measured.speedup(compared, cost, smallest, where),
                    int((own[where] > 1).sum()),
                )
            )
    order = ranked(measured, cost)
    with_store = [i for i in order if measured.candidates[i].has_store]
    without = [i for i in order if not measured.candidates[i].has_store]
    store = None
    if with_store and without:
        ratio = interval(measured, with_store[0], cost, smallest, without[0])
        store = StoreRow(with_store[0], without[0], ratio)
    return TuneReport(
        about=about,
        traffic={
            "inputs": list(traffic.inputs),
            "conversations": len(traffic.names),
            "conversations_without_a_step": traffic.left_out,
            "characters": traffic.characters,
            "conversations_found": traffic.found,
            "characters_found": traffic.found_characters,
            "is_sample": traffic.is_sample,
            "tokens": int(measured.tokens.sum()),
            "held_out_conversations": len(singles),
            "tokenizer": traffic.tokenizer,
            "notes": list(traffic.notes),
        },
        cost=cost,
        settings=settings,
        frontier=tuple(frontier([s.held_out for s in settings])),
        recommended=recommended,
        against=compared,
        runner=runner,
        batches=tuple(rows),
        advice=sentence,
        off_above=off_above,
        groups=tuple(groups),
        singles=tuple(sorted(singles, key=lambda s: (s.speedup, s.input, s.name))),
        store=store,
    )


# As text


def format_report(report: TuneReport) -> str:
    """The report as text for a terminal, without a final newline."""
    lines = describe(report)
    for part in (report, *report.others):
        lines += ["", *advice_lines(part), *store_lines(part), ""]
        lines.append("Speed-up on the held-out half, with its 95 % interval over conversations,")
        lines += [f"compared with {part.settings[part.against].candidate.label}:", ""]
        rows = [
            [part.batch_name(r.batch), str(r.speedup), str(r.against), str(r.ratio)]
            for r in part.batches
        ]
        lines += _aligned([["batch", "best setting", "compared with", "ratio"], *rows])
    return "\n".join([*lines, *_frontier_lines(report), *_input_lines(report)])


def advice_lines(report: TuneReport) -> list[str]:
    """Lines about the runner, and the recommended setting for it as a command."""
    best_found = report.candidate.label
    lines = [f"{report.runner.name}: {report.runner.about}"]
    if report.runner.is_synchronous:
        share = report.cost.synchronous
        how = "assumed, not measured" if share == SYNCHRONOUS else "as given, or measured with it"
        lines.append(f"In the figures each step takes {share:.0%} longer for it ({how}).")
    if report.is_too_few:
        return [
            *lines,
            f"TOO FEW: {len(report.singles)} held-out conversations; a recommendation needs "
            f"{LEAST_HELD_OUT}.",
            f"The best setting found: {best_found}",
        ]
    if report.off_above == 0:
        return [*lines, f"ADVICE: {report.advice}", f"The best setting found: {best_found}"]
    return [*lines, f"RECOMMENDED: {best_found}", report.advice, "", report.vllm_command, ""]


def _frontier_lines(report: TuneReport) -> list[str]:
    lines = [
        "",
        f"Frontier on the held-out half, {report.runner.name} (nothing else yields as much with",
        "fewer drafts):",
        "",
    ]
    shown = {report.recommended: "best", report.against: "compared with"}
    numbers = sorted(
        {*_spread(report.frontier), *shown},
        key=lambda i: report.settings[i].held_out.drafted_per_step,
    )
    lines += _aligned(
        [["setting", "tokens/step", "drafted/step", ""]]
        + [
            [
                report.settings[i].candidate.label,
                f"{report.settings[i].held_out.tokens_per_step:.3f}",
                f"{report.settings[i].held_out.drafted_per_step:.3f}",
                shown.get(i, ""),
            ]
            for i in numbers
        ],
        left_first=True,
        left_last=True,
    )
    return lines


def _input_lines(report: TuneReport) -> list[str]:
    lines = ["", f"By input, batch {report.batch_name(report.batches[0].batch)}:", ""]
    lines += _aligned(
        [["input", "conversations", "speed-up", "compared with", "gaining"]]
        + [
            [
                short_name(g.name),
                str(g.conversations),
                f"{g.speedup:.3f}",
                f"{g.against:.3f}",
                f"{g.gaining / g.conversations:.0%}",
            ]
            for g in sorted(report.groups, key=lambda g: -g.speedup)
        ],
        left_first=True,
    )
    losing = [s for s in report.singles if s.speedup < 1]
    lines += ["", f"{len(losing)} of {len(report.singles)} conversations do not gain."]
    if report.singles:
        most, least = report.singles[-1], report.singles[0]
        for word, of in (("Most", most), ("Least", least)):
            named = printable(f"{of.name} of {of.input}")
            lines.append(f"{word}: {of.speedup:.2f}, {named}, {of.tokens} tokens")
    return lines


def describe(report: TuneReport) -> list[str]:
    """Lines about traffic, cost and settings."""
    traffic = report.traffic
    kept = (
        f"{traffic['conversations']} conversations, {traffic['characters'] / 1e6:.3g} million "
        f"characters, {traffic['tokens']} generated tokens"
    )
    if traffic["is_sample"]:
        kept += (
            f" (a SAMPLE of {traffic['conversations_found']} conversations, "
            f"{traffic['characters_found'] / 1e6:.3g} million characters)"
        )
    lines = [
        f"Traffic: {kept}",
        f"Verification cost: {printable(report.cost.name)}",
        f"{len(report.settings)} settings, chosen on one half of the conversations; figures are of "
        f"the other {traffic['held_out_conversations']}. Tokenizer: "
        f"{printable(traffic['tokenizer'] or 'token ids as recorded')}",
    ]
    lines += [printable(f"Note: {note}") for note in traffic["notes"]]
    if (traffic["tokenizer"] or "").startswith("bytes:"):
        lines.append(BYTES_WARNING)
    if report.cost.is_example:
        lines.append(
            "The verification cost is an EXAMPLE: measure your server's with "
            "`ngram-npu measure-cost`, or pass -c."
        )
    return lines


def store_lines(report: TuneReport) -> list[str]:
    """Lines about the gain of a store, and about the sharing of text if it is recommended."""
    row = report.store
    if row is None:
        return []
    lines = [
        f"Store: {report.settings[row.best].candidate.label} is {row.ratio} times as "
        f"fast as {report.settings[row.without].candidate.label} on the held-out half."
    ]
    if not report.candidate.has_store:
        lines.append(
            "No store is recommended: on the half for choosing it gains less than "
            f"{STORE_GAIN - 1:.0%}."
        )
        return lines
    lines.append(
        "A store shares text: requests of one scope draft each other's text and can detect it by "
        "timing (docs/guides/store.md)."
    )
    if row.ratio.low <= 1:
        lines.append("Its gain is NOT SURE: the interval includes 1. Better use no store.")
    tokens = report.candidate.config.store_tokens
    if tokens != STORE_TOKENS:
        lines.append(f"This one holds {tokens} tokens: --max-num-seqs at most {tokens // 1024}.")
    return lines


def _spread(numbers: Sequence[int]) -> list[int]:
    """At most `_MOST_SHOWN` of the numbers, evenly spaced, with the first and the last."""
    if len(numbers) <= _MOST_SHOWN:
        return list(numbers)
    picked = np.linspace(0, len(numbers) - 1, _MOST_SHOWN).round().astype(int)
    return [numbers[i] for i in picked]


def _aligned(
    rows: Sequence[Sequence[str]], left_first: bool = False, left_last: bool = False
) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if left_first:
            cells[0] = row[0].ljust(widths[0])
        if left_last:
            cells[-1] = row[-1]
        lines.append("  ".join(["", *cells]).rstrip())
    return lines
