"""Host time of AsyncSpecState: the pipeline's cost if the device takes no time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup, NewBlocks

from tools.bench import stats
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options, Size

Engine = Literal["scan", "index"]

STEPS = 100
_WARM_UP = 20
_K = 4
_BLOCK = 16
_SAMPLED = 3
"""Tokens that a request gains in a step with drafts: two of its four drafts are accepted."""


class NoOperators:
    """`torch.ops.ngram_npu` without the work: results of the right shape, made beforehand."""

    def __init__(self, requests: int, step_tokens: int) -> None:
        counts = self.num_sampled = torch.zeros(requests, dtype=torch.int32)
        drafts = torch.zeros((requests, _K), dtype=torch.int32)
        starts = torch.zeros(requests + 1, dtype=torch.int32)
        tokens = torch.zeros(step_tokens, dtype=torch.int32)
        self._results: dict[str, Any] = {
            "prepare_next_token_ids": (counts, counts),
            "prepare_inputs_padded": (counts, counts),
            "prepare_inputs": (starts, counts, tokens),
            "ngram_step_": (counts, counts, drafts, torch.full_like(counts, _K), counts),
        }
        self._results["ngram_index_step_"] = self._results["ngram_step_"]

    def __getattr__(self, name: str) -> Any:
        result = self._results.get(name)
        return lambda *arguments, **keywords: result


def batches(requests: int, leaving: int, prompt: int) -> Iterator[Batch]:
    """Steps in which all requests decode with K drafts and get a new block when their tokens reach
    it. Each step replaces `leaving` requests by new ones with a prompt of `prompt` tokens."""
    tokens = np.arange(prompt, dtype=np.int32)
    width = -(-prompt // _BLOCK) + 1
    blocks = (np.arange(width, dtype=np.int32),)
    rows = np.arange(requests, dtype=np.int32)
    length = np.zeros(requests, np.int64)
    fresh = np.ones(requests, np.bool_)
    upper = np.zeros(requests, np.int64)
    covered = np.zeros(requests, np.int64)
    step = 0
    while True:
        out = np.zeros(0, np.int32)
        if step and leaving:
            out = ((np.arange(leaving) + step * leaving) % requests).astype(np.int32)
        joining = rows if not step else out
        fresh[:] = False
        fresh[joining] = True
        covered[joining] = width
        # A step in flight counts with all its drafts, a finished one with its accepted tokens.
        length = np.where(fresh, prompt, length + _SAMPLED)
        upper = np.where(fresh, prompt, length + 2 * (_K + 1))
        growing = rows[upper > covered * _BLOCK]
        covered[growing] += 1
        yield Batch(
            rows=rows,
            num_scheduled_tokens=np.where(fresh, prompt, _K + 1).astype(np.int32),
            num_scheduled_drafts=np.where(fresh, 0, _K).astype(np.int32),
            removed=out,
            new=[Admission(int(row), tokens, blocks) for row in joining],
            new_blocks=(NewBlocks(growing, growing),),
        )
        step += 1


class AsyncHost(Op):
    name = "async_host"
    help = "host time of AsyncSpecState's steps, the operators replaced by nothing"
    sizes = ("256x128",)

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        # The host is its own device here. Copies by several threads would measure their wake-up.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for size in self.sizes_of(options):
                for engine, churn in itertools.product(("scan", "index"), (0.0, 0.1)):
                    yield measure(size, engine, churn, options.rounds)
        finally:
            torch.set_num_threads(threads)


def measure(size: Size, engine: Engine, churn: float, rounds: int) -> Result:
    """One step ahead: each timed step is begin_step and end_step of step n, reconcile of n-1.

    Args:
        size: requests, and the length of their prompts in tokens.
        engine: the drafting engine; its operators are replaced by stubs too.
        churn: share of the requests that are replaced in each step.
        rounds: STEPS steps each; a round's figure is the median over its steps.
    """
    found = np.array([_round(size, engine, churn) for _ in range(rounds)])  # [rounds, parts]
    parts = ("begin_step", "end_step", "reconcile", "together")
    return {
        "size": str(size),
        "batch": size.batch,
        "context": size.context,
        "engine": engine,
        "churn": churn,
        "rounds": rounds,
        "steps_per_round": STEPS,
        "host_us": {
            part: stats.spread(column) for part, column in zip(parts, found.T, strict=True)
        },
    }


def _round(size: Size, engine: Engine, churn: float) -> list[float]:
    """Medians over the steps in microseconds: the three calls and their sum."""
    requests, prompt = size.batch, size.context
    steps = _WARM_UP + STEPS
    capacity = prompt + (steps + 2) * (_K + 1)
    step_tokens = requests * max(prompt, _K + 1)
    state = AsyncSpecState(
        AsyncConfig(
            ngram=NgramConfig(k=_K),
            max_rows=requests,
            row_capacity=capacity,
            engine=engine,
            max_step_tokens=step_tokens,
            kv_groups=(KVGroup(_BLOCK, -(-capacity // _BLOCK) + 1),),
        )
    )
    operators = NoOperators(requests, step_tokens)
    state._truth._ops = state._truth._drafting._ops = operators
    sampled = torch.zeros((requests, _K + 1), dtype=torch.int32)
    source = batches(requests, round(requests * churn), prompt)
    clock = time.perf_counter_ns
    found = []
    for step, batch in zip(range(steps), source, strict=False):
        gained = np.where(batch.num_scheduled_drafts > 0, _SAMPLED, 1).astype(np.int32)
        operators.num_sampled.copy_(torch.from_numpy(gained))
        start = clock()
        state.begin_step(batch)
        begun = clock()
        state.end_step(sampled)
        ended = clock()
        if step:
            state.reconcile()
        reconciled = clock()
        if step >= _WARM_UP:
            found.append((begun - start, ended - begun, reconciled - ended, reconciled - start))
    medians: list[float] = (np.median(np.array(found), axis=0) / 1e3).tolist()
    return medians
