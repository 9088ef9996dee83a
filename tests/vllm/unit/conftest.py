from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from ngram_npu.vllm import engines


@pytest.fixture(autouse=True)
def _indexed_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the index would never be asked: tests have few tokens."""
    monkeypatch.setattr(engines, "SCANNED_TOKENS", -1)


@pytest.fixture(autouse=True, scope="module")
def _end_engines() -> Iterator[None]:
    """What a module's engines counted is logged when they end, and not in another module's test."""
    yield
    gc.collect()
