"""How close `ngram-npu tune` comes to an exhaustive grid, and to what a replay then counts.

Neither uses a store: its gain depends on the order of conversations, and a set has only a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from ngram_npu_cli.logs.files import find_files
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER
from ngram_npu_cli.replay import ReplayInput, ReplayOptions, load_inputs, load_tokenizer, replay
from ngram_npu_cli.tune import CANDIDATES, Candidate, share_of_a_step
from ngram_npu_cli.tune.measure import Cache, Counts, measure
from ngram_npu_cli.tune.search import Measured, best, interval
from ngram_npu_cli.tune.traffic import Traffic, read_traffic

from tools.bench.data import default_data
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options

COSTS = (0.02, 0.05, 0.1)
PROBABILITIES = (
    *(0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.21),
    *(0.177, 0.15, 0.125, 0.1, 0.088, 0.075, 0.0625, 0.045, 0.03, 0.015),
)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
GRID = tuple(
    [Candidate.of(sizes="ladder", k=k) for k in LENGTHS]
    + [
        Candidate.of(sizes="ladder", k=k, min_draft_probability=p)
        for p in PROBABILITIES
        for k in LENGTHS
    ]
    + [
        Candidate.of(min_n=low, max_n=high, k=k, match_policy=policy)
        for low in (1, 2, 3, 4)
        for high in (3, 5, 8)
        if low <= high
        for k in (1, 2, 3, 5, 8, 12, 16, 32)
        for policy in ("earliest", "latest")
    ]
)
"""Extends beyond the settings that tune searches, in every direction."""
CACHE = Path("build") / "tune-grid.jsonl"
"""The whole run takes long, and may be interrupted."""


class TuneRecorded(Op):
    name = "tune-recorded"
    help = "what tune recommends for recorded sets, against an exhaustive grid and against replay"
    sizes = ()
    unused_settings = frozenset({"config", "k", "match_policy", "rounds", "device"})
    assumptions: Mapping[str, Any] = {
        "halves": "tune chooses on conversations 0, 2, 4 ... of a set; held out are the others",
        "grid": f"{len(GRID)} settings: ladders of {len(LENGTHS)} lengths at "
        f"{len(PROBABILITIES)} probabilities and without, n-grams of 1 to 8 tokens; its best is "
        "found on the very conversations that it is judged on",
        "tune": f"{len(CANDIDATES)} settings",
        "replayed": "tokens per step that ngram_npu_cli.replay counts on the held-out half",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        CACHE.parent.mkdir(exist_ok=True)
        cache = Cache(CACHE)
        results: list[Result] = []
        for file in find_files(default_data(options.data)):
            (item,) = load_inputs([file])
            results.append(_set(item, read_traffic([file]), options.threads, cache))
            yield results[-1]
        yield _all(results)

    def shown(self, result: Result) -> Result:
        return {"set": result["set"], **result["c05"]["whole"]}


def _set(item: ReplayInput, traffic: Traffic, jobs: int, cache: Cache) -> Result:
    every = tuple(dict.fromkeys([*CANDIDATES, *GRID]))
    counts = tuple(measure(every, traffic.requests, jobs=jobs, cache=cache))
    grid = Measured(every, counts, traffic.tokens, traffic.chosen_half)
    searched = replace(grid, candidates=CANDIDATES, counts=counts[: len(CANDIDATES)])
    result: Result = {"set": item.name, "conversations": len(traffic.names)}
    for share in COSTS:
        cost = share_of_a_step(share)
        number = best(searched, cost)
        entry: dict[str, Any] = {"recommended": CANDIDATES[number].label}
        for part, where in (
            ("whole", np.ones(len(traffic.tokens), np.bool_)),
            ("held_out", ~traffic.chosen_half),
        ):
            speedups = [grid.speedup(i, cost, 1, where) for i in range(len(every))]
            most = int(np.argmax(speedups))
            entry[part] = {
                "speedup": round(speedups[number], 4),
                "grid_best": round(speedups[most], 4),
                "grid_best_setting": every[most].label,
                "share_of_best": round(speedups[number] / speedups[most], 4),
            }
        found = interval(searched, number, cost, 1)
        entry["held_out"]["interval_95"] = [round(found.low, 4), round(found.high, 4)]
        entry["prediction"] = _prediction(item, searched, counts, number)
        result[f"c{100 * share:02.0f}"] = entry
    return result


def _prediction(
    item: ReplayInput, measured: Measured, counts: tuple[Counts, ...], number: int
) -> dict[str, float]:
    """Tokens per step of the recommended setting: as tune predicts and as replay counts."""
    held_out = measured.figures(number, ~measured.chosen_half)
    odd = ReplayInput(item.name, item.conversations[1::2])
    options = dict(measured.candidates[number].options)
    counted = replay(
        inputs=[odd],
        options=ReplayOptions(**options),
        tokenizer=load_tokenizer(DEFAULT_TOKENIZER),
    ).total.tokens_per_step
    assert counted is not None
    chosen = measured.figures(number, measured.chosen_half).tokens_per_step
    return {
        "replayed": round(counted, 4),
        "reported": round(held_out.tokens_per_step, 4),
        "reported_over_replayed": round(held_out.tokens_per_step / counted, 4),
        "chosen_half": round(chosen, 4),
        "chosen_half_over_replayed": round(chosen / counted, 4),
    }


def _all(results: list[Result]) -> Result:
    """Least and mean over the sets."""
    found: Result = {"set": "all", "sets": len(results)}
    for share in COSTS:
        name = f"c{100 * share:02.0f}"
        found[name] = {}
        for part in ("whole", "held_out"):
            shares = [r[name][part]["share_of_best"] for r in results]
            speedups = [r[name][part]["speedup"] for r in results]
            found[name][part] = {
                "least_share_of_best": min(shares),
                "speedup": round(geometric_mean(speedups), 4),
                "grid_best": round(geometric_mean(r[name][part]["grid_best"] for r in results), 4),
            }
        off = [abs(r[name]["prediction"]["reported_over_replayed"] - 1) for r in results]
        halves = [abs(r[name]["prediction"]["chosen_half_over_replayed"] - 1) for r in results]
        found[name]["prediction"] = {
            "most_off": round(max(off), 4),
            "most_off_from_the_other_half": round(max(halves), 4),
        }
    return found
