"""Host time of AsyncSpecState: what the pipeline costs where the device costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup, NewBlocks

_K = 4
_BLOCK = 16
_SAMPLED = 3
"""Tokens that a request gains in a step with drafts: two of its four are accepted."""


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

    def __getattr__(self, name: str) -> Any:
        result = self._results.get(name)
        return lambda *arguments: result


def batches(requests: int, leaving: int, prompt: int) -> Iterator[Batch]:
    """Steps in which all requests decode with K drafts, a new block where the tokens reach one,
    and `leaving` of them are replaced by new ones with a prompt of `prompt` tokens, each time."""
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
        # A step in flight counts with all its drafts, the others with what they led to.
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


def measure(
    *, requests: int = 256, churn: float = 0.0, steps: int = 200, prompt: int = 128
) -> dict[str, Any]:
    """Microseconds of host time a step: median and 95th percentile of begin_step, end_step,
    reconcile and their sum, one step ahead (reconcile is of the step before).

    Args:
        churn: share of the requests replaced in each step.
        steps: how many are timed, after 20 that are not.
    """
    leaving = round(requests * churn)
    capacity = prompt + (steps + 22) * (_K + 1)
    step_tokens = requests * max(prompt, _K + 1)
    state = AsyncSpecState(
        AsyncConfig(
            ngram=NgramConfig(k=_K),
            max_rows=requests,
            row_capacity=capacity,
            max_step_tokens=step_tokens,
            kv_groups=(KVGroup(_BLOCK, -(-capacity // _BLOCK) + 1),),
        )
    )
    operators = state._truth._ops = NoOperators(requests, step_tokens)
    sampled = torch.zeros((requests, _K + 1), dtype=torch.int32)
    source = batches(requests, leaving, prompt)
    found = []
    for step in range(steps + 20):
        batch = next(source)
        gained = np.where(batch.num_scheduled_drafts > 0, _SAMPLED, 1).astype(np.int32)
        operators.num_sampled.copy_(torch.from_numpy(gained))
        start = time.perf_counter_ns()
        state.begin_step(batch)
        begun = time.perf_counter_ns()
        state.end_step(sampled)
        ended = time.perf_counter_ns()
        if step:
            state.reconcile()
        reconciled = time.perf_counter_ns()
        if step >= 20:
            found.append((begun - start, ended - begun, reconciled - ended, reconciled - start))
    figures = np.array(found) / 1e3
    names = ("begin_step", "end_step", "reconcile", "together")
    return {
        "requests": requests,
        "churn": churn,
        "steps": steps,
        "us": {
            name: {
                "median": round(float(np.median(column)), 1),
                "p95": round(float(np.percentile(column, 95)), 1),
            }
            for name, column in zip(names, figures.T, strict=True)
        },
    }


def main() -> None:
    for churn in (0.0, 0.1):
        print(measure(churn=churn))


if __name__ == "__main__":
    main()
