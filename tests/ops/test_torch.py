"""What torch itself asks of an operator: opcheck, one dynamic graph, no copy of what is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import FRONT_ENDS, as_arrays, to_torch
from opspecs import OPSPECS, OpSpec, Sample, clone_args
from torch._dynamo.testing import CompileCounterWithBackend

from ops.parity import check_parity

SPECS = list(OPSPECS.values())


def _op(spec: OpSpec) -> torch._ops.OpOverload:
    return getattr(torch.ops.ngram_npu, spec.name).default


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_opcheck(spec: OpSpec) -> None:
    first = next(spec.samples(np.random.default_rng(5))).args
    for args in (first, *spec.sizes):
        torch.library.opcheck(_op(spec), to_torch(clone_args(args)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_one_graph_serves_every_size(spec: OpSpec) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(_op(spec), fullgraph=True, dynamic=True, backend=counter)

    def call(_: str, args: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        return as_arrays(compiled(*to_torch(args)))

    backend = type(FRONT_ENDS[0])("compiled", call, "auto")
    for i, args in enumerate(spec.sizes):
        check_parity(spec, backend, Sample(f"size-{i}", args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_fake_has_the_real_shapes(spec: OpSpec) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for sample in spec.samples(np.random.default_rng(6)):
        args = to_torch(clone_args(sample.args))
        with FakeTensorMode() as mode:
            faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fakes = _op(spec)(*faked)
        for fake, real in zip(fakes or (), _op(spec)(*args) or (), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), sample.label
            assert fake.stride() == real.stride() or real.numel() == 0, sample.label
