"""Tests torch's requirements: opcheck, fake tensors, one graph for all sizes, defaults, vmap."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from backends import Backend, as_arrays, to_torch
from ngram_npu import _C, ops
from on_device import torch_op
from ops.parity import as_tuple, check_parity, check_results
from ops.specs import OPSPECS, Args, OpSpec, Sample, clone_args
from ops.specs.inputs import draw_rows
from torch._dynamo.testing import CompileCounterWithBackend

SPECS = list(OPSPECS.values())
SPECS_WITH_RESULTS = [spec for spec in SPECS if not spec.schema.endswith("-> ()")]


def _get_op(spec: OpSpec) -> torch._ops.OpOverload:
    return getattr(torch.ops.ngram_npu, spec.name).default


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_operator_passes_opcheck(spec: OpSpec) -> None:
    for args in (spec.sample().args, spec.sizes[0]):
        torch.library.opcheck(_get_op(spec), *spec.split(to_torch(clone_args(args))))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_one_graph_is_compiled_for_all_sizes(spec: OpSpec) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(_get_op(spec), fullgraph=True, dynamic=True, backend=counter)

    def call(_: str, args: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        positional, keywords = spec.split(to_torch(args))
        return as_arrays(compiled(*positional, **keywords))

    backend = Backend("compiled", call)
    for i, args in enumerate(spec.sizes):
        check_parity(spec, backend, Sample(f"size-{i}", args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", SPECS_WITH_RESULTS, ids=lambda s: s.name)
def test_fake_result_has_shapes_and_strides_of_real_result(spec: OpSpec) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def get_metadata(args: Args) -> tuple[object, ...]:
        """Returns what a fake depends on. Many samples differ only in their contents."""
        return tuple(
            (a.shape, a.strides, a.dtype) if isinstance(a, np.ndarray) else a for a in args
        )

    for sample in {get_metadata(sample.args): sample for sample in spec.samples}.values():
        args = to_torch(clone_args(sample.args))
        with FakeTensorMode() as mode:
            fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fakes = as_tuple(torch_op(spec.name)(*fake_args))
        for fake, real in zip(fakes, as_tuple(torch_op(spec.name)(*args)), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), sample.label
            assert fake.stride() == real.stride() or real.numel() == 0, sample.label


REQUIRED_NAMES = {"prepare_next_token_ids": "backup_token_ids", "ngram_propose_": "row_indices"}
"""Arguments that have a default value, but without which the samples are invalid."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_arguments_with_defaults_may_be_omitted(spec: OpSpec) -> None:
    """Tests torch, its wrapper in `ops`, a compiled graph, and numpy. In torch, arguments after
    `*` are keyword-only."""
    args = spec.sample().args
    defaults = {
        a.name: a.default_value for a in _get_op(spec)._schema.arguments if a.has_default_value()
    }
    if required_name := REQUIRED_NAMES.get(spec.name):
        args = spec.sample_with(required_name).args
        del defaults[required_name]
    all_args = spec.replace(clone_args(args), **defaults)
    expected_args = clone_args(all_args)
    expected = as_arrays(spec.reference(*expected_args))
    sample = Sample("defaults", all_args)
    torch._dynamo.reset()
    for function, convert in (
        (_get_op(spec), to_torch),
        (getattr(ops, spec.name), to_torch),
        (torch.compile(_get_op(spec), fullgraph=True, backend="aot_eager"), to_torch),
        (getattr(_C, spec.name), lambda values: values),
    ):
        got_args = clone_args(all_args)
        positional, keywords = spec.split(convert(got_args))
        keywords = {name: value for name, value in keywords.items() if name not in defaults}
        got = as_arrays(function(*positional, **keywords))
        check_results(spec, sample, got, got_args, expected, expected_args)
    if spec.num_positional < len(spec.arguments):
        with pytest.raises(RuntimeError, match="positional argument"):
            getattr(torch.ops.ngram_npu, spec.name)(*to_torch(clone_args(all_args)))


def test_ngram_propose_supports_vmap() -> None:
    rows = torch.from_numpy(draw_rows(np.random.default_rng(1), 20, 60, 3)).reshape(4, 5, 60)
    lengths = torch.arange(40, 60, dtype=torch.int32).reshape(4, 5)
    propose = partial(torch.ops.ngram_npu.ngram_propose, min_n=1, max_n=4, k=3)
    unbatched = [propose(*pair) for pair in zip(rows, lengths, strict=True)]
    for i, batched in enumerate(torch.vmap(propose)(rows, lengths)):
        assert torch.equal(batched, torch.stack([results[i] for results in unbatched]))
