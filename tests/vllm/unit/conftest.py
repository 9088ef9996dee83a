from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from ngram_npu.vllm import engines


@pytest.fixture(autouse=True)
def _indexed_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the index would never be used: tests have few tokens."""
    monkeypatch.setattr(engines, "SCANNED_TOKENS", -1)


@pytest.fixture(autouse=True, scope="module")
def _end_engines() -> Iterator[None]:
    """A module's engines log their counts when they end, not during another module's test."""
    yield
    gc.collect()
