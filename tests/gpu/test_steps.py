"""Tests steps with growing rows on a device: compares replayed steps, steps on several streams, and
compiled steps with the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ngram_npu.ops import workspace_size

from gpu.replay import DEVICES, Replay, choose_count, synchronize

CAPACITY, WIDTH = 1 << 13, 3
GARBAGE = 0x7E7E7E7E
"""Contents of a workspace, such as a failed call may have left."""
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


class Rows:
    """Rows that gain up to WIDTH tokens per step. :meth:`sample` writes the next step's tokens to a
    tensor with a fixed address."""

    def __init__(self, device: str, batch: int, seed: int, match_policy: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._match_policy = match_policy
        start = self._rng.integers(0, 3000, batch, dtype=np.int32)
        tokens = self._rng.integers(0, 40, (batch, CAPACITY), dtype=np.int32)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.lengths = torch.from_numpy(start).to(device)
        self.sampled = torch.zeros((batch, WIDTH), dtype=torch.int32, device=device)
        self.discard = torch.zeros(batch, dtype=torch.bool, device=device)
        size = workspace_size("ngram_step_", batch)
        self.workspace = torch.full((size,), GARBAGE, dtype=torch.int32, device=device)
        self._start = self.tokens.clone(), self.lengths.clone()

    def reset(self) -> None:
        self.tokens.copy_(self._start[0])
        self.lengths.copy_(self._start[1])

    def sample(self) -> None:
        shape = self.sampled.shape
        tokens = self._rng.integers(0, 40, shape, dtype=np.int32)
        tokens[np.arange(shape[1]) >= self._rng.integers(0, shape[1] + 1, (shape[0], 1))] = -1
        self.sampled.copy_(torch.from_numpy(tokens))
        self.discard.copy_(torch.from_numpy(self._rng.random(shape[0]) < 0.1))

    def change_lengths(self) -> None:
        """Sets random lengths, including the shortest and the longest."""
        lengths = self._rng.integers(0, CAPACITY + 1, len(self.lengths), dtype=np.int32)
        lengths[self._rng.permutation(len(lengths))[:4]] = [0, 1, CAPACITY - 1, CAPACITY]
        self.lengths.copy_(torch.from_numpy(lengths))

    def step(self) -> tuple[torch.Tensor, ...]:
        return torch.ops.ngram_npu.ngram_step_(
            self.tokens, self.lengths, self.sampled, discard=self.discard, min_n=2, max_n=4, k=5,
            match_policy=self._match_policy, max_len=CAPACITY, workspace=self.workspace,
        )  # fmt: skip


def are_equal(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def check_steps(rows: Rows, expected: Rows, device: str, steps: int, growing: bool = True) -> None:
    """Compares replayed steps of `rows` with `expected`, which is on the CPU and has the same seed.
    growing: whether the rows grow; otherwise they get random lengths before each step."""
    rows.sample()
    expected.sample()
    replay = Replay(device, rows.step)
    rows.reset()
    for number in range(steps):
        for step_rows in (rows, expected):
            step_rows.sample()
            if not growing:
                step_rows.change_lengths()
        if number % 2:
            rows.workspace.fill_(GARBAGE)
        assert are_equal(replay(), expected.step()), f"step {number}"
    assert are_equal((rows.tokens, rows.lengths), (expected.tokens, expected.lengths))


@EACH_DEVICE
@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("match_policy", [0, 1])
def test_replayed_steps_match_the_cpu(device: str, match_policy: int, growing: bool) -> None:
    rows, expected = (Rows(name, 37, 1, match_policy) for name in (device, "cpu"))
    check_steps(rows, expected, device, choose_count(device, 1000, 20), growing)


def test_wrong_step_is_detected() -> None:
    with pytest.raises(AssertionError, match="step 0\n"):
        check_steps(Rows("cpu", 9, seed=1), Rows("cpu", 9, seed=2), "cpu", 3)


@EACH_DEVICE
def test_steps_on_several_streams_are_independent(device: str) -> None:
    """Each batch has its own workspace and stream."""
    batches = [Rows(device, 40 + seed, seed) for seed in range(4)]
    expected_batches = [Rows("cpu", 40 + seed, seed) for seed in range(4)]
    streams = [None if device == "cpu" else torch.cuda.Stream() for _ in batches]
    for _ in range(choose_count(device, 100)):
        for rows in (*batches, *expected_batches):
            rows.sample()
        synchronize(device)
        all_results = []
        for rows, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):  # None: the current stream
                all_results.append(rows.step())
        synchronize(device)
        for results, expected in zip(all_results, expected_batches, strict=True):
            assert are_equal(results, expected.step())


@EACH_DEVICE
def test_compiled_step_with_cudagraphs_matches_the_cpu(device: str) -> None:
    rows, expected = Rows(device, 23, seed=5), Rows("cpu", 23, seed=5)
    for tensor in (rows.tokens, rows.lengths, rows.sampled, rows.discard, rows.workspace):
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # On the CPU, a backend without a compiler suffices, because CUDA is not tested.
    options = {"backend": "aot_eager"} if device == "cpu" else {"mode": "reduce-overhead"}
    compiled = torch.compile(rows.step, fullgraph=True, **options)
    for _ in range(choose_count(device, 100, 3)):
        rows.sample()
        expected.sample()
        assert are_equal(compiled(), expected.step())
    assert counters["inductor"]["cudagraph_skips"] == 0
