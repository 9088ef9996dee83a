"""The yield of drafting from a shared store, against suffix decoding's shared tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from ngram_npu import NgramConfig, NgramProposer
from ngram_npu.replay import TokenRequest
from ngram_npu.replay.tokenizers import DEFAULT_TOKENIZER
from ngram_npu.replay.walks import Counts, at_equal_drafts

from tools.bench import arctic_peer
from tools.bench.data import default_data
from tools.bench.ops.acceptance import VERIFYING, Acceptance, proposed
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
                result |= _against(peer, counts)
                counts[PEER] = peer
            result |= {
                who: {
                    "tokens_per_step": round(of.tokens_per_step, 4),
                    "drafted_per_step": round(of.drafted_per_step, 4),
                }
                for who, of in counts.items()
            }
            counted.append(counts)
            results.append(result)
            yield result
        yield {"set": "all", **_summary(counted, results)}


def _against(peer: Counts, counts: Mapping[str, Counts]) -> dict[str, Any]:
    curve = [counts[f"limit_{at}"] for at in LIMITS]
    tokens, _ = at_equal_drafts(curve, peer.drafted_per_step)
    default = counts[f"limit_{DEFAULT_LIMIT}"]
    return {
        "at_equal_drafts": {
            "tokens_per_step": round(tokens, 4),
            "ratio": round(tokens / peer.tokens_per_step, 5),
        },
        "dominates": default.tokens_per_step > peer.tokens_per_step
        and default.drafted_per_step <= peer.drafted_per_step,
    }


def _summary(counted: list[dict[str, Counts]], results: list[Result]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sets": len(counted),
        "speedup": {
            who: round(geometric_mean(of[who].speedup(VERIFYING) for of in counted), 4)
            for who in counted[0]
        },
    }
    if "dominates" in results[0]:
        ratios = [of["at_equal_drafts"]["ratio"] for of in results]
        found |= {
            "sets_at_least_equal": sum(ratio >= 1 for ratio in ratios),
            "least_ratio": min(ratios),
            "mean_ratio": round(geometric_mean(ratios), 4),
            "sets_dominated": sum(of["dominates"] for of in results),
        }
    return found
