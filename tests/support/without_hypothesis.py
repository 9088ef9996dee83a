"""A replacement of hypothesis for GPU machines without it: property tests are skipped with a
reason, all other tests run. It never replaces an installed hypothesis."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest


def _given(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    def decorate(_test: Callable[..., Any]) -> Callable[[], None]:
        return lambda: pytest.skip("hypothesis is not installed")

    return decorate


def install_where_missing() -> None:
    if "hypothesis" not in sys.modules and importlib.util.find_spec("hypothesis") is None:
        install(sys.modules)


def install(modules: dict[str, ModuleType]) -> None:
    """Makes `import hypothesis` and `from hypothesis import strategies` work."""
    hypothesis = MagicMock(given=_given)
    hypothesis.__spec__ = ModuleSpec("hypothesis", None)  # for importlib.util.find_spec
    modules["hypothesis"], modules["hypothesis.strategies"] = hypothesis, hypothesis.strategies
