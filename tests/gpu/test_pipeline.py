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
    owners = list(range(ROWS))
    answers: list[list[int]] = [[] for _ in prompts]
    in_flight: list[list[int]] = []

    def reconcile() -> None:
        truth, of_step = state.reconcile(), in_flight.pop(0)
        for owner, tokens, count in zip(
            of_step, truth.sampled_token_ids, truth.num_sampled, strict=True
        ):
            answers[owner] += tokens[:count].tolist()

    def step(batch: Batch) -> None:
        in_flight.append([owners[row] for row in batch.rows])
        state.end_step(verify(state.begin_step(batch), K))

    counts = np.array([len(p) for p in prompts], np.int32)
    new = [Admission(row, prompts[row], (blocks[row],)) for row in range(ROWS)]
    step(Batch(rows, counts, np.zeros(ROWS, np.int32), new=new))
    for number in range(1, steps):
        # Other requests join in the place of two, at times.
        leaving = rng.choice(rows, 2 * (number % 5 == 2), replace=False)
        for row in leaving:
            owners[row] = len(prompts)
            prompts.append(rng.integers(0, VOCAB, rng.integers(1, 60)).astype(np.int32))
            answers.append([])
        order = rng.permutation(rows)
        drafts = np.where(np.isin(order, leaving), 0, K).astype(np.int32)
        counts = np.array([len(prompts[owners[row]]) for row in order], np.int32)
        decoding = Batch(
            rows=order,
            num_scheduled_tokens=np.where(drafts > 0, K + 1, counts),
            num_scheduled_drafts=drafts,
            removed=leaving,
            new=[Admission(row, prompts[owners[row]], (blocks[row],)) for row in leaving],
        )
        if number < 2:  # kernels are loaded and buffers allocated in the first steps
            step(decoding)
        else:
            with no_synchronisation(device):
                step(decoding)
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
    assert sum(map(len, answers)) > 1.5 * steps * ROWS


@GPU_ONLY
def test_a_synchronising_step_is_caught() -> None:
    values = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError), no_synchronisation("cuda"):
        values.sum().item()
