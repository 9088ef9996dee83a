"""What rules for choosing between two drafts make of a recording.

    python -m tools.beside.simulate FILE ... [--thresholds 0 0.5 1 2] [--json FILE]

Each completion is walked as a runner would: a step takes one draft, and the next one begins behind
what was accepted and one token more. That matters: where a draft is good, few steps begin. The mean
over all positions, printed beside it, overstates what a rule makes of them.

It holds for the models and the text that were recorded. What toy models make of a threshold says
nothing about others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ops.reference.merging import UNIT, measured, promise

from tools.bench import provenance


@dataclass(frozen=True)
class Drafts:
    """Both drafts at one position."""

    neural: list[int]
    ngram: list[int]
    """None where nothing was found."""
    costs: list[int]
    """Of each n-gram draft token, in sixteenths of a bit."""


@dataclass(frozen=True)
class Completion:
    """Tokens of a completion, and the drafts made behind its first, second, ... token."""

    tokens: list[int]
    drafts: list[Drafts]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Completion:
        found = json.loads(line)
        return cls(found["tokens"], [Drafts(**drafts) for drafts in found["drafts"]])

    def accepted(self, place: int, draft: Sequence[int]) -> int:
        """Of a draft behind the first ``place`` tokens."""
        count = 0
        for drafted, said in zip(draft, self.tokens[place:], strict=False):
            if drafted != said:
                break
            count += 1
        return count


Rule = Callable[[Drafts, int], bool]
"""Whether the n-gram draft is taken, from both drafts and from the mean number of neural draft
tokens that were accepted, in 65536ths."""


def neural_alone(drafts: Drafts, mean: int) -> bool:
    return False


def ngram_alone(drafts: Drafts, mean: int) -> bool:
    return True


def promising(threshold: float) -> Rule:
    """The rule of ``beside``: more is promised than was achieved, and at least the threshold."""

    def rule(drafts: Drafts, mean: int) -> bool:
        promised = promise(drafts.costs)
        return bool(drafts.ngram) and promised >= threshold * UNIT and promised > mean

    return rule


@dataclass
class Walked:
    """What steps came to."""

    steps: int = 0
    accepted: int = 0
    from_ngrams: int = 0
    """Steps that took the n-gram draft."""

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / max(1, self.steps)


def walk(completion: Completion, rule: Rule, everywhere: bool = False) -> Walked:
    """The steps of a runner that drafts by this rule, or as if a step began at every position. The
    first token is the prompt's step's."""
    walked, place, mean = Walked(), 1, len(completion.drafts[0].neural) * UNIT
    while place <= len(completion.drafts) if everywhere else place < len(completion.tokens):
        drafts = completion.drafts[place - 1]
        taken = rule(drafts, min(mean, len(drafts.neural) * UNIT))
        accepted = completion.accepted(place, drafts.ngram if taken else drafts.neural)
        if not taken:
            mean = measured(mean, accepted)
        walked.steps += 1
        walked.accepted += accepted
        walked.from_ngrams += taken
        place += 1 if everywhere else accepted + 1
    return walked


def compare(completions: Sequence[Completion], thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """Of each rule accepted tokens per step, and what the mean over all positions would say."""
    rules = {"neural": neural_alone, "ngrams": ngram_alone}
    rules |= {f"promise_{t:g}": promising(t) for t in thresholds}
    rows = []
    for name, rule in rules.items():
        walks = [walk(completion, rule) for completion in completions]
        steps, accepted = sum(w.steps for w in walks), sum(w.accepted for w in walks)
        means = [walk(completion, rule, everywhere=True) for completion in completions]
        positions = sum(w.steps for w in means)
        rows.append(
            {
                "rule": name,
                "accepted_per_step": round(accepted / max(1, steps), 3),
                "steps": steps,
                "steps_from_ngrams": sum(w.from_ngrams for w in walks),
                "accepted_per_position": round(
                    sum(w.accepted for w in means) / max(1, positions), 3
                ),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.beside.simulate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    results = []
    for recording in given.recordings:
        lines = recording.read_text(encoding="utf-8").splitlines()
        completions = [Completion.from_json(line) for line in lines]
        print(f"{recording.stem}, {len(completions)} completions")
        rows = compare(completions, given.thresholds)
        for row in rows:
            print(
                f"  {row['rule']:<26} {row['accepted_per_step']:.3f} accepted per step, of "
                f"{row['steps']} steps {row['steps_from_ngrams']} from n-grams (mean over "
                f"positions: {row['accepted_per_position']:.3f})"
            )
        rules = {row.pop("rule"): row for row in rows}
        results.append({"recording": recording.stem, "rules": rules})
    if given.json:
        names = " ".join(recording.name for recording in given.recordings)
        thresholds = " ".join(f"{threshold:g}" for threshold in given.thresholds)
        record = {
            "command": f"python -m tools.beside.simulate {names} --thresholds {thresholds}",
            "date": date.today().isoformat(),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "results": results,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
