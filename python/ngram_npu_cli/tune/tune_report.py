"""The result of tuning: its data classes, its JSON, and its text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ngram_npu.config import STORE_TOKENS
from ngram_npu.errors import escape_unprintable
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.replay.walks import Counts as TotalCounts
from ngram_npu_cli.report import BYTES_WARNING, JsonReport, align_columns, shorten_name
from ngram_npu_cli.tune.candidates import SYNCHRONOUS, Candidate, Runner, vllm_options
from ngram_npu_cli.tune.ranking import (
    Interval,
    Measured,
    StoreGain,
    advise,
    compute_interval,
    find_frontier,
    recommend,
)
from ngram_npu_cli.tune.traffic import Traffic

FORMAT = "ngram_npu.tune/2"
"""Written into every JSON result; the number grows when a field changes its meaning."""

MIN_HELD_OUT = 20
"""With fewer conversations nothing is recommended: their resamplings are too similar."""

_MAX_SHOWN = 12


@dataclass(frozen=True)
class Setting:
    """Figures of one setting, on the half for choosing and on the held-out half."""

    candidate: Candidate
    chosen: TotalCounts
    held_out: TotalCounts

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures of both halves."""
        halves = {"chosen_half": self.chosen, "held_out": self.held_out}
        return {
            half: {
                **asdict(counts),
                "tokens_per_step": counts.tokens_per_step,
                "drafted_per_step": counts.drafted_per_step,
            }
            for half, counts in halves.items()
        }


@dataclass(frozen=True)
class BatchRow:
    """Speed-ups on the held-out half at one batch size.

    Attributes:
        speedup, against: Of the recommended setting and of the one it is compared with.
        ratio: Of the two, over the same resampled conversations.
        expected: Of the recommended setting, on the half that it was chosen on.
        best: Number of the setting that is best on that half at this batch size alone.
        best_speedup: Of that setting, on the held-out half.
        use: Number of the setting to use: the first of the recommended one, the best for this batch
            size alone, and the one compared with, with an interval above 1. None: none of them.
    """

    batch: int
    speedup: Interval
    against: Interval
    ratio: Interval
    expected: float
    best: int
    best_speedup: Interval
    use: int | None


