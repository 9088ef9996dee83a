"""Tokens per step where every drafted token is verified: what the V2 runner's call drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER

from tools.bench.data import default_data
from tools.bench.ops.acceptance import proposed
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options
from tools.bench.vllm_peer import Speculator
from tools.drafts import load

K = (5, 8)
BATCH = 32
BASELINE = "ngram"
STORE = "auto, store"
LOOKUPS = (BASELINE, "1-16", "ladder", STORE)
LAG = 1
"""Steps by which text gets late into the store: the engine has two batches in flight."""


@dataclass
class _Drafts:
    draft_token_ids: np.ndarray[Any, Any]
    num_draft_tokens: np.ndarray[Any, Any]


class V2Runner:
    """Calls the speculator as the V2 runner does, for `replay.simulate`."""

    def __init__(self, lookup: str, k: int) -> None:
        self._lookup, self._k = lookup, k
        self._speculator: Any = None
        self._lengths: dict[int, int] = {}

    def reset(self, rows: Any) -> None:
        """The runner gives the rows to new requests."""
        for row in rows:
            self._lengths.pop(int(row), None)

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> _Drafts:
        rows = np.arange(len(token_ids)) if row_indices is None else row_indices
        if self._speculator is None:
            self._speculator = self._made(token_ids, num_tokens)
        for row in map(int, rows):
            if self._lengths.get(row) == num_tokens[row]:
                continue  # a conversation's next turn is a new request too
            self._states.remove_request(str(row))
            prompt = token_ids[row, : num_tokens[row]]
            self._states.add_request(
                req_id=str(row),
                prompt_len=len(prompt),
                all_token_ids=prompt,
                num_computed_tokens=0,
                max_tokens=token_ids.shape[1],
            )
        num_sampled = (sampled >= 0).sum(axis=1, dtype=np.int32)
        for row, new, count in zip(rows, sampled, num_sampled, strict=True):
            token_ids[row, num_tokens[row] : num_tokens[row] + count] = new[:count]
        num_tokens[rows] += num_sampled
        self._lengths |= dict(zip(map(int, rows), num_tokens[rows].tolist(), strict=True))
        mapping = torch.from_numpy(rows.astype(np.int64))
        drafts = self._speculator.propose(
            SimpleNamespace(
                req_ids=[str(row) for row in rows],
                idx_mapping=mapping,
                idx_mapping_np=rows,
                num_reqs=len(rows),
            ),
            *(None,) * 4,
            torch.from_numpy(num_sampled),
            *(None,) * 2,
        )
        return _Drafts(drafts.numpy(), np.full(len(rows), self._k))

    def _made(self, token_ids: Any, num_tokens: Any) -> Speculator:
        rows, capacity = token_ids.shape
        self._states = SimpleNamespace(
            max_model_len=capacity,
            all_token_ids=SimpleNamespace(gpu=torch.from_numpy(token_ids)),
            total_len=SimpleNamespace(gpu=torch.from_numpy(num_tokens)),
            req_id_to_index={str(row): row for row in range(rows)},
            add_request=_added,
            remove_request=lambda req_id: None,
        )
        lookup, _, store = self._lookup.partition(", ")
        given = {"lookup": lookup, **({"store": "live"} if store else {})}
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="ngram_gpu",
                num_speculative_tokens=self._k,
                prompt_lookup_min=2,
                prompt_lookup_max=5,
            ),
            additional_config={"ngram_npu": given},
            max_concurrent_batches=LAG + 1,
            model_config=SimpleNamespace(max_model_len=capacity),
            scheduler_config=SimpleNamespace(max_num_seqs=rows),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        )
        return Speculator(config, torch.device("cpu"), self._states)


def _added(
    req_id: str, prompt_len: int, all_token_ids: Any, num_computed_tokens: int, max_tokens: int
) -> None:
    """The rows are the simulator's."""


class AcceptancePadded(Op):
    name = "acceptance-padded"
    help = "tokens per step on recorded sets where every drafted token is verified"
    sizes = ()
    unused_settings = frozenset(
        {"config", "k", "match_policy", "threads", "rounds", "device", "engine", "peers"}
    )
    assumptions: Mapping[str, Any] = {
        "drafts": "those of the V2 runner's call (NgramSpeculator.propose), filled up to k tokens, "
        "all of which count as drafted",
        BASELINE: "n-grams of 2 to 5 tokens, the latest: vLLM's V2 speculator with these bounds",
        STORE: f"lookup=auto, store=live, one store for a set, {BATCH} requests at a time; text "
        f"gets into it {LAG} step late, and what is late when its request ends never does",
        "target": "recorded completions stand for the target model; a conversation is one row",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        results: list[Result] = []
        for name, requests in load([default_data(options.data)], DEFAULT_TOKENIZER).sets.items():
            found: Result = {
                f"k{k}": {
                    lookup: round(
                        proposed(requests, V2Runner(lookup, k), k, BATCH).tokens_per_step, 4
                    )
                    for lookup in LOOKUPS
                }
                for k in K
            }
            results.append({"set": name, **found})
            yield results[-1]
        whole: Result = {"set": "all", "sets": len(results)}
        for k in (f"k{k}" for k in K):
            means = {lookup: geometric_mean(r[k][lookup] for r in results) for lookup in LOOKUPS}
            whole[k] = {lookup: round(mean, 4) for lookup, mean in means.items()}
            whole[k]["ratio"] = {name: round(m / means[BASELINE], 4) for name, m in means.items()}
            whole[k]["store over 1-16"] = round(means[STORE] / means["1-16"], 4)
        yield whole
