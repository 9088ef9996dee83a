"""Workspaces on devices and their twins: every call leaves zeros, and an unusable workspace is
rejected before anything is written. That workspace_size returns enough is shown by test_parity.py,
whose samples have such workspaces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from backends import DEVICE_BACKENDS, TWIN_BACKENDS, Backend
from ngram_npu.ops import workspace_size
from ops.cases import sized
from ops.specs import OPSPECS, Args, Array, OpSpec, clone_args, owner

TAKERS = [op for op, spec in OPSPECS.items() if "workspace" in spec.tensor_names]
LOOKUPS = [b for b in [*TWIN_BACKENDS, *DEVICE_BACKENDS] if b.serves(OPSPECS["ngram_step_"])]
# The NPU's launches allocate their own memory and ignore this one.
USERS = [b for b in LOOKUPS if "cuda" in (b.device, b.twin.device if b.twin else "")]


def _tiles() -> tuple[OpSpec, Args]:
    """A call in which several blocks share a row, so that it needs a workspace."""
    spec = OPSPECS["ngram_step_"]
    samples = spec.samples(np.random.default_rng(1))
    return spec, sized(spec, next(s.args for s in samples if s.label.startswith("tile-edges")))


@pytest.mark.parametrize("backend", LOOKUPS, ids=lambda b: b.name)
def test_one_workspace_serves_call_after_call(backend: Backend) -> None:
    spec, args = _tiles()
    workspace = spec.get(args, "workspace")
    with backend.selected():
        first = backend.call(spec.name, spec.replace(clone_args(args), workspace=workspace))
        for _ in range(3):
            again = backend.call(spec.name, spec.replace(clone_args(args), workspace=workspace))
            assert all(map(np.array_equal, first, again))
            assert not workspace.any()


def _misaligned(workspace: Array) -> Array:
    return np.concatenate([workspace, workspace])[1 : 1 + len(workspace)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], r"expected size >= \d+ \(for this batch\), got size \d+"),
        (lambda w: w[:0], r"got size 0"),
        (_misaligned, r"expected 16-byte alignment, got address % 16 == 4"),
    ],
)
@pytest.mark.parametrize("backend", USERS, ids=lambda b: b.name)
def test_one_that_cannot_be_used_is_refused(
    backend: Backend, change: Callable[[Array], Array], message: str
) -> None:
    spec, args = _tiles()
    args = spec.replace(args, workspace=change)
    before = clone_args(args)
    with (
        backend.selected(),
        pytest.raises(ValueError, match=r"^ngram_step_: workspace: .*" + message),
    ):
        backend.call(spec.name, args)
    for mine, original in zip(args, before, strict=True):
        if isinstance(mine, np.ndarray):
            assert np.array_equal(owner(mine), owner(original))


@pytest.mark.parametrize("backend", LOOKUPS, ids=lambda b: b.name)
def test_one_that_was_not_zeroed_leads_nowhere(backend: Backend) -> None:
    """The results are then unspecified, but the twin would report an access outside the tensors."""
    spec, args = _tiles()
    rng = np.random.default_rng(5)
    for fill in (-1, 2**31 - 1, 1, None):
        dirty = spec.get(args, "workspace").copy()
        dirty[:] = rng.integers(-(2**31), 2**31, len(dirty)) if fill is None else fill
        with backend.selected():
            backend.call(spec.name, spec.replace(clone_args(args), workspace=dirty))


@pytest.mark.parametrize("backend", USERS, ids=lambda b: b.name)
def test_requests_with_one_row_leave_it_zeroed(backend: Backend) -> None:
    """Their blocks may see the row's length change. Their drafts are unspecified."""
    spec, args = _tiles()
    batch = len(spec.get(args, "sampled_token_ids"))
    args = spec.replace(args, row_indices=np.zeros(batch, np.int64))
    with backend.selected(races_allowed=True):
        for _ in range(5):
            mine = clone_args(args)
            backend.call(spec.name, mine)
            assert not spec.get(mine, "workspace").any()


def test_sizes() -> None:
    for op in TAKERS:
        sizes = [workspace_size(op, batch) for batch in (0, 1, 2, 1000)]
        assert sizes == sorted(sizes)
        assert sizes[1] > 0


@pytest.mark.parametrize(
    ("op", "batch", "message"),
    [
        ("prepare_inputs", 3, "workspace_size: op: expected an operator with .*'prepare_inputs'"),
        ("ngram_step_", -1, "workspace_size: batch: expected >= 0, got -1"),
    ],
)
def test_a_size_nobody_can_tell(op: str, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workspace_size(op, batch)
