"""The one place that says whether the GPU was tested."""

from __future__ import annotations

import os

import pytest
import torch
from ngram_npu import _library
from opspecs import OPSPECS

from gpu.replay import HAS_GPU, NO_GPU

REQUIRED = os.environ.get("NGRAM_NPU_REQUIRE_GPU") == "1"


def test_a_gpu_takes_part() -> None:
    """Skipped without a GPU, once, for all that was not tested; `make gpu` sets
    NGRAM_NPU_REQUIRE_GPU=1 and has it fail instead."""
    if not HAS_GPU and not REQUIRED:
        pytest.skip(NO_GPU)
    assert torch.cuda.is_available()
    for spec in OPSPECS.values():
        assert "cuda" not in spec.no_kernel, f"{spec.name}: {spec.no_kernel['cuda']}"
        assert _library.has_kernel(spec.name, "cuda"), _library.backends()["cuda"]
