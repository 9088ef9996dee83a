"""Contains the data classes of the tuning result and formats the result as JSON or text."""

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
    Table,
    format_blocks,
    shorten_name,
)
from ngram_npu_cli.tune import ranking
from ngram_npu_cli.tune.candidates import SYNCHRONOUS_SHARE, Candidate, Runner, vllm_options
from ngram_npu_cli.tune.ranking import Interval, Measured, StoreGain
from ngram_npu_cli.tune.traffic import Traffic

FORMAT = "ngram_npu.tune/2"
"""Format name in every JSON result. The number increases when a field changes its meaning."""

MIN_HELD_OUT = 20
"""With fewer held-out conversations nothing is recommended, because the bootstrap's intervals are
too narrow for small samples."""

_MAX_SHOWN = 12


@dataclass(frozen=True)
class SettingCounts:
    """Counts of a setting on the selection half and on the held-out half."""

    selection: TotalCounts
    held_out: TotalCounts

    def to_dict(self) -> dict[str, Any]:
        return {
            half: {
                **asdict(counts),
                "tokens_per_step": counts.tokens_per_step,
                "drafted_per_step": counts.drafted_per_step,
            }
            for half, counts in (("chosen_half", self.selection), ("held_out", self.held_out))
        }


@dataclass(frozen=True)
class BatchRow:
    """Speed-ups on the held-out half at one batch size.

    Attributes:
        speedup, against: Speed-ups of the recommended setting and of the baseline.
        ratio: Ratio of these two speed-ups, which are computed from the same resamples.
        expected: Speed-up of the recommended setting on the selection half.
        best: The best setting on the selection half for this batch size alone.
        best_speedup: Speed-up of `best`.
        use: The setting to use: the first of the recommended setting, `best` and the baseline whose
            interval is above 1. None if there is no such setting.
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
class InputResult:
    """Speed-ups of one input's held-out conversations at the smallest batch size: of the
    recommended setting, and of the baseline (`against`). `gaining` is the number of conversations
    that the recommended setting makes faster than without drafts."""

    name: str
    conversations: int
    speedup: float
    against: float
    gaining: int


@dataclass(frozen=True)
class ConversationResult:
    """Speed-ups of one held-out conversation at the smallest batch size."""

    input: str
    name: str
    tokens: int
    speedup: float
    against: float


@dataclass(frozen=True)
class TuneReport:
    """Result of tuning.

    Attributes:
        about: Command, date, machine, versions and duration in seconds.
        traffic: Description of the conversations that were read and of those that were replayed.
        cost: The verification cost.
        settings: All settings that were tried.
        frontier: The settings on the Pareto front of the held-out half.
        candidate, against: The recommended setting, and the baseline.
        batches: Speed-ups by batch size, ascending.
        advice: Advice in one sentence.
        off_above: Batch size above which drafting should be off; 0: for all, None: for none.
        lengths: vLLM's ``num_speculative_tokens_per_batch_size``; empty if the runner does not
            support it, or the cost is the same for any batch size.
        inputs: Results by input.
        conversations: Results of the held-out conversations, by speed-up, ascending.
        store: The gain of a store; None if no store was tried.
        runner: The runner that makes the drafts.
        others: Reports for other runners, on the same conversations.
    """

    about: Mapping[str, Any]
    traffic: Mapping[str, Any]
    cost: VerificationCost
    settings: Mapping[Candidate, SettingCounts]
    frontier: tuple[Candidate, ...]
    candidate: Candidate
    against: Candidate
    batches: tuple[BatchRow, ...]
    advice: str
    off_above: int | None
    lengths: tuple[tuple[int, int, int], ...]
    inputs: tuple[InputResult, ...]
    conversations: tuple[ConversationResult, ...]
    store: StoreGain | None
    runner: Runner
    others: tuple[TuneReport, ...] = ()

    @property
    def has_too_few_conversations(self) -> bool:
        """Whether there are too few held-out conversations for a recommendation."""
        return len(self.conversations) < MIN_HELD_OUT

    @property
    def vllm_options(self) -> tuple[str, str]:
        """Options of `vllm serve` for the recommended setting."""
        return vllm_options(self.candidate, self.runner.method)

    def format_batch(self, batch: int) -> str:
        """Returns a batch size as text: "any" if the cost is the same for all batch sizes."""
        return "any" if self.cost.same_for_any_batch else str(batch)

    def format_command(self, candidate: Candidate) -> str:
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
            "too_few": self.has_too_few_conversations,
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
            "inputs": [asdict(result) for result in self.inputs],
            "conversations": [asdict(result) for result in self.conversations],
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
    """Chooses a setting on the selection half and evaluates it on the held-out half."""
    held_out = ~measured.selection_half
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
        c: SettingCounts(
            measured.sum_counts(c, measured.selection_half), measured.sum_counts(c, held_out)
        )
        for c in measured.counts
    }
    batch, tokens = cost.batch_sizes[0], measured.tokens
    speedups, baseline_speedups = (
        cost.compute_speedup(batch, tokens, measured.counts[c]) for c in (candidate, against)
    )
    conversations = [
        ConversationResult(
            traffic.inputs[traffic.input_of[n]],
            traffic.names[n],
            int(tokens[n]),
            round(float(speedups[n]), 4),
            round(float(baseline_speedups[n]), 4),
        )
        for n in np.flatnonzero(held_out)
    ]
    inputs = []
    for number, name in enumerate(traffic.inputs):
        of_input = held_out & (traffic.input_of == number)
        if of_input.any():
            speedup, baseline_speedup = (
                measured.compute_speedup(c, cost, batch, of_input) for c in (candidate, against)
            )
            num_faster = int((speedups[of_input] > 1).sum())
            inputs.append(
                InputResult(name, int(of_input.sum()), speedup, baseline_speedup, num_faster)
            )
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
        inputs=tuple(inputs),
        conversations=tuple(
            sorted(conversations, key=lambda result: (result.speedup, result.input, result.name))
        ),
        store=store,
    )


def _make_rows(
    measured: Measured, cost: VerificationCost, candidate: Candidate, against: Candidate
) -> list[BatchRow]:
    rows = []
    for batch in cost.batch_sizes:
        best, _ = ranking.recommend(measured, cost.select_batch_sizes([batch]))
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
                expected=measured.compute_speedup(candidate, cost, batch, measured.selection_half),
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
    traffic = report.traffic
    method = (
        f"{len(report.settings)} settings, chosen on one half of the conversations and evaluated "
        f"on the other {traffic['held_out_conversations']}."
    )
    blocks: list[Block] = [*describe_traffic(traffic, report.cost, method)]
    for part in (report, *report.others):
        blocks += ["", *_describe_advice(part), *_describe_store(part), *_describe_speedups(part)]
    return [*blocks, *_describe_frontier(report), *_describe_inputs(report)]


def describe_traffic(traffic: Mapping[str, Any], cost: VerificationCost, method: str) -> list[str]:
    """Returns lines about the traffic, the cost and the method of a report, with warnings."""
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
        f"Verification cost: {cost.name}",
        f"{method} Tokenizer: {tokenizer}",
    ]
    lines += [f"Note: {note}" for note in traffic["notes"]]
    if tokenizer.startswith("bytes:"):
        lines.append(BYTES_WARNING)
    if cost.is_example:
        lines.append(
            "The verification cost is an EXAMPLE: measure your server's with "
            "`ngram-npu measure-cost`, or pass -c."
        )
    return lines


def _describe_advice(report: TuneReport) -> list[Block]:
    lines: list[Block] = [f"{report.runner.name}: {report.runner.about}"]
    if report.runner.is_synchronous:
        share = report.cost.synchronous
        source = (
            "assumed, not measured"
            if share == SYNCHRONOUS_SHARE
            else "from --synchronous or the measured cost"
        )
        lines.append(
            f"Synchronous scheduling is expected to make each step {share:.0%} longer ({source})."
        )
    best = f"The best setting found: {report.candidate.label}"
    if report.has_too_few_conversations:
        lines.append(
            f"TOO FEW: {len(report.conversations)} held-out conversations; a recommendation needs "
            f"{MIN_HELD_OUT}."
        )
        return [*lines, best]
    if report.off_above == 0:
        return [*lines, f"ADVICE: {report.advice}", best]
    lines += [f"RECOMMENDED: {report.candidate.label}", report.advice]
    lines += ["", Command(report.format_command(report.candidate))]
    if len({length for _, _, length in report.lengths}) > 1:
        entries = [list(entry) for entry in report.lengths]
        lines += [
            "",
            "For draft lengths by batch size, add this to --speculative-config, or use k=auto:",
            "",
            Command(f'"num_speculative_tokens_per_batch_size": {entries}'),
        ]
    # At some batch sizes, only another setting than the recommended one is faster than no drafts.
    used_settings = dict.fromkeys(row.use for row in report.batches)
    for other in used_settings:
        if other in (None, report.candidate):
            continue
        lines.append("")
        for row in report.batches:
            if row.use == other:
                speedup = row.best_speedup if other == row.best else row.against
                lines.append(f"At batch {row.batch} use {other.label}: {speedup}")
        lines += ["", Command(report.format_command(other))]
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
            "No store is recommended: it must be the fastest setting on the selection half, "
            "and its interval must lie above 1 on the held-out half."
        )
        return lines
    lines.append(
        "A store shares text: requests of one scope draft each other's text and can detect it by "
        "timing (docs/guides/store.md)."
    )
    tokens = report.candidate.config.store_tokens
    if tokens != STORE_TOKENS:
        lines.append(
            f"A store of {tokens} tokens needs --max-num-seqs to be at most {tokens // 1024}."
        )
    return lines


def _describe_speedups(report: TuneReport) -> list[Block]:
    header = ["batch", "recommended", "baseline", "ratio"]
    rows = [
        [report.format_batch(r.batch), str(r.speedup), str(r.against), str(r.ratio)]
        for r in report.batches
    ]
    blocks: list[Block] = [
        "",
        "Speed-up on the held-out half, with its 95 % interval over conversations,",
        f"baseline {report.against.label}:",
        "",
        Table([header, *rows]),
    ]
    if any(row.best != report.candidate for row in report.batches):
        rows = [
            [report.format_batch(r.batch), str(r.best_speedup), r.best.label]
            for r in report.batches
        ]
        blocks += [
            "",
            "The best setting for one batch size alone (--batch-size B prints its options):",
            "",
            Table([["batch", "speed-up", "setting"], *rows], left=[2]),
        ]
    return blocks


def _describe_frontier(report: TuneReport) -> list[Block]:
    shown = report.frontier
    if len(shown) > _MAX_SHOWN:  # a selection at equal distances, with the first and the last
        positions = np.linspace(0, len(shown) - 1, _MAX_SHOWN).round().astype(int)
        shown = tuple(shown[position] for position in positions)
    marks = {report.candidate: "best", report.against: "baseline"}
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
    header = ["input", "conversations", "speed-up", "baseline", "faster"]
    rows = [
        [
            shorten_name(result.name),
            str(result.conversations),
            f"{result.speedup:.3f}",
            f"{result.against:.3f}",
            f"{result.gaining / result.conversations:.0%}",
        ]
        for result in sorted(report.inputs, key=lambda result: -result.speedup)
    ]
    conversations = report.conversations
    num_slower = sum(result.speedup < 1 for result in conversations)
    blocks: list[Block] = [
        "",
        f"By input, batch {report.format_batch(report.batches[0].batch)}:",
        "",
        Table([header, *rows], left=[0]),
        "",
        f"{num_slower} of {len(conversations)} conversations become slower.",
    ]
    for name, result in (("Largest", conversations[-1]), ("Smallest", conversations[0])):
        blocks.append(
            f"{name} speed-up: {result.speedup:.2f}, {result.name} of {result.input}, "
            f"{result.tokens} tokens"
        )
    return blocks
