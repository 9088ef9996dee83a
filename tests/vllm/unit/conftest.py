from __future__ import annotations

import pytest
from ngram_npu.vllm import engines


@pytest.fixture(autouse=True)
def _indexed_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the index would never be asked: tests have few tokens."""
    monkeypatch.setattr(engines, "SCANNED_TOKENS", -1)
