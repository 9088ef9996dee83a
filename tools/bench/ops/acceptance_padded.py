"""Measures tokens per step if every drafted token is verified, with the padded drafts that vLLM's
V2 runner gets from NgramSpeculator.propose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ngram_npu.engines.vllm.v2 import add_requests
from ngram_npu_cli.logs.tokenizers import load_tokenizer

from tools.bench.data import find_data
from tools.bench.ops.acceptance import replay_drafts
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options
from tools.bench.vllm_peer import StoreSpeculator
from tools.fit_draft_costs import load_sets

K = (5, 8)
BATCH = 32
BASELINE = "ngram"
STORE = "auto, store"
NGRAMS_1_TO_16 = "1-16"
DEVICE_STORE = "1-16, device store"
LOOKUPS = (BASELINE, NGRAMS_1_TO_16, "ladder", STORE, DEVICE_STORE)
"""Values of the option ``lookup``, optionally followed by ", store" or ", device store"."""
STORE_TOKENS = 2**20
"""Capacity of the device store; that of the host's store is the default."""
SAMPLING_PARAMS = SimpleNamespace(
    stop_token_ids=None, eos_token_id=None, repetition_detection=None, extra_args=None
)
LAG = 1
"""Number of steps until text is in the store: the engine has two batches in flight."""


class V2Proposer:
    """A proposer for `replay_drafts` that calls NgramSpeculator with the V2 runner's arguments."""

    def __init__(self, lookup: str, k: int) -> None:
        self._lookup, self._k = lookup, k
        self._speculator: Any = None
        self._lengths: dict[int, int] = {}

    def reset(self, rows: Any) -> None:
        """Marks the rows as assigned to new requests."""
        for row in rows:
            self._lengths.pop(int(row), None)

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> Any:
        """Appends the sampled tokens and drafts; the simulation always passes advance=True."""
        rows = np.arange(len(token_ids)) if row_indices is None else row_indices
        if self._speculator is None:
            self._speculator = self._make_speculator(token_ids, num_tokens)
        for row in map(int, rows):
            if self._lengths.get(row) == num_tokens[row]:
                continue
            # The row has a new request. The next turn of a conversation is also a new request.
            self._states.remove_request(str(row))
            self._add_request(row, token_ids[row, : num_tokens[row]], token_ids.shape[1])
        num_sampled = append_tokens(token_ids, num_tokens, rows, sampled)
        self._lengths |= dict(zip(map(int, rows), num_tokens[rows].tolist(), strict=True))
        batch = SimpleNamespace(
            req_ids=[str(row) for row in rows],
            idx_mapping=torch.from_numpy(rows.astype(np.int64)),
            idx_mapping_np=rows,
            num_reqs=len(rows),
        )
        # The other positional arguments of vLLM's propose() are not used.
        arguments = (*(None,) * 4, torch.from_numpy(num_sampled), None, None)
        drafts = self._speculator.propose(batch, *arguments)
        return SimpleNamespace(
            draft_token_ids=drafts.numpy(), num_draft_tokens=np.full(len(rows), self._k)
        )

    def _add_request(self, row: int, prompt: Any, max_tokens: int) -> None:
        """Adds a request to the runner's state and to the store. The store shares a request's text
        only if it gets the request's scope, from the scheduler's data."""
        name = str(row)
        request = SimpleNamespace(req_id=name, lora_request=None, sampling_params=SAMPLING_PARAMS)
        add_requests(
            lambda *_: self._states.add_request(name, len(prompt), prompt, 0, max_tokens),
            SimpleNamespace(speculator=self._speculator),
            SimpleNamespace(scheduled_new_reqs=[request]),
        )

    def _make_speculator(self, token_ids: Any, num_tokens: Any) -> StoreSpeculator:
        rows, capacity = token_ids.shape
        self._states = SimpleNamespace(
            max_model_len=capacity,
            all_token_ids=SimpleNamespace(gpu=torch.from_numpy(token_ids)),
            total_len=SimpleNamespace(gpu=torch.from_numpy(num_tokens)),
            req_id_to_index={str(row): row for row in range(rows)},
            add_request=_ignore_request,
            remove_request=lambda req_id: None,
        )
        lookup, _, store = self._lookup.partition(", ")
        section: dict[str, Any] = {"lookup": lookup, **({"store": "live"} if store else {})}
        if store == "device store":
            section |= {"draft_on": "device", "store_tokens": STORE_TOKENS}
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="ngram_gpu",
                num_speculative_tokens=self._k,
                prompt_lookup_min=2,
                prompt_lookup_max=5,
            ),
            additional_config={"ngram_npu": section},
            max_concurrent_batches=LAG + 1,
            model_config=SimpleNamespace(max_model_len=capacity),
            scheduler_config=SimpleNamespace(max_num_seqs=rows),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        )
        return StoreSpeculator(config, torch.device("cpu"), self._states)


def append_tokens(token_ids: Any, num_tokens: Any, rows: Any, sampled: Any) -> Any:
    """Writes the sampled tokens, padded with -1, to the rows. Returns their numbers."""
    num_sampled = (sampled >= 0).sum(axis=1, dtype=np.int32)
    for row, new, number in zip(rows, sampled, num_sampled, strict=True):
        token_ids[row, num_tokens[row] : num_tokens[row] + number] = new[:number]
    num_tokens[rows] += num_sampled
    return num_sampled


def _ignore_request(
    req_id: str, prompt_len: int, all_token_ids: Any, num_computed_tokens: int, max_tokens: int
) -> None:
    """Does nothing, because the simulator writes the rows."""


class AcceptancePadded(Op):
    name = "acceptance-padded"
    help = "tokens per step on recorded sets if every drafted token is verified"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "drafts": "as NgramSpeculator.propose returns them to the V2 runner, padded to k tokens; "
        "all k tokens count as drafted",
        BASELINE: "n-grams of 2 to 5 tokens, the latest match, as in vLLM's V2 speculator with "
        "prompt_lookup_min=2, prompt_lookup_max=5",
        STORE: f"lookup=auto, store=live, one store per set, {BATCH} requests at a time; text "
        f"enters the store {LAG} step late; text that has not entered it when its request ends is "
        "dropped",
        DEVICE_STORE: "lookup=1-16, store=live, draft_on=device, one store per set of "
        f"{STORE_TOKENS} tokens, {BATCH} requests at a time; the newest step's text is held back",
        "target": "recorded completions replace the target model; a conversation is one row",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        results: list[Result] = []
        for name, requests in load_sets([find_data(options.data)], load_tokenizer()).items():
            result: Result = {"set": name}
            for k in K:
                result[f"k{k}"] = figures = {}
                for lookup in LOOKUPS:
                    counts = replay_drafts(requests, V2Proposer(lookup, k), k, BATCH)
                    figures[lookup] = round(counts.tokens_per_step, 4)
            results.append(result)
            yield result
        summary: Result = {"set": "all", "sets": len(results)}
        for key in (f"k{k}" for k in K):
            means = {lookup: geometric_mean(r[key][lookup] for r in results) for lookup in LOOKUPS}
            summary[key] = {lookup: round(mean, 4) for lookup, mean in means.items()}
            ratios = {lookup: round(m / means[BASELINE], 4) for lookup, m in means.items()}
            summary[key]["ratio"] = ratios
            summary[key]["store over 1-16"] = round(means[STORE] / means[NGRAMS_1_TO_16], 4)
            for name, other in (("1-16", NGRAMS_1_TO_16), ("store", STORE)):
                ratio = round(means[DEVICE_STORE] / means[other], 4)
                summary[key][f"device store over {name}"] = ratio
        yield summary
