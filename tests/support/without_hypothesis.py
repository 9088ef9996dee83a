"""A stand-in for hypothesis on GPU machines that lack it. Property tests are skipped with a reason,
and all other tests run. It never replaces an installed hypothesis."""

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
        def skipped() -> None:
            pytest.skip("hypothesis is not installed: nothing is drawn")

        return skipped

    return decorate


def install_where_missing() -> None:
    if "hypothesis" not in sys.modules and importlib.util.find_spec("hypothesis") is None:
        install()


def install(modules: dict[str, ModuleType] = sys.modules) -> None:
    """Makes `import hypothesis` and `from hypothesis import strategies` work."""
    hypothesis = MagicMock(given=_given)
    hypothesis.__spec__ = ModuleSpec("hypothesis", None)  # others ask whether it is installed
    modules["hypothesis"], modules["hypothesis.strategies"] = hypothesis, hypothesis.strategies
