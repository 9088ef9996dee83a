"""Tests AsyncSpecState and HostDrafting on a device: they never wait, and match the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup
from ngram_npu.host_drafting import DeviceDrafts, HostDrafting
from ngram_npu.index import make_index

from gpu.replay import DEVICES, GPU_ONLY, capture_graph, choose_count, forbid_waiting, synchronize

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


def run_steps(device: str, steps: int, has_graph: bool = False) -> list[list[int]]:
    """has_graph: whether a graph of the device launches the corrections of each step."""
    rng = np.random.default_rng(4)
    config = AsyncConfig(
        ngram=NgramConfig(min_n=1, max_n=3, k=K),
        max_rows=ROWS,
        row_capacity=CAPACITY,
        max_step_tokens=ROWS * 64,
        kv_groups=(KVGroup(block_size=BLOCK, max_blocks=CAPACITY // BLOCK),),
    )
    state = AsyncSpecState(config, device)
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


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_step_does_not_wait_for_the_device(device: str, has_graph: bool) -> None:
    steps = choose_count(device, 300, 30)
    answers = run_steps(device, steps, has_graph)
    assert answers == run_steps("cpu", steps)
    assert sum(map(len, answers)) > 1.5 * steps * ROWS


@GPU_ONLY
def test_forbidden_wait_raises() -> None:
    values = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError), forbid_waiting("cuda"):
        values.sum().item()


# The following test runs HostDrafting.

R, S = 32, 2048
CONFIG = NgramConfig(
    k=K, sizes="ladder", min_draft_probability=0.1, store="live", store_tokens=1 << 17
)


def make_drafting(device: str) -> HostDrafting:
    return HostDrafting(
        CONFIG,
        num_rows=R,
        capacity=S,
        max_sampled=K + 1,
        device=torch.device(device),
        lag=1,
        index=make_index(CONFIG, R, R * S, kind="numpy"),
        store=NgramStore(R, 1 << 17, visibility="live", kind="numpy"),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_host_drafting_in_stream_order_matches_synchronous_drafting(device: str) -> None:
    rng = np.random.default_rng(0)
    device_drafting, cpu_drafting = make_drafting(device), make_drafting("cpu")
    lengths = np.zeros(R, np.int64)
    steps: list[tuple[DeviceDrafts, DeviceDrafts]] = []
    for _ in range(choose_count(device, 2000, 50)):
        if device == "cuda" and rng.random() < 0.1:
            torch.cuda._sleep(1 << 20)  # half a millisecond, so that the host runs ahead
        for row in np.flatnonzero((lengths == 0) | (lengths > S - 8)):
            text = rng.integers(0, 30, rng.integers(1, 1500))
            lengths[row] = len(text)
            for drafting in (device_drafting, cpu_drafting):
                drafting.end(row)
                drafting.begin(row, text, scope=int(row) % 2)
        rows = rng.permutation(R)[: rng.integers(1, R + 1)].astype(np.int32)
        sampled = torch.from_numpy(rng.integers(0, 30, (len(rows), K + 2), dtype=np.int32))
        sampled[:, 0] = torch.from_numpy(rng.integers(0, K + 2, len(rows), dtype=np.int32))
        lengths[rows] += sampled[:, 0].numpy()
        on_device = sampled.pin_memory() if device == "cuda" else sampled
        with forbid_waiting(device):
            drafts = device_drafting.propose(rows, on_device.to(device, non_blocking=True))
        steps.append((drafts, cpu_drafting.propose(rows, sampled)))
    synchronize(device)
    assert device_drafting.settle(1)
    for actual, expected in steps:
        assert [tensor.tolist() for tensor in actual] == [tensor.tolist() for tensor in expected]
