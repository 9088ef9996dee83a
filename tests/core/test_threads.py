"""The caller limits the number of threads; the results do not depend on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramProposer, num_threads, set_num_threads

PROPOSER = NgramProposer(NgramConfig(min_n=2, max_n=4, k=4))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    set_num_threads(0)


def _large() -> tuple[np.ndarray, np.ndarray]:
    """Enough tokens for several threads."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 20_000, (48, 100_000), dtype=np.int32)
    tokens[:, -3:] = tokens[:, 50_000:50_003]
    return tokens, np.full(48, 100_000, np.int32)


def _threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_limit_is_validated() -> None:
    set_num_threads(3)
    assert num_threads() == 3
    with pytest.raises(ValueError, match="set_num_threads: limit: expected 0 to"):
        set_num_threads(-1)
    assert num_threads() == 3


def test_same_drafts_with_any_number() -> None:
    tokens, lengths = _large()
    set_num_threads(1)
    alone = PROPOSER.propose(tokens, lengths)
    assert alone.num_draft_tokens.sum() > 0
    for limit in (2, 3, 0):
        set_num_threads(limit)
        for _ in range(5):
            for a, b in zip(PROPOSER.propose(tokens, lengths), alone, strict=True):
                assert np.array_equal(a, b)
        from_torch = PROPOSER.propose(torch.from_numpy(tokens), torch.from_numpy(lengths))
        for c, d in zip(from_torch, alone, strict=True):
            assert np.array_equal(c.numpy(), d)


def test_one_thread_starts_no_other() -> None:
    tokens, lengths = _large()
    set_num_threads(1)
    before = _threads_of_this_process()
    PROPOSER.propose(tokens, lengths)
    assert _threads_of_this_process() <= before


def test_concurrent_callers() -> None:
    """The GIL is released, so calls meet in the pool; the second runs on its own thread."""
    tokens, lengths = _large()
    expected = PROPOSER.propose(tokens, lengths).draft_token_ids
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: PROPOSER.propose(tokens, lengths), range(40)):
            assert np.array_equal(found.draft_token_ids, expected)


def test_gil_is_released() -> None:
    """Another Python thread makes progress while a long call runs."""
    tokens, lengths = _large()
    set_num_threads(1)
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(1)
            stop.wait(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        during = 0
        for _ in range(200):
            seen = len(ticks)
            PROPOSER.propose(tokens, lengths)
            during += len(ticks) - seen
            if during >= 3:
                break
    finally:
        stop.set()
        ticker.join()
    assert during >= 3


def test_usable_after_fork() -> None:
    """Model servers fork workers; the parent's pool threads do not exist in the child."""
    tokens, lengths = _large()
    expected = PROPOSER.propose(tokens, lengths).draft_token_ids  # starts the pool
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = np.array_equal(PROPOSER.propose(tokens, lengths).draft_token_ids, expected)
        finally:
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
