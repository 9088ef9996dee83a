"""Whole steps on a device while rows grow, compared with the CPU: replayed, on several streams,
compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ngram_npu.ops import workspace_size

from gpu.replay import DEVICES, Replay, synchronize, times

CAPACITY, WIDTH = 1 << 13, 3
ON = pytest.mark.parametrize("device", DEVICES)


class Rows:
    """Rows that gain up to WIDTH tokens per step. The step's input is a tensor of fixed address
    that :meth:`sample` fills, as a sampler would."""

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
        self.workspace = torch.zeros(size, dtype=torch.int32, device=device)
        self._start = self.tokens.clone(), self.lengths.clone()

    def restart(self) -> None:
        self.tokens.copy_(self._start[0])
        self.lengths.copy_(self._start[1])

    def sample(self) -> None:
        shape = self.sampled.shape
        tokens = self._rng.integers(0, 40, shape, dtype=np.int32)
        tokens[np.arange(shape[1]) >= self._rng.integers(0, shape[1] + 1, (shape[0], 1))] = -1
        self.sampled.copy_(torch.from_numpy(tokens))
        self.discard.copy_(torch.from_numpy(self._rng.random(shape[0]) < 0.1))

    def redraw_lengths(self) -> None:
        """Draws new lengths, including the shortest and the longest: as of other requests."""
        lengths = self._rng.integers(0, CAPACITY + 1, len(self.lengths), dtype=np.int32)
        lengths[self._rng.permutation(len(lengths))[:4]] = [0, 1, CAPACITY - 1, CAPACITY]
        self.lengths.copy_(torch.from_numpy(lengths))

    def step(self) -> tuple[torch.Tensor, ...]:
        return torch.ops.ngram_npu.ngram_step_(
            self.tokens, self.lengths, self.sampled, discard=self.discard, min_n=2, max_n=4, k=5,
            match_policy=self._match_policy, max_len=CAPACITY, workspace=self.workspace,
        )  # fmt: skip


def same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(m.cpu(), t.cpu()) for m, t in zip(got, expected, strict=True))


def check_steps(mine: Rows, truth: Rows, device: str, steps: int, growing: bool = True) -> None:
    """`truth` is on the CPU and of the same seed; `mine` is replayed. Rows grow, or have other
    lengths in each step."""
    mine.sample()
    truth.sample()
    replay = Replay(device, mine.step)
    mine.restart()
    for number in range(steps):
        for rows in (mine, truth):
            rows.sample()
            if not growing:
                rows.redraw_lengths()
        assert same(replay(), truth.step()), f"step {number}"
        assert not mine.workspace.any(), f"step {number}: the workspace is not zero"
    assert same((mine.tokens, mine.lengths), (truth.tokens, truth.lengths))


@ON
@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("match_policy", [0, 1])
def test_replays(device: str, match_policy: int, growing: bool) -> None:
    mine, truth = (Rows(there, 37, 1, match_policy) for there in (device, "cpu"))
    check_steps(mine, truth, device, times(device, 1000, 20), growing)


def test_a_wrong_step_and_a_dirty_workspace_are_caught() -> None:
    with pytest.raises(AssertionError, match="step 0\n"):
        check_steps(Rows("cpu", 9, seed=1), Rows("cpu", 9, seed=2), "cpu", 3)
    mine, truth = Rows("cpu", 9, seed=1), Rows("cpu", 9, seed=1)
    mine.workspace[3] = 1
    with pytest.raises(AssertionError, match="workspace"):
        check_steps(mine, truth, "cpu", 3)


@ON
def test_streams_do_not_share(device: str) -> None:
    """Several batches in flight at once, each with its own workspace and stream."""
    several = [Rows(device, 40 + seed, seed) for seed in range(4)]
    truths = [Rows("cpu", 40 + seed, seed) for seed in range(4)]
    streams = [None if device == "cpu" else torch.cuda.Stream() for _ in several]
    for _ in range(times(device, 100)):
        for rows in (*several, *truths):
            rows.sample()
        synchronize(device)
        got = []
        for rows, stream in zip(several, streams, strict=True):
            with torch.cuda.stream(stream):  # of None: nothing
                got.append(rows.step())
        synchronize(device)
        for results, rows, truth in zip(got, several, truths, strict=True):
            assert same(results, truth.step())
            assert not rows.workspace.any()


@ON
def test_compiled_with_cudagraphs(device: str) -> None:
    mine, truth = Rows(device, 23, seed=5), Rows("cpu", 23, seed=5)
    for tensor in (mine.tokens, mine.lengths, mine.sampled, mine.discard, mine.workspace):
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # On the CPU a backend that needs no compiler: Inductor's would say nothing about CUDA.
    how = {"backend": "aot_eager"} if device == "cpu" else {"mode": "reduce-overhead"}
    compiled = torch.compile(mine.step, fullgraph=True, **how)
    for _ in range(times(device, 100, 3)):
        mine.sample()
        truth.sample()
        assert same(compiled(), truth.step())
    assert counters["inductor"]["cudagraph_skips"] == 0
