"""Every operator on CUDA tensors: kernels, opcheck, tensors of several devices, far rows; called,
and replayed on other values, without waiting for the GPU and without allocating."""

from __future__ import annotations

import os
from pathlib import Path

import ngram_npu
import numpy as np
import pytest
import torch
from backends import call_torch
from ngram_npu import _library
from on_device import OnDevice, torch_op
from ops.parity import MismatchError, as_arrays, compare
from ops.specs import OPSPECS, Args, OpSpec, Sample, clone_args

from gpu.replay import DEVICES, GPU_ONLY, HAS_GPU, NO_GPU, Replay, no_synchronisation, times

SPECS = [s for s in OPSPECS.values() if not s.opaque and "cuda" not in s.no_kernel]
ORDERED = {"query_start_loc", "cu_num_draft_tokens"}
"""Offsets: in another order they would break the contract, which leaves results unspecified."""


def reordered(spec: OpSpec, args: Args, rng: np.random.Generator) -> Args:
    """The same shapes and layouts, with the rows of each tensor in another order: other lengths,
    other tokens, other indices at each batch position."""
    copy = clone_args(args)
    for (name, _), value in zip(spec.arguments, copy, strict=True):
        if isinstance(value, np.ndarray) and value.ndim > 0 and name not in ORDERED:
            value[...] = value[rng.permutation(len(value))]
    return copy


def check_replays(spec: OpSpec, device: str, args: Args, count: int, **changed: object) -> None:
    """`count` replays of the operator, each on other values, against the CPU."""
    rng = np.random.default_rng(17)
    mine = clone_args(args)
    there = OnDevice(mine, device)
    function = changed.get("function", torch_op(spec.name))
    replay = Replay(device, lambda: function(*there.args))
    for number in range(count):
        values = reordered(spec, args, rng)
        for target, source in zip(mine, values, strict=True):
            if isinstance(target, np.ndarray):
                target[...] = source
        there.refresh()
        results = replay()
        there.copy_back()
        truth = clone_args(values)
        expected = call_torch(spec.name, truth)
        sample = Sample(f"replay {number}", values)
        compare(spec, sample, as_arrays(results), mine, expected, truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_replays_on_other_values(spec: OpSpec, device: str) -> None:
    for args in (spec.sample().args, *spec.sizes):
        check_replays(spec, device, args, times(device, 300))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_call_does_not_wait(spec: OpSpec, device: str) -> None:
    for args in (spec.sample().args, *spec.sizes):
        there = OnDevice(args, device)
        torch_op(spec.name)(*there.args)  # loads the kernel
        with no_synchronisation(device):
            torch_op(spec.name)(*there.args)


def test_the_values_do_change() -> None:
    rng = np.random.default_rng(17)
    for spec in SPECS:
        args = spec.sizes[0]
        other = reordered(spec, args, rng)
        assert any(
            not np.array_equal(a, b)
            for a, b in zip(args, other, strict=True)
            if isinstance(a, np.ndarray)
        ), spec.name


def test_a_replay_that_does_nothing_is_caught() -> None:
    """Like a graph that has captured none of the operator's work."""
    spec = OPSPECS["ngram_step_"]
    first: list[tuple[torch.Tensor, ...]] = []

    def stale(*args: object) -> tuple[torch.Tensor, ...]:
        if not first:
            first.append(torch_op("ngram_step_")(*args))
        return first[0]

    with pytest.raises(MismatchError):
        check_replays(spec, "cpu", spec.sizes[0], 3, function=stale)


ALL = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)


def test_a_gpu_takes_part() -> None:
    """Shows whether a GPU was tested. Skipped without one; with NGRAM_NPU_REQUIRE_GPU, in which
    `make gpu` passes the folder of the package that it built, the test fails instead."""
    required = os.environ.get("NGRAM_NPU_REQUIRE_GPU")
    if not HAS_GPU and required is None:
        pytest.skip(NO_GPU)
    assert Path(ngram_npu.__file__).is_relative_to(required or "/")
    assert torch.cuda.is_available(), ngram_npu.doctor()
    for spec in SPECS:
        assert _library.has_kernel(spec.name, "cuda"), _library.backends()["cuda"]


@GPU_ONLY
@ALL
def test_opcheck(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name).default
    for args in (spec.sample().args, *spec.sizes):
        torch.library.opcheck(op, *spec.split(OnDevice(args, "cuda").args))


@GPU_ONLY
@ALL
def test_a_tensor_of_another_device_is_refused(spec: OpSpec) -> None:
    for name in spec.tensor_names[1:]:
        args = OnDevice(spec.sample_with(name).args, "cuda").args
        there = spec.replace(args, **{name: lambda tensor: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected device"):
            torch_op(spec.name)(*there)


@GPU_ONLY
def test_rows_further_apart_than_32_bits_count() -> None:
    """R * S may exceed 2**31 (tests/ops/test_memory.py): 8.6 GB, of which little is touched."""
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
