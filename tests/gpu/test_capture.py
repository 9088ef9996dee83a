"""Every operator under CUDA graph capture: replays on other values, without allocating."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import call_torch
from on_device import OnDevice, torch_op
from ops.parity import MismatchError, as_arrays, compare
from opspecs import OPSPECS, Args, OpSpec, Sample, clone_args

from gpu.replay import DEVICES, Replay, num_allocations, synchronize, times

# An index's own memory is tested with the index (test_steps.py): what it holds decides the result.
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


def assign(target: Args, source: Args) -> None:
    for mine, theirs in zip(target, source, strict=True):
        if isinstance(mine, np.ndarray):
            mine[...] = theirs


def check_replays(spec: OpSpec, device: str, args: Args, count: int, **changed: object) -> None:
    """`count` replays of the operator, each on other values, against the CPU."""
    rng = np.random.default_rng(17)
    mine = clone_args(args)
    there = OnDevice(mine, device)
    function = changed.get("function", torch_op(spec.name))
    replay = Replay(device, lambda: function(*there.args))
    for number in range(count):
        values = reordered(spec, args, rng)
        assign(mine, values)
        there.refresh()
        synchronize(device)
        before = num_allocations(device)
        results = replay()
        synchronize(device)
        assert num_allocations(device) == before
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