@dataclass(frozen=True)
class Group:
    """Held-out conversations of one input.

    Attributes:
        speedup, against: At the smallest batch size, of all of them together.
        gaining: Number of conversations that are faster with the recommended setting.
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
class TuneReport(JsonReport):
    """Result of tuning.

    Attributes:
        about: Command, date, machine, versions, seconds taken.
        traffic: The conversations that were read, and those that were replayed.
        cost: The time of verification.
        settings: All settings that were tried.
        frontier: Numbers of settings on the Pareto front of the held-out half.
        recommended, against: Numbers of settings.
        batches: By batch size, ascending.
        advice: One sentence.
        off_above: Batch size above which drafting should be off; 0: for all, None: for none.
        groups: By input.
        singles: The held-out conversations, by speed-up, ascending.
        store: None if no store was tried.
        runner: Where drafts are made.
        others: Reports for other runners, on the same conversations.
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
    store: StoreGain | None
    runner: Runner
    others: tuple[TuneReport, ...] = ()

    @property
    def is_too_few(self) -> bool:
        """Whether there are too few held-out conversations for a recommendation."""
        return len(self.singles) < MIN_HELD_OUT

    @property
    def candidate(self) -> Candidate:
        """The recommended setting."""
        return self.settings[self.recommended].candidate

    @property
    def vllm_options(self) -> tuple[str, str]:
        """Options of `vllm serve` for the recommended setting."""
        return vllm_options(self.candidate, self.runner.method)

    @property
    def exceptions(self) -> dict[int, list[BatchRow]]:
        """Batch sizes where another setting than the recommended one should be used, by the number
        of that setting."""
        exceptions: dict[int, list[BatchRow]] = {}
        for row in self.batches:
            if row.use not in (None, self.recommended):
                exceptions.setdefault(row.use, []).append(row)
        return exceptions

    def label(self, number: int) -> str:
        """Returns the label of a setting."""
        return self.settings[number].candidate.label

    def batch_name(self, batch: int) -> str:
        """Returns a batch size as shown: "any" where it does not matter."""
        return "any" if self.cost.same_for_any_batch else str(batch)

    @property
    def vllm_command(self) -> str:
        """The command line of `vllm serve` for the recommended setting."""
        return self.command_for(self.recommended)

    def command_for(self, number: int) -> str:
        """Returns the command line of `vllm serve` for a setting."""
        words = " ".join([*self.runner.variables, "vllm serve MODEL"])
        options = vllm_options(self.settings[number].candidate, self.runner.method)
        return " \\\n  ".join([words, *options])

    def to_dict(self) -> dict[str, Any]:
        recommended = self.settings[self.recommended]
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
                **recommended.to_dict(),
            },
            "against": {
                "label": self.label(self.against),
                **self.settings[self.against].to_dict(),
            },
            "store": self.store
            and {
                "best": self.label(self.store.best),
                "without": self.label(self.store.without),
                "ratio": asdict(self.store.ratio),
                "is_recommended": self.candidate.has_store,
            },
            "batches": [
                {
                    **asdict(row),
                    "best": self.label(row.best),
                    "use": None if row.use is None else self.label(row.use),
                }
                for row in self.batches
            ],
            "frontier": [self.label(i) for i in self.frontier],
            "settings": [
                {
                    "label": setting.candidate.label,
                    "config": dict(setting.candidate.options),
                    **setting.to_dict(),
                }
                for setting in self.settings
            ],
            "inputs": [asdict(group) for group in self.groups],
            "conversations": [asdict(single) for single in self.singles],
            "others": [other.to_dict() for other in self.others],
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
    """Chooses on one half of the conversations and judges on the other."""
    compared = measured.candidates.index(against)
    held_out = ~measured.chosen_half
    recommended, store = recommend(measured, cost)
    rows = _make_rows(measured, cost, recommended, compared)
    usable = [row.use for row in rows if row.use is not None]
    if usable and recommended not in usable:
        recommended = usable[0]
        rows = _make_rows(measured, cost, recommended, compared)
    advice, off_above = advise(
        [(row.batch, row.use is not None) for row in rows], any_batch=cost.same_for_any_batch
    )
    settings = tuple(
        Setting(c, measured.total(i, measured.chosen_half), measured.total(i, held_out))
        for i, c in enumerate(measured.candidates)
    )
    smallest = cost.batch_sizes[0]
    speedups = measured.speedup_per_conversation(recommended, cost, smallest)
    speedups_against = measured.speedup_per_conversation(compared, cost, smallest)
    singles = [
        Single(
            traffic.inputs[traffic.input_of[n]],
            traffic.names[n],
            int(measured.tokens[n]),
            round(float(speedups[n]), 4),
            round(float(speedups_against[n]), 4),
        )
        for n in np.flatnonzero(held_out)
    ]
    groups = []
    for number, name in enumerate(traffic.inputs):
        where = held_out & (traffic.input_of == number)
        if where.any():
            groups.append(
                Group(
                    name,
                    int(where.sum()),
                    measured.speedup(recommended, cost, smallest, where),
                    measured.speedup(compared, cost, smallest, where),
                    int((speedups[where] > 1).sum()),
                )
            )
    return TuneReport(
        about=about,
        traffic={
            "inputs": list(traffic.inputs),
            "conversations": len(traffic.names),
            "conversations_without_a_step": traffic.left_out,
            "characters": traffic.characters,
            "conversations_found": traffic.num_read,
            "characters_found": traffic.characters_read,
            "is_sample": traffic.is_sample,
            "tokens": int(measured.tokens.sum()),
            "held_out_conversations": len(singles),
            "tokenizer": traffic.tokenizer,
            "notes": list(traffic.notes),
        },
        cost=cost,
        settings=settings,
        frontier=tuple(find_frontier([setting.held_out for setting in settings])),
        recommended=recommended,
        against=compared,
        runner=runner,
        batches=tuple(rows),
        advice=advice,
        off_above=off_above,
        groups=tuple(groups),
        singles=tuple(sorted(singles, key=lambda s: (s.speedup, s.input, s.name))),
        store=store,
    )


