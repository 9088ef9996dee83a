"""Operators on CUDA tensors as torch sees them: opcheck, and tensors of several devices."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from on_device import OnDevice, call_on
from opspecs import OPSPECS, OpSpec

from gpu.replay import GPU_ONLY

pytestmark = GPU_ONLY
CUDA = Backend("device-cuda", call_on("cuda"), device="cuda")
SPECS = pytest.mark.parametrize("spec", OPSPECS.values(), ids=lambda s: s.name)


@SPECS
def test_opcheck(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name).default
    with CUDA.drawing():
        sample = spec.sample()
    for args in (sample.args, *spec.sizes):
        torch.library.opcheck(op, OnDevice(args, "cuda").args)


@SPECS
def test_a_tensor_of_another_device_is_refused(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name)
    names = spec.tensor_names
    for name in names[1:]:
        args = OnDevice(spec.sample_with(name).args, "cuda").args
        there = spec.replace(args, **{name: lambda tensor: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected device"):
            op(*there)


def test_rows_further_apart_than_32_bits_count() -> None:
    """R * S may exceed 2**31 (tests/ops/test_far_rows.py): 8.6 GB, of which little is touched."""
    rows, capacity, stride = 3, 150, 2**30 + 7
    memory = torch.empty(stride * (rows - 1) + capacity, dtype=torch.int32, device="cuda")
    far = memory.as_strided((rows, capacity), (stride, 1))
    near = torch.randint(0, 3, (rows, capacity), dtype=torch.int32)
    lengths = torch.full((rows,), capacity - 3, dtype=torch.int32)
    sampled = torch.tensor([[1, 2], [0, -1], [2, 0]], dtype=torch.int32)
    far.copy_(near)
    tail = (None, None, True, 9, 2, 5, 4, 0, True, 2**62, None)
    step = torch.ops.ngram_npu.ngram_step_
    got = step(far, lengths.cuda(), sampled.cuda(), *tail)
    expected = step(near, lengths, sampled, *tail)
    for mine, truth in zip((*got, far), (*expected, near), strict=True):
        assert torch.equal(mine.cpu(), truth)
