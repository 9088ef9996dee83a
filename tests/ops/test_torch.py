"""torch's requirements of an operator: opcheck, one dynamic graph, no copy of written tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import FRONT_ENDS, as_arrays, to_torch
from ngram_npu import _C
from on_device import torch_op
from opspecs import OPSPECS, OpSpec, Sample, clone_args
from torch._dynamo.testing import CompileCounterWithBackend

from ops.parity import check_parity, compare

SPECS = list(OPSPECS.values())


def _op(spec: OpSpec) -> torch._ops.OpOverload:
    return getattr(torch.ops.ngram_npu, spec.name).default


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_opcheck(spec: OpSpec) -> None:
    first = next(spec.samples(np.random.default_rng(5))).args
    for args in (first, *spec.sizes):
        torch.library.opcheck(_op(spec), *spec.split(to_torch(clone_args(args))))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_one_graph_serves_every_size(spec: OpSpec) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(_op(spec), fullgraph=True, dynamic=True, backend=counter)

    def call(_: str, args: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        positional, keywords = spec.split(to_torch(args))
        return as_arrays(compiled(*positional, **keywords))

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
            fakes = torch_op(spec.name)(*faked)
        for fake, real in zip(fakes or (), torch_op(spec.name)(*args) or (), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), sample.label
            assert fake.stride() == real.stride() or real.numel() == 0, sample.label


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_defaults_and_keywords_are_those_of_the_schema(spec: OpSpec) -> None:
    """Arguments may be left out in torch, in a graph, and in numpy; in torch only the first few may
    be passed by position."""
    args = next(spec.samples(np.random.default_rng(8))).args
    defaults = {
        a.name: a.default_value for a in _op(spec)._schema.arguments if a.has_default_value()
    }
    whole = spec.replace(clone_args(args), **defaults)
    if spec.name == "prepare_next_token_ids":  # wants one source of backups
        whole = spec.replace(whole, backup_token_ids=np.zeros(len(args[0]), np.int32))
    expected_args = clone_args(whole)
    expected = as_arrays(spec.reference(*expected_args))

    def left_out(values: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        positional, keywords = spec.split(values)
        given = {n: v for n, v in keywords.items() if n not in defaults or n == "backup_token_ids"}
        return positional, given

    sample = Sample("defaults", whole)
    torch._dynamo.reset()
    for function, convert in (
        (_op(spec), to_torch),
        (torch.compile(_op(spec), fullgraph=True, backend="aot_eager"), to_torch),
        (getattr(_C, spec.name), lambda values: values),
    ):
        mine = clone_args(whole)
        positional, keywords = left_out(convert(mine))
        got = as_arrays(function(*positional, **keywords))
        compare(spec, sample, got, mine, expected, expected_args)
    if spec.num_positional < len(spec.arguments):
        with pytest.raises(RuntimeError, match="positional argument"):
            getattr(torch.ops.ngram_npu, spec.name)(*to_torch(clone_args(whole)))