def _make_rows(
    measured: Measured, cost: VerificationCost, recommended: int, compared: int
) -> list[BatchRow]:
    rows = []
    for batch in cost.batch_sizes:
        best, _ = recommend(measured, cost.at([batch]))
        intervals = {
            i: compute_interval(measured, i, cost, batch) for i in (recommended, best, compared)
        }
        rows.append(
            BatchRow(
                batch=batch,
                speedup=intervals[recommended],
                against=intervals[compared],
                ratio=compute_interval(measured, recommended, cost, batch, compared),
                expected=measured.speedup(recommended, cost, batch, measured.chosen_half),
                best=best,
                best_speedup=intervals[best],
                use=next((i for i, interval in intervals.items() if interval.low > 1), None),
            )
        )
    return rows


# Text


def format_report(report: TuneReport) -> str:
    """Returns the report as text for a terminal, without a final newline."""
    lines = describe_traffic(report)
    for part in (report, *report.others):
        lines += ["", *describe_advice(part)]
        if about_store := describe_store(part):
            lines += ["", *about_store]
        lines += [
            "",
            "Speed-up on the held-out half, with its 95 % interval over conversations,",
            f"compared with {part.label(part.against)}:",
            "",
            *_align(
                ["batch", "recommended", "compared with", "ratio"],
                *(
                    [part.batch_name(r.batch), str(r.speedup), str(r.against), str(r.ratio)]
                    for r in part.batches
                ),
            ),
        ]
        if any(row.best != part.recommended for row in part.batches):
            lines += [
                "",
                "The best setting for one batch size alone (--batch-size B has its options):",
                "",
                *_align(
                    ["batch", "speed-up", "setting"],
                    *(
                        [part.batch_name(r.batch), str(r.best_speedup), part.label(r.best)]
                        for r in part.batches
                    ),
                    left=[-1],
                ),
            ]
    return "\n".join([*lines, *_describe_frontier(report), *_describe_inputs(report)])


def _align(*rows: Sequence[str], left: Sequence[int] = ()) -> list[str]:
    return align_columns(rows, left=left, indent="  ")


def describe_traffic(report: TuneReport) -> list[str]:
    """Returns lines about traffic, cost and settings."""
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
    tokenizer = traffic["tokenizer"] or "token ids as recorded"
    lines = [
        f"Traffic: {kept}",
        f"Verification cost: {escape_unprintable(report.cost.name)}",
        f"{len(report.settings)} settings, chosen on one half of the conversations; figures are of "
        f"the other {traffic['held_out_conversations']}. "
        f"Tokenizer: {escape_unprintable(tokenizer)}",
    ]
    lines += [escape_unprintable(f"Note: {note}") for note in traffic["notes"]]
    if tokenizer.startswith("bytes:"):
        lines.append(BYTES_WARNING)
    if report.cost.is_example:
        lines.append(
            "The verification cost is an EXAMPLE: measure your server's with "
            "`ngram-npu measure-cost`, or pass -c."
        )
    return lines


