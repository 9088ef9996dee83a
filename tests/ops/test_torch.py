"""torch's requirements of an operator: opcheck, one dynamic graph, no copy of written tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from backends import FRONT_ENDS, as_arrays, to_torch
from hypothesis import strategies as st
from ngram_npu import _C
from on_device import torch_op
from ops.parity import as_tuple, check_parity, compare
from ops.specs import OPSPECS, Args, OpSpec, Sample, clone_args
from ops.specs import spec as spec_module
from ops.specs.rows import random_rows
from torch._dynamo.testing import CompileCounterWithBackend

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

    def seen(args: Args) -> tuple[object, ...]:
        """What a fake sees of a call: many samples differ in their contents only."""
        return tuple(
            (a.shape, a.strides, a.dtype) if isinstance(a, np.ndarray) else a for a in args
        )

    samples = list(spec.samples(np.random.default_rng(6)))
    for sample in {seen(sample.args): sample for sample in samples}.values():
        args = to_torch(clone_args(sample.args))
        with FakeTensorMode() as mode:
            faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fakes = as_tuple(torch_op(spec.name)(*faked))
        for fake, real in zip(fakes, as_tuple(torch_op(spec.name)(*args)), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), sample.label
            assert fake.stride() == real.stride() or real.numel() == 0, sample.label


NOT_LEFT_OUT = {"prepare_next_token_ids": "backup_token_ids", "ngram_propose_": "row_indices"}
"""What a call needs although it has a default: a source of backups, as many rows as drafts."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_defaults_and_keywords_are_those_of_the_schema(spec: OpSpec) -> None:
    """Arguments may be left out in torch, in a graph, and in numpy; in torch only the first few may
    be passed by position."""
    args = next(spec.samples(np.random.default_rng(8))).args
    defaults = {
        a.name: a.default_value for a in _op(spec)._schema.arguments if a.has_default_value()
    }
    if needed := NOT_LEFT_OUT.get(spec.name):
        args = spec.sample_with(needed).args
        del defaults[needed]
    whole = spec.replace(clone_args(args), **defaults)
    expected_args = clone_args(whole)
    expected = as_arrays(spec.reference(*expected_args))

    def left_out(values: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        positional, keywords = spec.split(values)
        given = {n: v for n, v in keywords.items() if n not in defaults}
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


def test_an_operator_with_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests above, of one that is made for this."""
    name = "one_output"
    (tmp_path / f"{name}.md").write_text(f"{name}(Tensor tokens, *, SymInt by=1) -> Tensor\n")
    monkeypatch.setattr(spec_module, "OPERATOR_DOCUMENTS", tmp_path)
    sizes = tuple((np.arange(n, dtype=np.int32), n + 1) for n in (3, 5, 7))
    spec = OpSpec(
        name, lambda tokens, by: (tokens + by,),
        lambda rng: (Sample(f"{len(args[0])}", args) for args in sizes),
        st.sampled_from(sizes), (), sizes,
    )  # fmt: skip
    monkeypatch.setitem(OPSPECS, name, spec)
    monkeypatch.setattr(_C, name, lambda tokens, by=1: tokens + np.int32(by), raising=False)
    library = torch.library.Library("ngram_npu", "FRAGMENT")
    try:
        library.define(spec.schema)
        library.impl(name, lambda tokens, by=1: tokens + by, "CPU")
        torch.library.register_fake(
            f"ngram_npu::{name}", lambda tokens, by=1: torch.empty_like(tokens), lib=library
        )
        for test in (
            test_opcheck,
            test_one_graph_serves_every_size,
            test_fake_has_the_real_shapes,
            test_defaults_and_keywords_are_those_of_the_schema,
        ):
            test(spec)
    finally:
        library._destroy()


def test_ngram_propose_under_vmap() -> None:
    rows = torch.from_numpy(random_rows(np.random.default_rng(1), 20, 60, 3)).reshape(4, 5, 60)
    lengths = torch.arange(40, 60, dtype=torch.int32).reshape(4, 5)
    propose = partial(torch.ops.ngram_npu.ngram_propose, min_n=1, max_n=4, k=3)
    alone = [propose(*pair) for pair in zip(rows, lengths, strict=True)]
    for i, found in enumerate(torch.vmap(propose)(rows, lengths)):
        assert torch.equal(found, torch.stack([results[i] for results in alone]))
