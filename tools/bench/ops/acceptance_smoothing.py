"""How strongly the yield of drafting depends on the smoothing of sparse cells of the costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ngram_npu.replay.tokenizers import DEFAULT_TOKENIZER

from tools.bench.data import default_data
from tools.bench.ops.acceptance import LIMITS, PEERS, REFERENCE, Acceptance, K, Part, summary
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options
from tools.drafts import recorded
from tools.drafts.simulator import Counts, IntArray, Walks, walks
from tools.fit_costs import Observed, fit

STRENGTHS = (1, 2, 4, 8, 16, 32, 64)


class AcceptanceSmoothing(Op):
    name = "acceptance-smoothing"
    help = "acceptance, with costs that are smoothed more or less"
    sizes = ()
    engines = ("simulator",)
    unused_settings = Acceptance.unused_settings
    assumptions: Mapping[str, Any] = {
        "strength": "observations by which a cell is drawn towards its neighbours",
        **{name: said for name, said in Acceptance.assumptions.items() if name != "engine"},
    }

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        sets = recorded.load([default_data(options.data)], DEFAULT_TOKENIZER).sets.values()
        halves = {half: [of[recorded.PARTS[half]] for of in sets] for half in ("even", "odd")}
        peers = {half: [PEERS[REFERENCE](of) for of in parts] for half, parts in halves.items()}
        found = {half: [walks(of) for of in parts] for half, parts in halves.items()}
        observed = [Observed.of(of) for of in found["even"]]
        results: list[Result] = []
        for strength in STRENGTHS:
            costs = fit(observed, strength)
            even, odd = (
                [_part(peer, of, costs) for peer, of in zip(peers[half], found[half], strict=True)]
                for half in ("even", "odd")
            )
            whole = [one + other for one, other in zip(even, odd, strict=True)]
            result = {"strength": strength, "whole": summary(whole), "odd": summary(odd)}
            results.append(result)
            report({"size": str(strength), **result["whole"][f"k{K[0]}"]})
        return results, {}


def _part(peer: Counts, found: Walks, costs: IntArray) -> Part:
    ours = {(k, at): found.replay(found.lengths(costs, at, k)) for k in K for at in LIMITS}
    return Part({REFERENCE: peer}, ours)
