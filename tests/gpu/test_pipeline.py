"""AsyncSpecState on a device: steps never synchronise, and give the same tokens as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup

from gpu.replay import DEVICES, GPU_ONLY, no_synchronisation, times

K, ROWS, CAPACITY, BLOCK = 3, 24, 2048, 16
VOCAB = 23


def target(sampler_input: torch.Tensor) -> torch.Tensor:
    """The model's next token: few different ones, so that drafts are accepted."""
    return (5 * sampler_input + 3) % VOCAB


def verify(inputs: Any, k: int) -> torch.Tensor:
    """A rejection sampler on the device, without a host loop: [B, k+1]."""
    ends = inputs.query_start_loc[1 : 1 + len(inputs.num_scheduled_drafts)]
    drafts = inputs.num_scheduled_drafts
    places = torch.arange(k + 1, device=ends.device, dtype=torch.int32)
    at = (ends - 1 - drafts)[:, None] + places[None]
    inside = places[None] <= drafts[:, None]
    at = torch.where(inside, at, 0).long()
    says = target(inputs.input_ids[at])
    following = inputs.input_ids[(at + 1).clamp(max=len(inputs.input_ids) - 1)]
    right = (following == says) & (places[None] < drafts[:, None])
    accepted = right.to(torch.int32).cumprod(1).sum(1, keepdim=True)
    return torch.where(inside & (places[None] <= accepted), says, -1).to(torch.int32)


def run(device: str, steps: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    config = AsyncConfig(
        ngram=NgramConfig(min_n=1, max_n=3, k=K),
        max_rows=ROWS,
        row_capacity=CAPACITY,
        max_step_tokens=ROWS * 64,
        kv_groups=(KVGroup(block_size=BLOCK, max_blocks=CAPACITY // BLOCK),),
    )
    state = AsyncSpecState(config, device)
    rows = np.arange(ROWS, dtype=np.int32)
    blocks = np.arange(ROWS * CAPACITY // BLOCK, dtype=np.int32).reshape(ROWS, -1)
    prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.integers(1, 60, ROWS)]
    counts = np.array([len(p) for p in prompts], np.int32)
    joining = Batch(
        rows=rows,
        num_scheduled_tokens=counts,
        num_scheduled_drafts=np.zeros(ROWS, np.int32),
        new=[Admission(row, prompts[row], (blocks[row],)) for row in range(ROWS)],
    )
    answers: list[list[int]] = [[] for _ in prompts]

    def reconcile() -> None:
        truth = state.reconcile()
        for row, tokens, count in zip(
            truth.rows, truth.sampled_token_ids, truth.num_sampled, strict=True
        ):
            answers[row] += tokens[:count].tolist()

    for number in range(steps):
        order = rng.permutation(rows)
        decoding = Batch(
            rows=order,
            num_scheduled_tokens=np.full(ROWS, K + 1, np.int32),
            num_scheduled_drafts=np.full(ROWS, K, np.int32),
        )
        if number < 2:  # kernels are loaded and buffers allocated in the first steps
            inputs = state.begin_step(decoding if number else joining)
            state.end_step(verify(inputs, K))
        else:
            with no_synchronisation(device):
                inputs = state.begin_step(decoding)
                state.end_step(verify(inputs, K))
        if number:
            reconcile()
    reconcile()
    for prompt, answer in zip(prompts, answers, strict=True):
        last = int(prompt[-1])
        for token in answer:
            last = (5 * last + 3) % VOCAB
            assert token == last
    return answers


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_does_not_synchronise(device: str) -> None:
    steps = times(device, 300, 30)
    answers = run(device, steps)
    assert answers == run("cpu", steps)
    assert sum(map(len, answers)) > 2 * steps * ROWS


@GPU_ONLY
def test_a_synchronising_step_is_caught() -> None:
    values = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError), no_synchronisation("cuda"):
        values.sum().item()
