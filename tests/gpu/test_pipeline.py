"""Tests AsyncSpecState on a device: it never waits, and matches the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup

from gpu.replay import DEVICES, GPU_ONLY, capture_graph, choose_count, forbid_waiting

K, ROWS, CAPACITY, BLOCK = 3, 24, 2048, 16
VOCAB = 23


def predict(token_ids: torch.Tensor) -> torch.Tensor:
    """Simulates a model. Its tokens have a short period, so that drafts are accepted."""
    return (5 * token_ids + 3) % VOCAB


def verify(inputs: Any, k: int) -> torch.Tensor:
    """Returns the sampled tokens [B, k+1]: the num_accepted drafts and one more token, then -1."""
    ends = inputs.query_start_loc[1 : 1 + len(inputs.num_scheduled_drafts)]
    drafts = inputs.num_scheduled_drafts
    offsets = torch.arange(k + 1, device=ends.device, dtype=torch.int32)
    positions = (ends - 1 - drafts)[:, None] + offsets[None]
    is_scheduled = offsets[None] <= drafts[:, None]
    positions = torch.where(is_scheduled, positions, 0).long()
    predicted = predict(inputs.input_ids[positions])
    following = inputs.input_ids[(positions + 1).clamp(max=len(inputs.input_ids) - 1)]
    is_correct = (following == predicted) & (offsets[None] < drafts[:, None])
    num_accepted = is_correct.to(torch.int32).cumprod(1).sum(1, keepdim=True)
    return torch.where(is_scheduled & (offsets[None] <= num_accepted), predicted, -1).to(
        torch.int32
    )


def run_steps(
    device: str, steps: int, has_graph: bool = False, has_store: bool = False
) -> list[list[int]]:
    """has_graph: whether a graph of the device launches the corrections of each step."""
    rng = np.random.default_rng(4)
    config = AsyncConfig(
        ngram=NgramConfig(min_n=1, max_n=3, k=K),
        max_rows=ROWS,
        row_capacity=CAPACITY,
        max_step_tokens=ROWS * 64,
        kv_groups=(KVGroup(block_size=BLOCK, max_blocks=CAPACITY // BLOCK),),
    )
    store = NgramStore(1 << 16, device=device) if has_store else None
    state = AsyncSpecState(config, device, store=store)
    launch_corrections = partial(state.correct_inputs, ROWS)
    if has_graph and device != "cpu":
        launch_corrections = capture_graph(launch_corrections)[0].replay
    rows = np.arange(ROWS, dtype=np.int32)
    blocks = np.arange(ROWS * CAPACITY // BLOCK, dtype=np.int32).reshape(ROWS, -1)
    prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.integers(1, 60, ROWS)]
    owners = list(range(ROWS))  # for each row, the index of its request in `prompts`
    answers: list[list[int]] = [[] for _ in prompts]
    pending_owners: list[list[int]] = []

    def reconcile() -> None:
        result, step_owners = state.reconcile(), pending_owners.pop(0)
        tokens = zip(step_owners, result.sampled_token_ids, result.num_sampled, strict=True)
        for owner, sampled, count in tokens:
            answers[owner] += sampled[:count].tolist()

    def run_step(batch: Batch) -> None:
        pending_owners.append([owners[row] for row in batch.rows])
        inputs = state.begin_step(batch, correct=not has_graph)
        if has_graph:
            launch_corrections()
        state.end_step(verify(inputs, K))

    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    admissions = [Admission(row, prompts[row], (blocks[row],)) for row in range(ROWS)]
    run_step(Batch(rows, counts, np.zeros(ROWS, np.int32), new=admissions))
    for number in range(1, steps):
        # In every fifth step, two requests are replaced.
        replaced_rows = rng.choice(rows, 2 * (number % 5 == 2), replace=False)
        for row in replaced_rows:
            owners[row] = len(prompts)
            prompts.append(rng.integers(0, VOCAB, rng.integers(1, 60)).astype(np.int32))
            answers.append([])
        order = rng.permutation(rows)
        drafts = np.where(np.isin(order, replaced_rows), 0, K).astype(np.int32)
        counts = np.array([len(prompts[owners[row]]) for row in order], np.int32)
        batch = Batch(
            rows=order,
            num_scheduled_tokens=np.where(drafts > 0, K + 1, counts),
            num_scheduled_drafts=drafts,
            removed=replaced_rows,
            new=[Admission(row, prompts[owners[row]], (blocks[row],)) for row in replaced_rows],
        )
        if number < 2:  # the first steps load kernels and allocate buffers
            run_step(batch)
        else:
            with forbid_waiting(device):
                run_step(batch)
        reconcile()
    reconcile()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = int(prompt[-1])
        for token in answer:
            expected = (5 * expected + 3) % VOCAB
            assert token == expected
    return answers


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_step_does_not_wait_for_the_device(device: str, has_graph: bool, has_store: bool) -> None:
    steps = choose_count(device, 300, 30)
    answers = run_steps(device, steps, has_graph, has_store)
    assert answers == run_steps("cpu", steps, has_store=has_store)
    assert sum(map(len, answers)) > 1.5 * steps * ROWS


@GPU_ONLY
def test_forbidden_wait_raises() -> None:
    values = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError), forbid_waiting("cuda"):
        values.sum().item()
