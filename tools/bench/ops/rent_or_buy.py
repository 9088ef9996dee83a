"""When indexing a row pays: rules for it, on whole requests, with costs measured in the same run.

A scan is rented step by step; an index is bought once. What a rule takes is computed from the time
of a step with either and of building, by the length of the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu.replay.tokenizers import DEFAULT_TOKENIZER

from tools.bench import stats
from tools.bench.data import default_data
from tools.bench.ops.acceptance import BATCH, proposed
from tools.bench.ops.base import Result, Skipped
from tools.bench.ops.index import NgramIndexStep, build
from tools.bench.options import Options
from tools.drafts import load

PROMPTS = (1024, 8192, 32768)
ANSWERS = (50, 200, 1000, 4000)
TOKENS_PER_STEP = 2.0
"""Of the made-up requests: what the steps that the bench times append on average."""
LONG = 3072
"""Tokens of a row, in a batch of at least 128, beyond which vLLM's host drafter uses an index."""

Floats = npt.NDArray[np.float64]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Costs:
    """Nanoseconds for one row: a step at each of these lengths, and indexing one token."""

    lengths: Sequence[int]
    scan: Sequence[float]
    index: Sequence[float]
    build: float

    def by_rule(self, spans: Spans, tokens_per_step: float) -> dict[str, float]:
        """Microseconds of one row's steps, by rule.

        Args:
            spans: (start, end) of each answer in the row; what is between them is given.
        """
        at = np.concatenate([np.arange(start + 1, end, tokens_per_step) for start, end in spans])
        given = np.diff(at, prepend=0)
        given[given <= tokens_per_step] = 0  # the step with an index enters these
        scan, index = self._at(at, self.scan), self._at(at, self.index)
        buy = self.build * at

        def taken(when: npt.NDArray[np.bool_]) -> float:
            """Scans until `when` holds, then builds the index and keeps it."""
            if not when.any():
                return float(scan.sum()) / 1e3
            first = int(when.argmax())
            later = index[first:].sum() + self.build * given[first + 1 :].sum()
            return float(scan[:first].sum() + buy[first] + later) / 1e3

        rules = {
            "scan": taken(at < 0),
            "index": taken(at > 0),
            "long": taken(at > LONG),
            "rent": taken((scan - index).clip(0).cumsum() >= buy),
        }
        return rules | {"better": min(rules["scan"], rules["index"])}

    def _at(self, at: Floats, known: Sequence[float]) -> Floats:
        """Linear between the lengths measured and beyond them."""
        slope = max(0.0, known[-1] - known[-2]) / (self.lengths[-1] - self.lengths[-2])
        found: Floats = np.interp(at, self.lengths, known)
        return found + slope * (at - self.lengths[-1]).clip(0)


def total(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        found = {rule: found.get(rule, 0.0) + us for rule, us in part.items()}
    return found


class RentOrBuy(NgramIndexStep):
    name = "rent-or-buy"
    help = "when indexing a row pays: rules on whole requests, by measured costs"
    sizes = ("128x1k", "128x2k", "128x4k", "128x8k", "128x16k", "128x32k")
    peers = ("ours:engine=scan",)
    clock = time.thread_time_ns
    assumptions: Mapping[str, Any] = {
        "tokens per step": f"{TOKENS_PER_STEP} if made up, those of a replay if recorded",
        "rules": f"long: indexed beyond {LONG} tokens; rent: when the scans have taken "
        "longer, by as much as building takes, than steps with an index; better: of scan and "
        "index, by request",
        "recorded": "turns: each is a new request; conversations: each keeps its index",
        "building": "of the last size, per token",
    }

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        results, skipped = super().run(options, report)
        last = self.workload(self.sizes_of(options)[-1], options)
        costs = Costs(
            [r["context"] for r in results],
            [1e3 / r["batch"] * r["peers"][self.peers[0]]["median_us"] for r in results],
            [1e3 / r["batch"] * r["ours"]["median_us"] for r in results],
            build(last, options, options.data_kind)["build_ns_per_token"]["median"],
        )
        made_up = {
            f"{prompt // 1024}k + {answer}": costs.by_rule(
                [(prompt, prompt + answer)], TOKENS_PER_STEP
            )
            for prompt in PROMPTS
            for answer in ANSWERS
        }
        found = made_up | {"made-up": total(made_up.values())} | _recorded(options, costs)
        for name, us in found.items():
            rounded = {rule: stats.rounded(value) for rule, value in us.items()}
            result = {"set": name, "us": rounded, "build_ns_per_token": costs.build}
            results.append(result)
            report({"size": name, **rounded})
        return results, skipped


def _recorded(options: Options, costs: Costs) -> dict[str, dict[str, float]]:
    """Totals over the recorded sets, with the tokens per step that a replay finds."""
    config = NgramConfig(min_n=options.min_n, max_n=options.max_n, k=options.k)
    turns, whole = [], []
    for requests in load([default_data(options.data)], DEFAULT_TOKENIZER).sets.values():
        pace = proposed(requests, NgramProposer(config, "index"), config.k, BATCH).tokens_per_step
        for spans in (request.spans() for request in requests):
            turns += [costs.by_rule([span], pace) for span in spans]
            whole += [costs.by_rule(spans, pace)] if spans else []
    return {"recorded turns": total(turns), "recorded conversations": total(whole)}
