"""Tests all operators on CUDA tensors: kernels, opcheck, mixed devices, large strides, and replays.

Calls must not wait for the GPU. Replays must neither wait nor allocate.
"""

from __future__ import annotations

import os
from pathlib import Path

import ngram_npu
import numpy as np
import pytest
import torch
from backends import call_torch
from ngram_npu import _library
from on_device import DeviceArguments, torch_op
from ops.parity import MismatchError, as_arrays, check_results
from ops.specs import OPSPECS, Args, OpSpec, Sample, clone_args

from gpu.replay import DEVICES, GPU_ONLY, HAS_GPU, NO_GPU, Replay, choose_count, forbid_waiting

SPECS = list(OPSPECS.values())
EACH_OPERATOR = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
OFFSET_ARGUMENTS = {"query_start_loc", "cu_num_draft_tokens"}
"""Names of arguments that must stay ascending; otherwise the results are unspecified."""


def permute_rows(spec: OpSpec, args: Args, rng: np.random.Generator) -> Args:
    """Returns a copy of the arguments with the rows of each tensor permuted."""
    copy = clone_args(args)
    for (name, _), value in zip(spec.arguments, copy, strict=True):
        if isinstance(value, np.ndarray) and value.ndim > 0 and name not in OFFSET_ARGUMENTS:
            value[...] = value[rng.permutation(len(value))]
    return copy


def check_replays(spec: OpSpec, device: str, args: Args, count: int, **options: object) -> None:
    """Compares `count` replays of the operator, each with different values, with the CPU."""
    rng = np.random.default_rng(17)
    arguments = clone_args(args)
    on_device = DeviceArguments(arguments, device)
    function = options.get("function", torch_op(spec.name))
    replay = Replay(device, lambda: function(*on_device.args))
    for number in range(count):
        values = permute_rows(spec, args, rng)
        for target, source in zip(arguments, values, strict=True):
            if isinstance(target, np.ndarray):
                target[...] = source
        on_device.refresh()
        results = replay()
        on_device.copy_back()
        expected_args = clone_args(values)
        expected = call_torch(spec.name, expected_args)
        sample = Sample(f"replay {number}", values)
        check_results(spec, sample, as_arrays(results), arguments, expected, expected_args)


@pytest.mark.parametrize("device", DEVICES)
@EACH_OPERATOR
def test_replay_on_other_values_matches_the_cpu(spec: OpSpec, device: str) -> None:
    for args in (spec.sample().args, *spec.sizes):
        check_replays(spec, device, args, choose_count(device, 300))


@pytest.mark.parametrize("device", DEVICES)
@EACH_OPERATOR
def test_call_does_not_wait_for_the_gpu(spec: OpSpec, device: str) -> None:
    for args in (spec.sample().args, *spec.sizes):
        on_device = DeviceArguments(args, device)
        torch_op(spec.name)(*on_device.args)  # loads the kernel
        with forbid_waiting(device):
            torch_op(spec.name)(*on_device.args)


@pytest.mark.parametrize("op", ["ngram_step_", "prepare_inputs_padded"])
def test_replay_without_effect_is_detected(op: str) -> None:
    """The replay behaves like a graph that has captured none of the operator's work. The operator
    that writes only its results is detected because the values differ from replay to replay."""
    spec = OPSPECS[op]
    first_results: list[tuple[torch.Tensor, ...]] = []

    def return_first_results(*args: object) -> tuple[torch.Tensor, ...]:
        if not first_results:
            first_results.append(torch_op(op)(*args))
        return first_results[0]

    with pytest.raises(MismatchError):
        check_replays(spec, "cpu", spec.sizes[0], 3, function=return_first_results)


def test_gpu_is_available_and_has_all_kernels() -> None:
    """Skipped without a GPU, unless NGRAM_NPU_REQUIRE_GPU is set. `make gpu` sets it to the folder
    of the package that it built."""
    folder = os.environ.get("NGRAM_NPU_REQUIRE_GPU")
    if not HAS_GPU and folder is None:
        pytest.skip(NO_GPU)
    assert Path(ngram_npu.__file__).is_relative_to(folder or "/")
    assert torch.cuda.is_available(), ngram_npu.doctor()
    for spec in SPECS:
        assert _library.has_kernel(spec.name, "cuda"), _library.backends()["cuda"]


@GPU_ONLY
@EACH_OPERATOR
def test_operator_passes_opcheck(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name).default
    for args in (spec.sample().args, *spec.sizes):
        torch.library.opcheck(op, *spec.split(DeviceArguments(args, "cuda").args))


@GPU_ONLY
@EACH_OPERATOR
def test_tensor_on_another_device_raises(spec: OpSpec) -> None:
    for name in spec.tensor_names[1:]:
        args = DeviceArguments(spec.sample_with(name).args, "cuda").args
        on_device = spec.replace(args, **{name: lambda tensor: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected device"):
            torch_op(spec.name)(*on_device)


@GPU_ONLY
def test_row_stride_beyond_32_bits_is_supported() -> None:
    """Allocates 8.6 GB, most of which is never accessed."""
    rows, capacity, stride = 3, 150, 2**30 + 7
    memory = torch.empty(stride * (rows - 1) + capacity, dtype=torch.int32, device="cuda")
    strided_rows = memory.as_strided((rows, capacity), (stride, 1))
    rows_on_cpu = torch.randint(0, 3, (rows, capacity), dtype=torch.int32)
    lengths = torch.full((rows,), capacity - 3, dtype=torch.int32)
    sampled = torch.tensor([[1, 2], [0, -1], [2, 0]], dtype=torch.int32)
    strided_rows.copy_(rows_on_cpu)
    options = {"vocab_size": 9, "min_n": 2, "max_n": 5, "k": 4, "overlap": True}
    step = torch.ops.ngram_npu.ngram_step_
    results = step(strided_rows, lengths.cuda(), sampled.cuda(), **options)
    expected = step(rows_on_cpu, lengths, sampled, **options)
    for actual, reference in zip((*results, strided_rows), (*expected, rows_on_cpu), strict=True):
        assert torch.equal(actual.cpu(), reference)
