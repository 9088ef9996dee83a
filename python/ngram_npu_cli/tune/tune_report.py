"""The result of tuning: its data classes, its JSON form, and its text as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ngram_npu.config import STORE_TOKENS
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.replay.walks import Counts as TotalCounts
from ngram_npu_cli.report import (
    BYTES_WARNING,
    Block,
    Command,
    JsonReport,
    Table,
    format_blocks,
    shorten_name,
)
from ngram_npu_cli.tune import ranking
from ngram_npu_cli.tune.candidates import SYNCHRONOUS, Candidate, Runner, vllm_options
from ngram_npu_cli.tune.ranking import Interval, Measured, StoreGain
from ngram_npu_cli.tune.traffic import Traffic

FORMAT = "ngram_npu.tune/2"
"""Written into every JSON result; the number grows when a field changes its meaning."""

MIN_HELD_OUT = 20
"""With fewer conversations nothing is recommended: their resamplings are too similar."""

_MAX_SHOWN = 12


@dataclass(frozen=True)
class Setting:
    """Figures of one setting, on the half for choosing and on the held-out half."""

    chosen: TotalCounts
    held_out: TotalCounts

    def to_dict(self) -> dict[str, Any]:
        return {
            half: {
                **asdict(counts),
                "tokens_per_step": counts.tokens_per_step,
                "drafted_per_step": counts.drafted_per_step,
            }
            for half, counts in (("chosen_half", self.chosen), ("held_out", self.held_out))
        }


@dataclass(frozen=True)
class BatchRow:
    """Speed-ups on the held-out half at one batch size.

    Attributes:
        speedup, against: Of the recommended setting and of the one it is compared with.
        ratio: Of the two, over the same resampled conversations.
        expected: Of the recommended setting, on the half that it was chosen on.
        best: The setting that is best on that half at this batch size alone.
        best_speedup: Of that setting, on the held-out half.
        use: The setting to use: the first of the recommended one, the best for this batch size
            alone, and the one compared with, with an interval above 1. None: none of them.
    """

    batch: int
    speedup: Interval
    against: Interval
    ratio: Interval
    expected: float
    best: Candidate
    best_speedup: Interval
    use: Candidate | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best.label, "use": self.use and self.use.label}


@dataclass(frozen=True)
class Group:
    """Held-out conversations of one input: speed-ups of all of them at the smallest batch size, and
    the number of conversations that are faster with the recommended setting."""

    name: str
    conversations: int
    speedup: float
    against: float
    gaining: int


@dataclass(frozen=True)
class Single:
    """A held-out conversation; speed-ups at the smallest batch size."""

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
        frontier: The settings on the Pareto front of the held-out half.
        candidate, against: The recommended setting, and the one it is compared with.
        batches: By batch size, ascending.
        advice: One sentence.
        off_above: Batch size above which drafting should be off; 0: for all, None: for none.
        lengths: vLLM's ``num_speculative_tokens_per_batch_size``; empty: not supported by the
            runner, or the cost is the same for any batch size.
        groups: By input.
        singles: The held-out conversations, by speed-up, ascending.
        store: None if no store was tried.
        runner: Where drafts are made.
        others: Reports for other runners, on the same conversations.
    """

    about: Mapping[str, Any]
    traffic: Mapping[str, Any]
    cost: VerificationCost
    settings: Mapping[Candidate, Setting]
    frontier: tuple[Candidate, ...]
    candidate: Candidate
    against: Candidate
    batches: tuple[BatchRow, ...]
    advice: str
    off_above: int | None
    lengths: tuple[tuple[int, int, int], ...]
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
    def vllm_options(self) -> tuple[str, str]:
        """Options of `vllm serve` for the recommended setting."""
        return vllm_options(self.candidate, self.runner.method)

    def batch_name(self, batch: int) -> str:
        """Returns a batch size as shown: "any" where it does not matter."""
        return "any" if self.cost.same_for_any_batch else str(batch)

    def command_for(self, candidate: Candidate) -> str:
        """Returns the command line of `vllm serve` for a setting."""
        words = " ".join([*self.runner.variables, "vllm serve MODEL"])
        return " \\\n  ".join([words, *vllm_options(candidate, self.runner.method)])

    def to_dict(self) -> dict[str, Any]:
        store = self.store and {
            "best": self.store.best.label,
            "without": self.store.without.label,
            "ratio": asdict(self.store.ratio),
            "is_recommended": self.candidate.has_store,
        }
        return {
            "format": FORMAT,
            **self.about,
            "traffic": dict(self.traffic),
            "cost": {
                name: getattr(self.cost, name) for name in ("name", "is_example", "synchronous")
            },
            "runner": {"name": self.runner.name, "about": self.runner.about},
            "too_few": self.is_too_few,
            "advice": self.advice,
            "off_above_batch": self.off_above,
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in self.lengths],
            "recommended": {
                "label": self.candidate.label,
                "config": dict(self.candidate.options),
                "drafts": self.candidate.drafts,
                "vllm_options": list(self.vllm_options),
                **self.settings[self.candidate].to_dict(),
            },
            "against": {"label": self.against.label, **self.settings[self.against].to_dict()},
            "store": store,
            "batches": [row.to_dict() for row in self.batches],
            "frontier": [candidate.label for candidate in self.frontier],
            "settings": [
                {"label": c.label, "config": dict(c.options), **setting.to_dict()}
                for c, setting in self.settings.items()
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
    held_out = ~measured.chosen_half
    candidate, store = ranking.recommend(measured, cost)
    rows = _make_rows(measured, cost, candidate, against)
    usable = [row.use for row in rows if row.use is not None]
    if usable and candidate not in usable:
        candidate = usable[0]
        rows = _make_rows(measured, cost, candidate, against)
    advice, off_above = ranking.advise(
        [(row.batch, row.use is not None) for row in rows], any_batch=cost.same_for_any_batch
    )
    has_lengths = runner.method == "ngram_gpu" and not cost.same_for_any_batch
    lengths = ranking.choose_lengths(measured, cost, candidate) if has_lengths else []
    settings = {
        c: Setting(measured.total(c, measured.chosen_half), measured.total(c, held_out))
        for c in measured.counts
    }
    batch, tokens = cost.batch_sizes[0], measured.tokens
    speedups, speedups_against = (
        cost.speedup(batch, tokens, measured.counts[c]) for c in (candidate, against)
    )
    singles = [
        Single(
            traffic.inputs[traffic.input_of[n]],
            traffic.names[n],
            int(tokens[n]),
            round(float(speedups[n]), 4),
            round(float(speedups_against[n]), 4),
        )
        for n in np.flatnonzero(held_out)
    ]
    groups = []
    for number, name in enumerate(traffic.inputs):
        where = held_out & (traffic.input_of == number)
        if where.any():
            speedup, compared = (
                measured.speedup(c, cost, batch, where) for c in (candidate, against)
            )
            gaining = int((speedups[where] > 1).sum())
            groups.append(Group(name, int(where.sum()), speedup, compared, gaining))
    return TuneReport(
        about=about,
        traffic=traffic.describe(),
        cost=cost,
        settings=settings,
        frontier=tuple(
            ranking.find_frontier({c: setting.held_out for c, setting in settings.items()})
        ),
        candidate=candidate,
        against=against,
        runner=runner,
        batches=tuple(rows),
        advice=advice,
        off_above=off_above,
        lengths=tuple(lengths),
        groups=tuple(groups),
        singles=tuple(sorted(singles, key=lambda s: (s.speedup, s.input, s.name))),
        store=store,
    )


def _make_rows(
    measured: Measured, cost: VerificationCost, candidate: Candidate, against: Candidate
) -> list[BatchRow]:
    rows = []
    for batch in cost.batch_sizes:
        best, _ = ranking.recommend(measured, cost.at([batch]))
        intervals = {
            c: ranking.compute_interval(measured, c, cost, batch)
            for c in (candidate, best, against)
        }
        rows.append(
            BatchRow(
                batch=batch,
                speedup=intervals[candidate],
                against=intervals[against],
                ratio=ranking.compute_interval(measured, candidate, cost, batch, against),
                expected=measured.speedup(candidate, cost, batch, measured.chosen_half),
                best=best,
                best_speedup=intervals[best],
                use=next((c for c, interval in intervals.items() if interval.low > 1), None),
            )
        )
    return rows


# Text


def format_report(report: TuneReport) -> str:
    """Returns the report as text for a terminal, without a final newline."""
    return format_blocks(describe(report), indent="  ")


def describe(report: TuneReport) -> list[Block]:
    """Returns the lines, tables and commands of the report."""
    blocks: list[Block] = [*_describe_traffic(report)]
    for part in (report, *report.others):
        blocks += ["", *_describe_advice(part), *_describe_store(part), *_describe_speedups(part)]
    return [*blocks, *_describe_frontier(report), *_describe_inputs(report)]


def _describe_traffic(report: TuneReport) -> list[str]:
    traffic = report.traffic
    size = (
        f"{traffic['conversations']} conversations, {traffic['characters'] / 1e6:.3g} million "
        f"characters, {traffic['tokens']} generated tokens"
    )
    if traffic["is_sample"]:
        size += (
            f" (a SAMPLE of {traffic['conversations_found']} conversations, "
            f"{traffic['characters_found'] / 1e6:.3g} million characters)"
        )
    tokenizer = traffic["tokenizer"] or "token ids as recorded"
    lines = [
        f"Traffic: {size}",
        f"Verification cost: {report.cost.name}",
        f"{len(report.settings)} settings, chosen on one half of the conversations; figures are of "
        f"the other {traffic['held_out_conversations']}. Tokenizer: {tokenizer}",
    ]
    lines += [f"Note: {note}" for note in traffic["notes"]]
    if tokenizer.startswith("bytes:"):
        lines.append(BYTES_WARNING)
    if report.cost.is_example:
        lines.append(
            "The verification cost is an EXAMPLE: measure your server's with "
            "`ngram-npu measure-cost`, or pass -c."
        )
    return lines


def _describe_advice(report: TuneReport) -> list[Block]:
    lines: list[Block] = [f"{report.runner.name}: {report.runner.about}"]
    if report.runner.is_synchronous:
        share = report.cost.synchronous
        how = "assumed, not measured" if share == SYNCHRONOUS else "as given, or measured with it"
        lines.append(f"In the figures each step takes {share:.0%} longer for it ({how}).")
    best = f"The best setting found: {report.candidate.label}"
    if report.is_too_few:
        few = f"TOO FEW: {len(report.singles)} held-out conversations; a recommendation needs "
        return [*lines, f"{few}{MIN_HELD_OUT}.", best]
    if report.off_above == 0:
        return [*lines, f"ADVICE: {report.advice}", best]
    lines += [f"RECOMMENDED: {report.candidate.label}", report.advice]
    lines += ["", Command(report.command_for(report.candidate))]
    if len({length for _, _, length in report.lengths}) > 1:
        entries = [list(entry) for entry in report.lengths]
        lines += [
            "",
            "To draft by batch size, add this to --speculative-config, or use the option k=auto:",
            "",
            Command(f'"num_speculative_tokens_per_batch_size": {entries}'),
        ]
    # Batch sizes where only another setting gains.
    exceptions = dict.fromkeys(row.use for row in report.batches)
    for other in exceptions:
        if other in (None, report.candidate):
            continue
        lines.append("")
        for row in report.batches:
            if row.use == other:
                speedup = row.best_speedup if other == row.best else row.against
                lines.append(f"At batch {row.batch} use {other.label}: {speedup}")
        lines += ["", Command(report.command_for(other))]
    return lines


def _describe_store(report: TuneReport) -> list[str]:
    """Returns lines about the gain of a store, and about shared text if one is recommended."""
    store = report.store
    if store is None:
        return []
    lines = [
        "",
        f"Store: {store.best.label} is {store.ratio} times as "
        f"fast as {store.without.label} on the held-out half.",
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


def _describe_speedups(report: TuneReport) -> list[Block]:
    header = ["batch", "recommended", "compared with", "ratio"]
    rows = [
        [report.batch_name(r.batch), str(r.speedup), str(r.against), str(r.ratio)]
        for r in report.batches
    ]
    blocks: list[Block] = [
        "",
        "Speed-up on the held-out half, with its 95 % interval over conversations,",
        f"compared with {report.against.label}:",
        "",
        Table([header, *rows]),
    ]
    if any(row.best != report.candidate for row in report.batches):
        rows = [
            [report.batch_name(r.batch), str(r.best_speedup), r.best.label] for r in report.batches
        ]
        blocks += [
            "",
            "The best setting for one batch size alone (--batch-size B has its options):",
            "",
            Table([["batch", "speed-up", "setting"], *rows], left=[2]),
        ]
    return blocks


def _describe_frontier(report: TuneReport) -> list[Block]:
    shown = report.frontier
    if len(shown) > _MAX_SHOWN:  # a selection at equal distances, with the first and the last
        places = np.linspace(0, len(shown) - 1, _MAX_SHOWN).round().astype(int)
        shown = tuple(shown[place] for place in places)
    marks = {report.candidate: "best", report.against: "compared with"}
    figures = [
        (candidate, setting.held_out)
        for candidate, setting in report.settings.items()
        if candidate in (*shown, *marks)
    ]
    rows = [
        [c.label, f"{n.tokens_per_step:.3f}", f"{n.drafted_per_step:.3f}", marks.get(c, "")]
        for c, n in sorted(figures, key=lambda figure: figure[1].drafted_per_step)
    ]
    return [
        "",
        f"Frontier on the held-out half, {report.runner.name} (no other setting yields as much",
        "with fewer drafts):",
        "",
        Table([["setting", "tokens/step", "drafted/step", ""], *rows], left=[0, 3]),
    ]


def _describe_inputs(report: TuneReport) -> list[Block]:
    header = ["input", "conversations", "speed-up", "compared with", "gaining"]
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
    losing = sum(single.speedup < 1 for single in report.singles)
    blocks: list[Block] = [
        "",
        f"By input, batch {report.batch_name(report.batches[0].batch)}:",
        "",
        Table([header, *rows], left=[0]),
        "",
        f"{losing} of {len(report.singles)} conversations do not gain.",
    ]
    for word, single in (("Most", report.singles[-1]), ("Least", report.singles[0])):
        about = f"{single.name} of {single.input}, {single.tokens} tokens"
        blocks.append(f"{word}: {single.speedup:.2f}, {about}")
    return blocks
