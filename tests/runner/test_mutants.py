"""A runner that uses the state wrongly writes a different text."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from runner import worlds
from runner.mutants import MUTANTS

COUNT = 14


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    found = worlds.texts(model, COUNT)
    assert found == worlds.texts(model, COUNT, ngram=None, asynchronous=False)
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_noticed(model: Any, plain: list[list[int]], name: str) -> None:
    with MUTANTS[name]():
        assert worlds.texts(model, COUNT) != plain
