"""The yield of drafting from a shared store, against suffix decoding's shared tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER
from ngram_npu_cli.replay import TokenRequest
from ngram_npu_cli.replay.walks import Counts

from tools.bench import arctic_peer
from tools.bench.data import default_data
from tools.bench.ops.acceptance import VERIFYING, Acceptance, against, over_sets, per_step, proposed
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options
from tools.drafts import load

K = 8
LIMITS = (34, 38, 40, 42, 44, 46, 50, 54, 60)
DEFAULT_LIMIT = 40
PEER = "arctic-global"


def ours(requests: list[TokenRequest], store: str | None, limit: int) -> Counts:
    config = NgramConfig(sizes="ladder", k=K, min_draft_probability=2 ** (-limit / 16), store=store)
    return proposed(requests, NgramProposer(config, "index"), K, batch_size=1)


class AcceptanceStore(Op):
    name = "acceptance-store"
    help = "acceptance, with a store that conversations share, in the order of the file"
    sizes = ()
    peers = (PEER,)
    engines = ("index",)
    unused_settings = Acceptance.unused_settings
    assumptions: Mapping[str, Any] = {
        "engine": "index: drafted by NgramProposer, one conversation after the other, a store for "
        "each set, empty at first",
        "k": K,
        "limits": LIMITS,
        "at_equal_drafts": f"tokens per step where ours drafts as many tokens a step as {PEER}, in "
        "a straight line between two limits",
        "dominates": f"more tokens per step and no more drafted tokens per step than {PEER}, at "
        f"{DEFAULT_LIMIT}",
        "speedup": Acceptance.assumptions["speedup"],
        PEER: arctic_peer.GLOBAL_DETAIL,
        "target": Acceptance.assumptions["target"],
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        with self.left_out(PEER, skipped):
            arctic_peer.suffix_tree()
        data = load([default_data(options.data)], DEFAULT_TOKENIZER)
        counted: list[dict[str, Counts]] = []
        results: list[Result] = []
        for name, requests in data.sets.items():
            counts = {f"limit_{at}": ours(requests, "live", at) for at in LIMITS}
            counts |= {
                "finish": ours(requests, "finish", DEFAULT_LIMIT),
                "no store": ours(requests, None, DEFAULT_LIMIT),
            }
            result: Result = {"set": name}
            if PEER not in skipped:
                peer = proposed(requests, arctic_peer.SuffixDecoding(K, shared=True), K, 1)
                curve = [counts[f"limit_{at}"] for at in LIMITS]
                result |= against(peer, curve, counts[f"limit_{DEFAULT_LIMIT}"])
                counts[PEER] = peer
            result |= {who: per_step(of) for who, of in counts.items()}
            counted.append(counts)
            results.append(result)
            yield result
        yield {"set": "all", **_summary(counted, results)}


def _summary(counted: list[dict[str, Counts]], results: list[Result]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sets": len(counted),
        "speedup": {
            who: round(geometric_mean(of[who].speedup(VERIFYING) for of in counted), 4)
            for who in counted[0]
        },
    }
    if "dominates" in results[0]:
        found |= over_sets(results)
    return found
