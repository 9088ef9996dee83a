"""Tests drafts with several threads, calls that let other threads run, and torch's default
device."""

from __future__ import annotations

import ast
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ngram_npu
import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramProposer, NgramStore, Scope, num_threads, set_num_threads

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


def fill_blocks(store: NgramStore) -> None:
    """Fills all blocks with text of the scope 0."""
    store.text[:] = 1
    store.blocks[:, 0] = np.arange(1, len(store.blocks) + 1)
    store.blocks[:, 3] = 256


GIL_CALLS: dict[str, Callable[[NgramStore], object]] = {
    "propose": lambda store: PROPOSER.propose(TOKENS, LENGTHS),
    "clear of a scope": lambda store: store.clear(Scope(0)),
    "clear": lambda store: store.clear(),
    "mark_update": lambda store: store.mark_update(1),
    "renumber": lambda store: store._renumber(),
    "texts": lambda store: store.texts(),
    "scopes": lambda store: store.scopes,
    "no release": lambda store: store.text.reshape(-1).tolist(),
}


@pytest.mark.parametrize("name", GIL_CALLS)
def test_long_call_releases_the_gil(name: str) -> None:
    """Python does not take the GIL from the calling thread within the switch interval, so another
    thread has a turn only if the call releases the GIL. On a busy machine, a single release may be
    too short for a turn."""
    store, turns, is_done = NgramStore(1 << 20), list[int](), threading.Event()

    def take_turns() -> None:
        while not is_done.is_set():
            turns.append(1)
            time.sleep(0)

    thread, interval = threading.Thread(target=take_turns), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        num_turns = 0
        for _ in range(20):
            fill_blocks(store)
            time.sleep(0.001)
            num_turns_before = len(turns)
            GIL_CALLS[name](store)
            num_turns += len(turns) - num_turns_before
            if num_turns:
                break
    finally:
        is_done.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert (num_turns > 0) == (name != "no release")


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
