"""Measures drafting from two scopes of one store in an RL rollout: the scope of all requests, and
the scope of a prompt, in which only the samples of this prompt share text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramConfig, NgramProposer, NgramStore, StepResult, scope_of
from ngram_npu.config import default_match_costs, default_store_costs
from ngram_npu.store import store_arguments
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import TokenRequest, simulate
from ngram_npu_cli.replay.walks import Counts

from tools.bench.data import Workload
from tools.bench.ops.acceptance import VERIFICATION_COST, round_per_step
from tools.bench.ops.base import Maker, Op, Result, SkipReasons
from tools.bench.ops.device_store import RowLookup, make_texts
from tools.bench.ops.lookup import find_converter, find_op
from tools.bench.options import BenchError, Options
from tools.fit_draft_costs import load_sets

K = 8
CONFIG = NgramConfig(sizes="ladder", k=K, min_draft_probability=0.177)
STORE_TOKENS = 2**22
LEVELS: Mapping[str, tuple[str, ...]] = {
    "no store": (),
    "prompt": ("prompt",),
    "shared": ("shared",),
    "both": ("shared", "prompt"),
}
"""By variant: the scopes in which each step calls the store, in this order."""
SAMPLES_PER_PROMPT = 8
"""Number of rows with one prompt when the time of a step is measured."""

IntArray = npt.NDArray[np.int64]


class ScopedProposer:
    """Drafts in several scopes: the store's operator is called once per scope, and each call keeps
    the draft of the calls before unless more accepted tokens are expected of its own draft.

    `simulate` starts the requests in order and announces each one's row by `reset`, so the k-th
    announced row belongs to the k-th request.
    """

    def __init__(self, prompts: Sequence[int], batch_size: int, levels: Sequence[str]) -> None:
        self._proposer = NgramProposer(CONFIG, "index")
        self._levels, self._num_rows = levels, batch_size
        self._prompts = iter(prompts)
        self._prompt_of_row: IntArray = np.zeros(batch_size, np.int64)
        if levels:
            self._store = NgramStore(len(levels) * batch_size, STORE_TOKENS)
            self._arguments = store_arguments(CONFIG, np.empty(0))

    def reset(self, rows: npt.NDArray[np.int32]) -> None:
        for row in rows.tolist():
            self._prompt_of_row[row] = scope_of(f"prompt {next(self._prompts)}")
        self._proposer.reset(rows)

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> StepResult[Any]:
        costs = np.empty((len(sampled), K), np.uint8)
        result = self._proposer.step(
            *(token_ids, num_tokens, sampled),
            row_indices=row_indices,
            advance=advance,
            draft_costs=costs,
        )
        rows = np.arange(self._num_rows, dtype=np.int32) if row_indices is None else row_indices
        for number, level in enumerate(self._levels):
            _C.ngram_store_step_(
                *(token_ids, num_tokens, result.num_sampled, self._store.tensor),
                row_indices=row_indices,
                slot_indices=number * self._num_rows + rows,
                scopes=self._prompt_of_row[rows] if level == "prompt" else None,
                draft_token_ids=result.draft_token_ids,
                num_draft_tokens=result.num_draft_tokens,
                match_len=result.match_len,
                draft_costs=costs,
                **self._arguments,
            )
        return result


class PromptScopes(Op):
    name = "prompt-scopes"
    help = "tokens per step with a scope per prompt, a scope for all requests, and both"
    sizes = ()
    engines = ("index",)
    assumptions: Mapping[str, Any] = {
        "k": K,
        "min_draft_probability": CONFIG.min_draft_probability,
        "data": "ids of conversations are PROMPT/SAMPLE; recorded completions stand for the target "
        "model, whose weights therefore do not change",
        "epochs": "the first sample of every prompt, then the second, one request at a time; "
        "by_sample has the tokens per step of each of these epochs",
        "groups": "all samples of a prompt at a time, in one batch; store='live'",
        "speedup": "as in acceptance",
        "both": "the store's operator is called twice per step: for the shared scope, then for the "
        "scope of the prompt with its own slots",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        if options.data is None:
            raise BenchError("prompt-scopes: expected --data with several samples per prompt")
        for name, requests in load_sets([options.data], load_tokenizer()).items():
            requests = [request for request in requests if request.spans()]
            samples = [_split_id(request) for request in requests]
            orders = {
                "epochs": sorted(range(len(requests)), key=lambda i: samples[i][::-1]),
                "groups": sorted(range(len(requests)), key=lambda i: samples[i]),
            }
            num_samples = 1 + max(sample for _, sample in samples)
            result: Result = {
                "set": name,
                "prompts": len({prompt for prompt, _ in samples}),
                "samples": num_samples,
            }
            for order, indices in orders.items():
                batch_size = num_samples if order == "groups" else 1
                ordered = [requests[i] for i in indices]
                keys = [samples[i] for i in indices]
                result[order] = {
                    variant: replay(ordered, keys, batch_size, levels)
                    for variant, levels in LEVELS.items()
                }
                result[order]["both / better one"] = _compare_with_better_one(result[order])
            yield result


def _compare_with_better_one(figures: Mapping[str, Any]) -> dict[str, float]:
    """Compares drafting in both scopes with the scope that is better alone."""
    ratios = {}
    for name in ("tokens_per_step", "speedup"):
        better = max(figures[variant][name] for variant in ("prompt", "shared"))
        ratios[name] = round(figures["both"][name] / better, 4)
    return ratios


def _split_id(request: TokenRequest) -> tuple[int, int]:
    prompt, _, sample = request.id.rpartition("/")
    try:
        return int(prompt), int(sample)
    except ValueError:
        raise BenchError(
            f"prompt-scopes: expected ids like 17/3, PROMPT/SAMPLE, got {request.id!r}"
        ) from None


def replay(
    requests: Sequence[TokenRequest],
    keys: Sequence[tuple[int, int]],
    batch_size: int,
    levels: Sequence[str],
) -> Result:
    """Replays the requests, whose prompts and samples are `keys`. Returns tokens and drafted tokens
    per step, the computed speed-up, and tokens per step by sample."""
    steps: IntArray = np.zeros(len(requests), np.int64)

    def count_steps(running: IntArray, num_drafted: IntArray) -> None:
        steps[running] += 1

    proposer = ScopedProposer([prompt for prompt, _ in keys], batch_size, levels)
    figures = simulate("", requests, proposer, k=K, batch_size=batch_size, observe=count_steps)
    tokens = np.array([request.num_generated for request in requests])
    samples = np.array([sample for _, sample in keys])
    by_sample = [
        round(tokens[samples == i].sum() / steps[samples == i].sum(), 3)
        for i in range(1 + samples.max())
    ]
    counts = Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
    speedup = round(counts.compute_speedup(VERIFICATION_COST), 4)
    return {**round_per_step(counts), "speedup": speedup, "by_sample": by_sample}


class StoreCalls(RowLookup):
    """The calls of the store in a step, after a lookup that also writes the costs."""

    levels: ClassVar[tuple[str, ...]] = ("shared",)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        batch, convert = workload.size.batch, find_converter(options)
        scopes = np.arange(batch) // SAMPLES_PER_PROMPT + 1
        store = NgramStore(2 * batch, STORE_TOKENS)
        for text in make_texts(workload):
            store.warm(text)
            for scope, row in zip(scopes.tolist(), text, strict=True):
                store.warm([row], scope=scope)
        step, self.detail = find_op("ngram_store_step_", options)
        self._costs: dict[str, Any] = {
            "match_costs": convert(default_match_costs().copy()),
            "draft_costs": convert(np.zeros((batch, options.k), np.uint8)),
        }
        tensor, store_costs = convert(store.tensor), convert(default_store_costs().copy())
        slots = np.arange(batch, dtype=np.int32)
        calls = {
            "shared": {"slot_indices": convert(slots)},
            "prompt": {"slot_indices": convert(slots + batch), "scopes": convert(scopes)},
        }
        arguments = [calls[level] for level in self.levels]

        def run(num_tokens: Any, num_sampled: Any) -> None:
            for call in arguments:
                step(
                    *(self._token_ids, num_tokens, num_sampled, tensor),
                    draft_costs=self._costs["draft_costs"],
                    costs=store_costs,
                    **self._drafts,
                    max_len=self._limits["max_len"],
                    **call,
                )

        self.function = run

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        arguments = super().get_arguments(step)
        self.look_up(*arguments, **self._costs)
        return arguments


class TwoStoreCalls(StoreCalls):
    levels = "shared", "prompt"


class PromptScopesTime(Op):
    name = "prompt-scopes-time"
    help = "the store's part of a step with one call, and with a second call for prompt scopes"
    sizes = ("128x8k",)
    peers = ("two-calls",)
    peer_makers: ClassVar[Mapping[str, Maker]] = {"two-calls": TwoStoreCalls}
    assumptions: Mapping[str, Any] = {
        "store": f"{STORE_TOKENS} tokens; it contains the rows' text before the first step in the "
        f"shared scope and in the scope of each prompt, which {SAMPLES_PER_PROMPT} rows have",
        "time": "without the lookup in the rows",
    }
    make = StoreCalls
