"""The result of tuning: its data classes and its JSON. `text` and `html` show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ngram_npu.step_time import VerificationCost

from ngram_npu_cli.replay.walks import Counts as Figures
from ngram_npu_cli.tune.candidates import Candidate, vllm_options
from ngram_npu_cli.tune.runners import Runner
from ngram_npu_cli.tune.search import (
    Interval,
    Measured,
    advice,
    frontier,
    interval,
    ranked,
)
from ngram_npu_cli.tune.traffic import Traffic

FORMAT = "ngram_npu.tune/2"
"""Written into every JSON result; the number grows when a field changes its meaning."""

LEAST_HELD_OUT = 20
"""With fewer, nothing is recommended: resamplings of so few conversations are too alike."""


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
        use: number of the setting to use: the first of the recommended one, the best for this batch
            size alone, and the one compared with, that surely gains. None: none does.
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

    @property
    def elsewhere(self) -> dict[int, list[BatchRow]]:
        """The batch sizes where another setting than the recommended one is to be used, by the
        number of that setting."""
        found: dict[int, list[BatchRow]] = {}
        for row in self.batches:
            if row.use not in (None, self.recommended):
                found.setdefault(row.use, []).append(row)
        return found

    def label(self, number: int) -> str:
        """Of a setting."""
        return self.settings[number].candidate.label

    def batch_name(self, batch: int) -> str:
        """As shown: "any" where the batch size does not matter."""
        return "any" if self.cost.same_for_any_batch else str(batch)

    @property
    def vllm_command(self) -> str:
        """The command line of `vllm serve` for the recommended setting."""
        return self.command_for(self.recommended)

    def command_for(self, number: int) -> str:
        """The command line of `vllm serve` for a setting."""
        words = " ".join([*self.runner.variables, "vllm serve MODEL"])
        options = vllm_options(self.settings[number].candidate, self.runner.method)
        return " \\\n  ".join([words, *options])

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
                "label": self.label(self.against),
                **_pair(self.settings[self.against]),
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
    recommended, store = _recommended(measured, cost)
    settings = tuple(
        Setting(c, measured.figures(i, half), measured.figures(i, ~half))
        for i, c in enumerate(measured.candidates)
    )
    rows = _rows(measured, cost, recommended, compared)
    used = [row.use for row in rows if row.use is not None]
    if used and recommended not in used:
        recommended = used[0]
        rows = _rows(measured, cost, recommended, compared)
    sentence, off_above = advice([(row.batch, row.use is not None) for row in rows], cost)
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


def _rows(
    measured: Measured, cost: VerificationCost, recommended: int, compared: int
) -> list[BatchRow]:
    rows = []
    for batch in cost.batch_sizes:
        alone, _ = _recommended(measured, cost.at([batch]))
        choices = {i: interval(measured, i, cost, batch) for i in (recommended, alone, compared)}
        rows.append(
            BatchRow(
                batch=batch,
                speedup=choices[recommended],
                against=choices[compared],
                ratio=interval(measured, recommended, cost, batch, compared),
                expected=measured.speedup(recommended, cost, batch, measured.chosen_half),
                best=alone,
                best_speedup=choices[alone],
                use=next((i for i, speedup in choices.items() if speedup.low > 1), None),
            )
        )
    return rows


def _recommended(measured: Measured, cost: VerificationCost) -> tuple[int, StoreRow | None]:
    """The best setting, and the gain of a store if one was tried. A store shares text, so one is
    recommended only if it surely gains on the held-out half too."""
    order = ranked(measured, cost)
    stored = [i for i in order if measured.candidates[i].has_store]
    others = [i for i in range(len(order)) if not measured.candidates[i].has_store]
    if not stored or not others:
        return order[0], None
    without = ranked(measured, cost, others)[0]
    ratio = interval(measured, stored[0], cost, cost.batch_sizes[0], without)
    is_sure = order[0] == stored[0] and ratio.low > 1
    return stored[0] if is_sure else without, StoreRow(stored[0], without, ratio)
