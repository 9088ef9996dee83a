"""Operators on CUDA tensors as torch sees them: opcheck, and tensors of several devices."""

from __future__ import annotations

import pytest
import torch
from on_device import OnDevice
from opspecs import OPSPECS, OpSpec

from gpu.replay import GPU_ONLY

pytestmark = GPU_ONLY
SPECS = pytest.mark.parametrize("spec", OPSPECS.values(), ids=lambda s: s.name)


@SPECS
def test_opcheck(spec: OpSpec) -> None:
    op = getattr(torch.ops.ngram_npu, spec.name).default
    for args in (spec.sample().args, *spec.sizes):
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
