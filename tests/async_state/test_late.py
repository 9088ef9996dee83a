"""The late device itself: its order of things, and that its tensors cannot be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import ops as _registered  # noqa: F401

from async_state.late import (
    POISON,
    POLICIES,
    CriticalWaitError,
    HostReadError,
    LateDevice,
    value_of,
)


def _device(policy: str = "lazy") -> LateDevice:
    return LateDevice(policy, random.Random(0))


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "array": lambda t: np.array(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "bool": lambda t: bool(t[0]),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "index": lambda t: range(t[0]),
    "list": lambda t: list(t),
    "in": lambda t: 0 in t,
    "format": lambda t: f"{t[0]:d}",
    "equal": lambda t: torch.equal(t, t),
    "any": lambda t: t.any(),
    "compare": lambda t: t == 0,
    "add": lambda t: t + 1,
    "clone": lambda t: t.clone(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: torch.zeros(4)[t],
    "copy to the host": lambda t: torch.zeros(4, dtype=torch.int32).copy_(t),
    "dlpack": lambda t: torch.from_dlpack(t),
    "pointer": lambda t: t.data_ptr(),
}


@pytest.mark.parametrize("read", READS)
def test_no_host_read_gets_through(read: str) -> None:
    with pytest.raises(HostReadError):
        READS[read](_device().tensor((4,), torch.int32))


def test_copies_happen_when_waited_for() -> None:
    device = _device()
    there, here = device.tensor((2,), torch.int32), device.host_tensor((2,), torch.int32)
    source = torch.tensor([1, 2], dtype=torch.int32)
    device.copy(there, source, "main")
    ready = device.record("main")
    device.wait("side", ready)
    device.copy(here, there, "side")
    done = device.record("side")
    assert value_of(there).tolist() == [0, 0]
    assert here.tolist() == [POISON, POISON]
    source[0] = 5  # the copy has not run: it reads what is there by then
    device.synchronize(done)
    assert here.tolist() == [5, 2]


def test_without_a_wait_the_side_stream_is_too_early() -> None:
    device = _device()
    there, here = device.tensor((1,), torch.int32), device.host_tensor((1,), torch.int32)
    device.copy(there, torch.tensor([1], dtype=torch.int32), "main")
    device.copy(here, there, "side")
    device.synchronize(device.record("side"))
    assert here.tolist() == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_operators_keep_their_order(policy: str) -> None:
    device = _device(policy)
    counts, starts = device.tensor((1,), torch.int32), device.tensor((2,), torch.int32)
    device.copy(counts, torch.tensor([2], dtype=torch.int32), "main")
    device.copy(starts, torch.tensor([0, 7], dtype=torch.int32), "main")
    indices, rejected = torch.ops.ngram_npu.prepare_inputs_padded(counts, counts, starts)
    device.drain()
    assert value_of(indices).tolist() == [5]
    assert value_of(rejected).tolist() == [1]


def test_waiting_on_the_critical_path() -> None:
    device = _device()
    device.launch(lambda: None)
    event = device.record("main")
    with device.critical(), pytest.raises(CriticalWaitError):
        device.synchronize(event)
    device.synchronize(event)
    with device.critical():
        device.synchronize(event)  # has happened: no wait


def test_host_tensors_do_not_reach_operators() -> None:
    device = _device()
    there, here = device.tensor((1,), torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(HostReadError):
        torch.ops.ngram_npu.prepare_inputs_padded(there, here, there)
