"""Thousands of whole steps on a device, compared with a scan on the CPU."""

from __future__ import annotations

import pytest
import torch
from ngram_npu import IntegrityError

from gpu.replay import DEVICES, Replay, no_synchronisation, num_allocations, synchronize, times
from gpu.rows import Rows, same

KINDS = pytest.mark.parametrize("indexed", [False, True], ids=["scan", "index"])
ON = pytest.mark.parametrize("device", DEVICES)


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
        synchronize(device)
        before = num_allocations(device)
        with no_synchronisation(device):
            got = replay()
        assert num_allocations(device) == before
        expected = truth.step()
        assert same(got, expected), f"step {number}"
        assert not mine.workspace.any(), f"step {number}: the workspace is not zero"
    assert same((mine.tokens, mine.lengths), (truth.tokens, truth.lengths))


@ON
@KINDS
@pytest.mark.parametrize("match_policy", [0, 1])
def test_replays_while_rows_grow(device: str, indexed: bool, match_policy: int) -> None:
    mine = Rows(device, 37, indexed, seed=1, match_policy=match_policy)
    truth = Rows("cpu", 37, indexed=False, seed=1, match_policy=match_policy)
    check_steps(mine, truth, device, times(device, 2000, 20))


@ON
@KINDS
def test_replays_with_drawn_lengths(device: str, indexed: bool) -> None:
    mine, truth = Rows(device, 37, indexed, seed=2), Rows("cpu", 37, False, seed=2)
    check_steps(mine, truth, device, times(device, 1000, 20), growing=False)


def check_building(rows: Rows, device: str, checks: int) -> None:
    """Of the index, replayed, with other slots to empty and other lengths to index each time."""
    slots = torch.arange(2, dtype=torch.int32, device=device)

    def build() -> None:
        rows.reset(slots)
        rows.append()

    replay = Replay(device, build)
    for check in range(checks):
        for number in range(times(device, 30, 1)):
            rows.redraw_lengths()
            first = 2 * (check + number)
            slots.copy_(torch.tensor([first, first + 1], dtype=torch.int32) % len(rows.lengths))
            replay()
        rows.check_index()


@ON
@pytest.mark.parametrize("match_policy", [0, 1])
def test_replays_that_build_the_index(device: str, match_policy: int) -> None:
    check_building(
        Rows(device, 7, True, seed=6, match_policy=match_policy), device, times(device, 4, 1)
    )


def test_an_index_that_was_not_built_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows("cpu", 5, True, seed=6)
    monkeypatch.setattr(rows, "append", lambda: None)
    with pytest.raises(IntegrityError):
        check_building(rows, "cpu", 1)


def test_a_wrong_step_and_a_dirty_workspace_are_caught() -> None:
    with pytest.raises(AssertionError, match="step 0\n"):
        check_steps(Rows("cpu", 9, False, seed=1), Rows("cpu", 9, False, seed=2), "cpu", 3)
    mine, truth = Rows("cpu", 9, False, seed=1), Rows("cpu", 9, False, seed=1)
    mine.workspace[3] = 1
    with pytest.raises(AssertionError, match="workspace"):
        check_steps(mine, truth, "cpu", 3)


@ON
@KINDS
def test_streams_do_not_share(device: str, indexed: bool) -> None:
    """Several batches in flight at once, each with its own workspace and stream."""
    several = [Rows(device, 40 + seed, indexed, seed) for seed in range(4)]
    truths = [Rows("cpu", 40 + seed, False, seed) for seed in range(4)]
    streams = [None if device == "cpu" else torch.cuda.Stream() for _ in several]
    for _ in range(times(device, 100)):
        for rows, truth in zip(several, truths, strict=True):
            rows.sample()
            truth.sample()
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
@KINDS
def test_compiled_with_cudagraphs(device: str, indexed: bool) -> None:
    mine, truth = Rows(device, 23, indexed, seed=5), Rows("cpu", 23, False, seed=5)
    for tensor in (mine.tokens, mine.lengths, mine.sampled, mine.discard, mine.workspace):
        torch._dynamo.mark_static_address(tensor)
    if mine.index is not None:
        torch._dynamo.mark_static_address(mine.index)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@KINDS
def test_device_1_while_device_0_is_current(indexed: bool) -> None:
    truth = Rows("cpu", 19, False, seed=3)
    with torch.cuda.device(1):
        mine = Rows("cuda:1", 19, indexed, seed=3)
    with torch.cuda.device(0):
        for _ in range(50):
            mine.sample()
            truth.sample()
            got = mine.step()
            assert all(result.device == torch.device("cuda:1") for result in got)
            assert same(got, truth.step())
            assert torch.cuda.current_device() == 0