def describe_advice(report: TuneReport) -> list[str]:
    """Returns lines about the runner, and the recommended setting for it as a command."""
    best = f"The best setting found: {report.candidate.label}"
    lines = [f"{report.runner.name}: {report.runner.about}"]
    if report.runner.is_synchronous:
        share = report.cost.synchronous
        how = "assumed, not measured" if share == SYNCHRONOUS else "as given, or measured with it"
        lines.append(f"In the figures each step takes {share:.0%} longer for it ({how}).")
    if report.is_too_few:
        return [
            *lines,
            f"TOO FEW: {len(report.singles)} held-out conversations; a recommendation needs "
            f"{MIN_HELD_OUT}.",
            best,
        ]
    if report.off_above == 0:
        return [*lines, f"ADVICE: {report.advice}", best]
    lines += [f"RECOMMENDED: {report.candidate.label}", report.advice, "", report.vllm_command]
    for number, rows in report.exceptions.items():
        lines.append("")
        for row in rows:
            speedup = row.best_speedup if number == row.best else row.against
            lines.append(f"At batch {row.batch} use {report.label(number)}: {speedup}")
        lines += ["", report.command_for(number)]
    return lines


def describe_store(report: TuneReport) -> list[str]:
    """Returns lines about the gain of a store, and about shared text if one is recommended."""
    store = report.store
    if store is None:
        return []
    lines = [
        f"Store: {report.label(store.best)} is {store.ratio} times as "
        f"fast as {report.label(store.without)} on the held-out half."
    ]
    if not report.candidate.has_store:
        lines.append(
            "No store is recommended: it must be the fastest setting on the half for choosing, and "
            "its interval must lie above 1 on the other."
        )
        return lines
    lines.append(
        "A store shares text: requests of one scope draft each other's text and can detect it by "
        "timing (docs/guides/store.md)."
    )
    tokens = report.candidate.config.store_tokens
    if tokens != STORE_TOKENS:
        lines.append(f"This one holds {tokens} tokens: --max-num-seqs at most {tokens // 1024}.")
    return lines


def _describe_frontier(report: TuneReport) -> list[str]:
    marks = {report.recommended: "best", report.against: "compared with"}
    numbers = sorted(
        {*_select_evenly(report.frontier), *marks},
        key=lambda i: report.settings[i].held_out.drafted_per_step,
    )
    rows = [
        [
            report.label(i),
            f"{report.settings[i].held_out.tokens_per_step:.3f}",
            f"{report.settings[i].held_out.drafted_per_step:.3f}",
            marks.get(i, ""),
        ]
        for i in numbers
    ]
    return [
        "",
        f"Frontier on the held-out half, {report.runner.name} (no other setting yields as much",
        "with fewer drafts):",
        "",
        *_align(["setting", "tokens/step", "drafted/step", ""], *rows, left=[0, -1]),
    ]


def _describe_inputs(report: TuneReport) -> list[str]:
    rows = [
        [
            shorten_name(group.name),
            str(group.conversations),
            f"{group.speedup:.3f}",
            f"{group.against:.3f}",
            f"{group.gaining / group.conversations:.0%}",
        ]
        for group in sorted(report.groups, key=lambda group: -group.speedup)
    ]
    header = ["input", "conversations", "speed-up", "compared with", "gaining"]
    losing = sum(single.speedup < 1 for single in report.singles)
    lines = [
        "",
        f"By input, batch {report.batch_name(report.batches[0].batch)}:",
        "",
        *_align(header, *rows, left=[0]),
        "",
        f"{losing} of {len(report.singles)} conversations do not gain.",
    ]
    if report.singles:
        for word, single in (("Most", report.singles[-1]), ("Least", report.singles[0])):
            name = escape_unprintable(f"{single.name} of {single.input}")
            lines.append(f"{word}: {single.speedup:.2f}, {name}, {single.tokens} tokens")
    return lines


def _select_evenly(numbers: Sequence[int]) -> list[int]:
    """Returns at most `_MAX_SHOWN` of the numbers, with the first and the last."""
    if len(numbers) <= _MAX_SHOWN:
        return list(numbers)
    picked = np.linspace(0, len(numbers) - 1, _MAX_SHOWN).round().astype(int)
    return [numbers[i] for i in picked]
