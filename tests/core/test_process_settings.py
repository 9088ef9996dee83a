"""Tests drafts with several threads, and with another default device of torch."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import ngram_npu
import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramProposer, num_threads, set_num_threads

PROPOSER = NgramProposer(NgramConfig(min_n=2, max_n=4, k=4))
TOKENS = np.random.default_rng(1).integers(0, 20_000, (48, 100_000), dtype=np.int32)
"""Enough tokens for several threads."""
TOKENS[:, -3:] = TOKENS[:, 50_000:50_003]
LENGTHS = np.full(48, 100_000, np.int32)


@pytest.fixture(autouse=True)
def _restore_thread_limit() -> Iterator[None]:
    yield
    set_num_threads(0)


def test_negative_thread_limit_is_rejected() -> None:
    set_num_threads(3)
    assert num_threads() == 3
    with pytest.raises(ValueError, match="set_num_threads: limit: expected 0 to"):
        set_num_threads(-1)
    assert num_threads() == 3


def test_drafts_do_not_depend_on_the_number_of_threads() -> None:
    num_threads_before = len(os.listdir("/proc/self/task"))
    set_num_threads(1)
    expected = PROPOSER.propose(TOKENS, LENGTHS)[:3]
    assert len(os.listdir("/proc/self/task")) <= num_threads_before
    assert expected[1].sum() > 0
    for limit in (2, 3, 0):
        set_num_threads(limit)
        for _ in range(5):
            assert all(map(np.array_equal, PROPOSER.propose(TOKENS, LENGTHS)[:3], expected))
        tensors = torch.from_numpy(TOKENS), torch.from_numpy(LENGTHS)
        for tensor, array in zip(PROPOSER.propose(*tensors)[:3], expected, strict=True):
            assert np.array_equal(tensor.numpy(), array)


def test_other_python_threads_run_during_a_call() -> None:
    set_num_threads(1)
    ticks: list[int] = []
    is_done = threading.Event()

    def count_ticks() -> None:
        while not is_done.is_set():
            ticks.append(1)
            is_done.wait(0.0005)

    thread = threading.Thread(target=count_ticks)
    thread.start()
    try:
        num_ticks = 0
        for _ in range(200):
            num_ticks_before = len(ticks)
            PROPOSER.propose(TOKENS, LENGTHS)
            num_ticks += len(ticks) - num_ticks_before
            if num_ticks >= 3:
                break
    finally:
        is_done.set()
        thread.join()
    assert num_ticks >= 3


FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


def find_calls_without_device(source: str) -> list[str]:
    """Returns the calls of torch that create a tensor on the default device."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and ast.unparse(node.func.value) in ("torch", "sys.modules['torch']")
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_library_creates_tensors_with_an_explicit_device() -> None:
    """Results must not depend on torch.set_default_device."""
    calls = find_calls_without_device("torch.zeros(2); torch.zeros(2, device=x); np.zeros(2)")
    assert calls == ["torch.zeros(2)"]
    for file in Path(ngram_npu.__file__).parent.rglob("*.py"):
        assert find_calls_without_device(file.read_text()) == [], file
