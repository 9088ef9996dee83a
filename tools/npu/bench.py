"""A step of the lookup on the device, ours and vLLM-Ascend's, in turns in one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from ngram_npu.config import UNLIMITED
from ngram_npu.ops import ngram_step_

from tools.bench import stats
from tools.bench.data import VOCAB_SIZE, Workload, make_workload
from tools.bench.options import Options, Size

Results = tuple[torch.Tensor, ...]
"""next_token_ids, draft_token_ids, num_draft_tokens, num_sampled."""
Step = Callable[[int], Results]

STEPS_A_TURN = 10
PEER = "vllm-ascend-triton"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every size: both contestants' figures, their ratio, and whether they draft the same."""
    peer, absence = find_peer()
    options = Options(
        min_n=arguments.min_n, max_n=arguments.max_n, k=arguments.k, data_kind=arguments.data_kind
    )
    if arguments.device == "npu":
        import torch_npu  # noqa: F401

    results = []
    for text in arguments.sizes:
        workload = make_workload(Size.parse(text), options)
        found = measure(workload, options, arguments.device, arguments.rounds, peer)
        results.append(found)
        print(line(found), flush=True)
    return {
        "ok": all(r["same_drafts"] is not False for r in results),
        "settings": {
            "config": [options.min_n, options.max_n],
            "k": options.k,
            "data_kind": options.data_kind,
            "rounds": arguments.rounds,
            "steps_a_turn": STEPS_A_TURN,
        },
        "skipped": {PEER: absence} if peer is None else {},
        "results": results,
    }


def find_peer() -> tuple[Callable[..., Results] | None, str]:
    """vLLM-Ascend's launcher of its Triton kernel, or why it is not here."""
    try:
        from vllm_ascend.ops.triton.spec_decode.ngram import triton_ngram_spec_decode
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return triton_ngram_spec_decode, ""


def measure(
    workload: Workload,
    options: Options,
    device: str,
    rounds: int,
    peer: Callable[..., Results] | None,
) -> dict[str, Any]:
    rows = torch.from_numpy(workload.token_ids).to(device)
    lengths = [torch.from_numpy(step.copy()).to(device) for step in workload.lengths[:-1]]
    sampled = [torch.from_numpy(step.copy()).to(device) for step in workload.sampled]
    discard = torch.zeros(workload.size.batch, dtype=torch.bool).to(device)
    lookup = {"min_n": options.min_n, "max_n": options.max_n, "k": options.k}

    def ours(step: int) -> Results:
        made = ngram_step_(
            rows,
            lengths[step],
            sampled[step],
            discard,
            advance=False,
            vocab_size=UNLIMITED,  # the data's last ids may lie above any vocabulary
            **lookup,
        )
        return made.next_token_ids, made.draft_token_ids, made.num_draft_tokens, made.num_sampled

    contestants: dict[str, Step] = {"ours": ours}
    if peer is not None:
        largest = max(VOCAB_SIZE, int(workload.token_ids.max()) + 1)
        contestants[PEER] = lambda step: peer(
            rows, lengths[step], sampled[step], discard, vocab_size=largest, **lookup
        )

    same = None
    if peer is not None:
        same = all(
            _as_lists(contestants["ours"](step)) == _as_lists(contestants[PEER](step))
            for step in range(workload.steps)
        )
    took: dict[str, dict[str, list[float]]] = {
        name: {"device": [], "host": []} for name in contestants
    }
    for turn in range(rounds):
        first = turn * STEPS_A_TURN
        steps = [(first + i) % workload.steps for i in range(STEPS_A_TURN)]
        for name, step in contestants.items():
            step(steps[0])  # not timed
            for kind, value in timed(step, steps, device).items():
                took[name][kind].append(value)
    figures = {
        name: {kind: stats.spread(values) for kind, values in kinds.items()}
        for name, kinds in took.items()
    }
    ratio = stats.ratios(took[PEER]["device"], took["ours"]["device"]) if peer else None
    return {
        "size": str(workload.size),
        "data": workload.describes,
        "same_drafts": same,
        "us": figures,
        "ratio": None if ratio is None else {PEER: ratio},
    }


def timed(step: Step, steps: list[int], device: str) -> dict[str, float]:
    """Microseconds a step: on the device, from the first launch's beginning to the last one's end,
    and on the host until the calls have returned."""
    if device == "cpu":
        began = time.perf_counter()
        for i in steps:
            step(i)
        took = (time.perf_counter() - began) * 1e6 / len(steps)
        return {"device": took, "host": took}
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    torch.npu.synchronize()
    began = time.perf_counter()
    start.record()
    for i in steps:
        step(i)
    end.record()
    host = (time.perf_counter() - began) * 1e6 / len(steps)
    end.synchronize()
    return {"device": start.elapsed_time(end) * 1e3 / len(steps), "host": host}


def line(found: dict[str, Any]) -> str:
    """For people."""
    parts = [
        f"{name} {kinds['device']['median']:.1f} us (host {kinds['host']['median']:.1f})"
        for name, kinds in found["us"].items()
    ]
    if found["ratio"] is not None:
        parts.append(f"{found['ratio'][PEER]['median']:.2f}x")
    if found["same_drafts"] is False:
        parts.append("DIFFERENT RESULTS")
    return f"{found['size']:>8}  " + ", ".join(parts)


def _as_lists(results: Results) -> list[Any]:
    return [r.cpu().tolist() for r in results]
