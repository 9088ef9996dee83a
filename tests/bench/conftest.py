"""What the harness's tests share."""

from __future__ import annotations

import pytest

from tools.bench.options import UnavailableError
from tools.bench.vllm_peer import load


@pytest.fixture
def vllm() -> None:
    """Skips where there is no vLLM to compare with."""
    try:
        load(None)
    except UnavailableError as error:
        pytest.skip(str(error))


def needs_tokenizer(kind: str) -> None:
    """Skips a test on text where the tokenizer's packages are not installed."""
    if kind == "text":
        pytest.importorskip("mistral_common")
        pytest.importorskip("sentencepiece")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of data, given by the test."""
    given = str(request.param)
    needs_tokenizer(given)
    return given
