"""What parity does not show of a device: captured graphs, several streams, several devices, and
that no call waits. On the CPU the same steps run one after the other, which tests these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from ngram_npu import _C, ops
from opspecs.rows import random_rows

BATCH, CAPACITY, WIDTH, K = 12, 9000, 4, 5  # rows that several blocks of a device share
LOOKUP = {"min_n": 2, "max_n": 6, "k": K, "max_len": CAPACITY}
CUDA = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
REPLAYS = 1000 if CUDA else 5


@dataclass
class Steps:
    """Steps of one batch in tensors that stay where they are, and the same steps on the CPU."""

    device: str
    rng: np.random.Generator
    tokens: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)
    sampled: torch.Tensor = field(init=False)
    workspace: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        words = ops.workspace_size("ngram_step_", BATCH)
        self.tokens = torch.from_numpy(random_rows(self.rng, BATCH, CAPACITY, 9)).to(self.device)
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device=self.device)
        self.sampled = torch.zeros((BATCH, WIDTH), dtype=torch.int32, device=self.device)
        self.workspace = torch.zeros(words, dtype=torch.int32, device=self.device)

    def draw(self) -> None:
        """Other lengths, short ones and none at all among them, and other sampled tokens."""
        lengths = self.rng.integers(0, CAPACITY + 1, BATCH, dtype=np.int32)
        lengths[self.rng.integers(0, BATCH, 3)] = [0, 1, CAPACITY]
        self.lengths.copy_(torch.from_numpy(lengths))
        sampled = self.rng.integers(-1, 9, (BATCH, WIDTH), dtype=np.int32)
        self.sampled.copy_(torch.from_numpy(sampled))

    def step(self) -> tuple[torch.Tensor, ...]:
        step = ops.ngram_step_(
            self.tokens, self.lengths, self.sampled, workspace=self.workspace, **LOOKUP
        )
        return (*step, *ops.ngram_propose(self.tokens, self.lengths, **LOOKUP))

    def expected(self) -> tuple[np.ndarray, ...]:
        """What step() would return now; changes nothing."""
        tokens, lengths = self.tokens.cpu().numpy().copy(), self.lengths.cpu().numpy().copy()
        tail = (LOOKUP["min_n"], LOOKUP["max_n"], K, 0, False, CAPACITY)
        head = (tokens, lengths, self.sampled.cpu().numpy(), None, None, True, 2**62)
        step = _C.ngram_step_(*head, *tail, None)
        return (*step, *_C.ngram_propose(tokens, lengths, None, None, *tail), tokens, lengths)

    def check(self, got: tuple[torch.Tensor, ...], expected: tuple[np.ndarray, ...]) -> None:
        for mine, truth in zip((*got, self.tokens, self.lengths), expected, strict=True):
            assert np.array_equal(mine.cpu().numpy(), truth)
        assert not self.workspace.any()


def _captured(steps: Steps) -> Callable[[], tuple[torch.Tensor, ...]]:
    if steps.device == "cpu":
        return steps.step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # loads the kernels
        steps.step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps.step()

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return results

    return replay


@contextmanager
def _nothing_waits(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_replays_with_changing_lengths(device: str) -> None:
    steps = Steps(device, np.random.default_rng(1))
    replay = _captured(steps)
    for _ in range(REPLAYS):
        steps.draw()
        expected = steps.expected()
        with _nothing_waits(device):
            got = replay()
        steps.check(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_waits_for_nothing(device: str) -> None:
    steps = Steps(device, np.random.default_rng(2))
    steps.draw()
    expected = steps.expected()
    with _nothing_waits(device):
        got = steps.step()
    steps.check(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_streams_beside_each_other(device: str) -> None:
    both = [Steps(device, np.random.default_rng(seed)) for seed in (3, 4)]
    for steps in both:
        steps.draw()
    expected = [steps.expected() for steps in both]
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in both]
    if device == "cuda":
        torch.cuda.synchronize()
    got = []
    for steps, stream in zip(both, streams, strict=True):
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            got.append(steps.step())
    if device == "cuda":
        torch.cuda.synchronize()
    for steps, mine, truth in zip(both, got, expected, strict=True):
        steps.check(mine, truth)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    with torch.cuda.device(0):
        steps = Steps("cuda:1", np.random.default_rng(5))
        steps.draw()
        expected = steps.expected()
        steps.check(steps.step(), expected)
        assert torch.cuda.current_device() == 0


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_compiled_with_cudagraphs() -> None:
    steps = Steps("cuda", np.random.default_rng(6))
    compiled = torch.compile(steps.step, fullgraph=True, mode="reduce-overhead")
    for _ in range(6):
        steps.draw()
        expected = steps.expected()
        got = tuple(result.clone() for result in compiled())
        steps.check(got, expected)


def test_the_check_bites() -> None:
    steps = Steps("cpu", np.random.default_rng(7))
    steps.draw()
    expected = steps.expected()
    got = steps.step()
    got[2][0, 0] += 1
    with pytest.raises(AssertionError):
        steps.check(got, expected)
