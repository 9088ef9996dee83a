"""Replay's prediction for the texts that vLLM's engine generates, against the measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.replay import TokenRequest, TokenTurn, simulate

from tools.bench import stats
from tools.bench.ops.base import Result, Skipped
from tools.bench.ops.vllm_end_to_end import VllmEndToEnd, prompts_of
from tools.bench.options import Options

MEASURED = Path(__file__).parents[1] / "results" / "vllm-end-to-end.json"


class VllmPredicted(VllmEndToEnd):
    name = "vllm-predicted"
    help = "replay of the texts of vllm-end-to-end, against what was measured there"
    peers = ()
    assumptions: Mapping[str, Any] = {
        "texts": "those of the engine without speculation, written anew; they are not timed",
        "measured": "vllm-end-to-end.json: tokens per second and counts of drafts, ours and no "
        "speculation, both synchronous",
        "share": "what a drafted token costs of a step without drafts, such that the speed-up is "
        "tokens per step / (1 + share * drafted tokens per step)",
        "predicted_speedup": "at 8k with the share of the same batch size at 1k",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        sizes = self.sizes_of(options)
        found = json.loads(MEASURED.read_text(encoding="utf-8"))["results"]
        measured = {result["size"]: result for result in found}
        config = NgramConfig(min_n=options.min_n, max_n=options.max_n, k=options.k)
        model, corpus = self.prepared()
        shares: dict[int, float] = {}
        with self.started("no-speculation", model, sizes, options) as engine:
            for size in sizes:
                prompts = prompts_of(size, corpus)
                texts = engine.run(prompts)["token_ids"]
                yield _compared(prompts, texts, config, measured[str(size)], shares)


def _compared(
    prompts: list[list[int]],
    texts: list[list[int]],
    config: NgramConfig,
    measured: Result,
    shares: dict[int, float],
) -> Result:
    requests = [
        TokenRequest(str(n), (TokenTurn(np.array(p, np.int32), np.array(t, np.int32)),))
        for n, (p, t) in enumerate(zip(prompts, texts, strict=True))
    ]
    figures = simulate("", requests, NgramProposer(config, "scan"), k=config.k, batch_size=16)
    assert figures.tokens_per_step is not None
    assert figures.draft_tokens_per_step is not None
    speedup = measured["ratio"]["ours over no-speculation"]["median"]
    share = (figures.tokens_per_step / speedup - 1) / figures.draft_tokens_per_step
    result: Result = {
        "size": measured["size"],
        "batch": measured["batch"],
        "tokens_per_step": stats.rounded(figures.tokens_per_step),
        "drafted_per_step": stats.rounded(figures.draft_tokens_per_step),
        "predicted": {
            "tokens_per_draft": stats.rounded(figures.num_draft_tokens / figures.num_drafts),
            "accepted_per_draft": stats.rounded(figures.num_accepted_tokens / figures.num_drafts),
        },
        "measured": {**measured["drafts"]["ours"], "speedup": speedup},
        "speedup_over_tokens_per_step": stats.rounded(speedup / figures.tokens_per_step),
        "share": stats.rounded(share),
    }
    known = shares.setdefault(measured["batch"], share)
    if known is not share:
        predicted = figures.tokens_per_step / (1 + known * figures.draft_tokens_per_step)
        result["predicted"]["speedup"] = stats.rounded(predicted)
        result["predicted_over_measured"] = stats.rounded(predicted / speedup)
    return result
