"""Operators on CUDA tensors in torch: kernels, opcheck, tensors of several devices."""

from __future__ import annotations

import os
from pathlib import Path

import ngram_npu
import pytest
import torch
from backends import Backend
from ngram_npu import _library
from on_device import OnDevice, call_on, torch_op
from opspecs import OPSPECS, OpSpec

from gpu.replay import GPU_ONLY, HAS_GPU, NO_GPU

CUDA = Backend("device-cuda", call_on("cuda"), device="cuda")
ON_CUDA = [spec for spec in OPSPECS.values() if "cuda" not in spec.no_kernel]
SPECS = pytest.mark.parametrize("spec", ON_CUDA, ids=lambda s: s.name)


def test_a_gpu_takes_part() -> None:
    """Shows whether a GPU was tested. Skipped without one; with NGRAM_NPU_REQUIRE_GPU, in which
    `make gpu` passes the folder of the package that it built, the test fails instead."""
    required = os.environ.get("NGRAM_NPU_REQUIRE_GPU")
    if not HAS_GPU and required is None:
        pytest.skip(NO_GPU)
    assert Path(ngram_npu.__file__).is_relative_to(required or "/")
    assert torch.cuda.is_available(), ngram_npu.doctor()
    for spec in ON_CUDA:
        assert _library.has_kernel(spec.name, "cuda"), _library.backends()["cuda"]


@GPU_ONLY
@SPECS
def test_opcheck(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name).default
    with CUDA.drawing():
        sample = spec.sample()
    for args in (sample.args, *spec.sizes):
        torch.library.opcheck(op, *spec.split(OnDevice(args, "cuda").args))


@GPU_ONLY
@SPECS
def test_a_tensor_of_another_device_is_refused(spec: OpSpec) -> None:
    op = torch_op(spec.name)
    names = spec.tensor_names
    for name in names[1:]:
        args = OnDevice(spec.sample_with(name).args, "cuda").args
        there = spec.replace(args, **{name: lambda tensor: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected device"):
            op(*there)


@GPU_ONLY
def test_rows_further_apart_than_32_bits_count() -> None:
    """R * S may exceed 2**31 (tests/ops/test_far_rows.py): 8.6 GB, of which little is touched."""
    rows, capacity, stride = 3, 150, 2**30 + 7
    memory = torch.empty(stride * (rows - 1) + capacity, dtype=torch.int32, device="cuda")
    far = memory.as_strided((rows, capacity), (stride, 1))
    near = torch.randint(0, 3, (rows, capacity), dtype=torch.int32)
    lengths = torch.full((rows,), capacity - 3, dtype=torch.int32)
    sampled = torch.tensor([[1, 2], [0, -1], [2, 0]], dtype=torch.int32)
    far.copy_(near)
    options = {"vocab_size": 9, "min_n": 2, "max_n": 5, "k": 4, "overlap": True}
    step = torch.ops.ngram_npu.ngram_step_
    got = step(far, lengths.cuda(), sampled.cuda(), **options)
    expected = step(near, lengths, sampled, **options)
    for mine, truth in zip((*got, far), (*expected, near), strict=True):
        assert torch.equal(mine.cpu(), truth)
