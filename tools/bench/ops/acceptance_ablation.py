"""The worth of each part of the ladder's drafts: removed one at a time, with costs fitted again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

import numpy as np
from ngram_npu.replay import TokenRequest
from ngram_npu.replay.tokenizers import DEFAULT_TOKENIZER

from tools.bench import arctic_peer
from tools.bench.data import default_data
from tools.bench.ops.acceptance import LIMITS, PEERS, REFERENCE, VERIFYING, at_equal_drafts
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options
from tools.drafts import recorded
from tools.drafts.simulator import LADDER, MAX_K, MAX_MATCH, Counts, IntArray, Walks, walks
from tools.fit_costs import Observed, fit

K = 8
EVEN, ODD = recorded.PARTS["even"], recorded.PARTS["odd"]


@dataclass(frozen=True)
class Variant:
    """
    Attributes:
        sizes, cap: of the grams looked up, and the length up to which a match is counted.
        with_byte: whether a cost depends on the byte.
        by_cost: whether its costs end a draft; else all drafts have the same length.
        overlap: whether a draft continues at its own start when it reaches the row's end.
    """

    sizes: tuple[int, ...] = LADDER
    cap: int = MAX_MATCH
    with_byte: bool = True
    by_cost: bool = True
    overlap: bool = True

    def walks(self, requests: Sequence[TokenRequest]) -> Walks:
        found = walks(requests, self.sizes, self.cap)
        return found if self.with_byte else replace(found, outcome=found.outcome * 0)

    def curve(self, found: Walks, costs: IntArray) -> list[Counts]:
        """In ascending order of drafted tokens."""
        if self.by_cost:
            lengths = [found.lengths(costs, limit, K) for limit in LIMITS]
        else:
            lengths = [found.found * np.int64(k) for k in range(MAX_K + 1)]
        if not self.overlap:
            lengths = [np.minimum(of, found.room) for of in lengths]
        return [found.replay(of) for of in lengths]


VARIANTS: Mapping[str, Variant] = {
    "all of it": Variant(),
    "every draft as long": Variant(by_cost=False),
    "no size 1": Variant(sizes=(2, 4, 8, 16)),
    "no byte": Variant(with_byte=False),
    "sizes 1 to 5": Variant(sizes=(1, 2, 3, 4, 5), cap=5),
    "no overlap": Variant(overlap=False),
    "n-gram of 2 to 5": Variant(
        sizes=(2, 3, 4, 5), cap=5, with_byte=False, by_cost=False, overlap=False
    ),
}


class AcceptanceAblation(Op):
    name = "acceptance-ablation"
    help = "what each part of the ladder's drafts is worth, on the odd halves of recorded sets"
    sizes = ()
    engines = ("simulator",)
    unused_settings = frozenset({"config", "k", "match_policy", "threads", "rounds", "device"})
    assumptions: Mapping[str, Any] = {
        "k": K,
        "limits": f"{LIMITS[0]}, {LIMITS[1]}, ... {LIMITS[-1]}; where every draft is as long: "
        f"0 to {MAX_K} tokens instead",
        "costs": "of each variant its own, fitted on the even halves; figures are of the odd ones",
        "ratio": f"tokens per step to those of all of it, at as many drafted tokens a step as "
        f"{REFERENCE}, geometric mean over the sets; sets that a variant never drafts so much on "
        "are left out and counted",
        "speedup": f"tokens per step / (1 + {VERIFYING:g} * drafted tokens per step), geometric "
        "mean over the sets, at the variant's best limit or length",
        REFERENCE: arctic_peer.DETAIL,
    }

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        sets = recorded.load([default_data(options.data)], DEFAULT_TOKENIZER).sets
        drafted = {n: PEERS[REFERENCE](of[ODD]).drafted_per_step for n, of in sets.items()}
        results: list[Result] = []
        whole: dict[str, float] = {}
        for name, variant in VARIANTS.items():
            costs = fit([Observed.of(variant.walks(of[EVEN])) for of in sets.values()])
            curves = {n: variant.curve(variant.walks(of[ODD]), costs) for n, of in sets.items()}
            equal = _equal(curves, drafted)
            whole = whole or equal
            best = max(
                geometric_mean(points[i].speedup(VERIFYING) for points in curves.values())
                for i in range(len(next(iter(curves.values()))))
            )
            result = {
                "variant": name,
                "ratio": round(geometric_mean(equal[n] / whole[n] for n in equal), 4),
                "sets_left_out": len(sets) - len(equal),
                "speedup": round(best, 4),
            }
            results.append(result)
            report({"size": name} | result)
        return results, {}


def _equal(curves: Mapping[str, list[Counts]], drafted: Mapping[str, float]) -> dict[str, float]:
    """Tokens per step at this number of drafted tokens, for the sets whose curve reaches it."""
    found: dict[str, float] = {}
    for name, points in curves.items():
        if points[-1].drafted_per_step > drafted[name]:
            found[name], _ = at_equal_drafts(points, drafted[name])
    return found
