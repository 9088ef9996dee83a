"""Checks that the sanitizer run of the parity suite really uses sanitized kernels."""

from __future__ import annotations

import os

import ngram_npu
import pytest

WANTED = os.environ.get("NGRAM_NPU_EXPECT_VERSION")


@pytest.mark.skipif(WANTED is None, reason="only in the sanitizer run of the Makefile")
def test_these_are_the_sanitized_kernels() -> None:
    assert ngram_npu.__version__ == WANTED
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libasan" in loaded
    assert "libubsan" in loaded
