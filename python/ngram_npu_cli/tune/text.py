"""The result of tuning as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ngram_npu.config import STORE_TOKENS
from ngram_npu.errors import printable

from ngram_npu_cli.replay.replay_report import BYTES_WARNING, short_name
from ngram_npu_cli.tune.runners import SYNCHRONOUS
from ngram_npu_cli.tune.tune_report import LEAST_HELD_OUT, TuneReport

_MOST_SHOWN = 12


def format_report(report: TuneReport) -> str:
    """The report as text for a terminal, without a final newline."""
    lines = describe(report)
    for part in (report, *report.others):
        about_store = store_lines(part)
        lines += ["", *advice_lines(part), *(["", *about_store] if about_store else []), ""]
        lines.append("Speed-up on the held-out half, with its 95 % interval over conversations,")
        lines += [f"compared with {part.label(part.against)}:", ""]
        rows = [
            [part.batch_name(r.batch), str(r.speedup), str(r.against), str(r.ratio)]
            for r in part.batches
        ]
        lines += _aligned([["batch", "recommended", "compared with", "ratio"], *rows])
        if any(row.best != part.recommended for row in part.batches):
            lines += [
                "",
                "The best setting for one batch size alone (--batch-size B has its options):",
                "",
            ]
            rows = [
                [part.batch_name(r.batch), str(r.best_speedup), part.label(r.best)]
                for r in part.batches
            ]
            lines += _aligned([["batch", "speed-up", "setting"], *rows], left_last=True)
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
    lines += [f"RECOMMENDED: {best_found}", report.advice, "", report.vllm_command]
    for number, rows in report.elsewhere.items():
        lines.append("")
        for row in rows:
            speedup = row.best_speedup if number == row.best else row.against
            lines.append(f"At batch {row.batch} use {report.label(number)}: {speedup}")
        lines += ["", report.command_for(number)]
    return lines


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
                report.label(i),
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
        f"Store: {report.label(row.best)} is {row.ratio} times as "
        f"fast as {report.label(row.without)} on the held-out half."
    ]
    if not report.candidate.has_store:
        lines.append(
            "No store is recommended: it must be faster on the half for choosing, and surely so on "
            "the other."
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
