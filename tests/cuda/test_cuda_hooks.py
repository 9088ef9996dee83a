"""No races, uninitialised shared memory or accesses outside the tensors in any sample of any
operator with a CUDA kernel."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_hooks import HOOKS, watched
from ops.parity import check_parity
from opspecs import OPSPECS, OpSpec

pytestmark = pytest.mark.slow

SPECS = [spec for spec in OPSPECS.values() if HOOKS.device not in spec.no_kernel]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_samples(spec: OpSpec) -> None:
    backend = watched(spec, HOOKS.path)
    with backend.drawing():
        for sample in spec.samples(np.random.default_rng(2026)):
            check_parity(spec, backend, sample)
