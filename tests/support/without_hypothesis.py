"""A stand-in for hypothesis, for GPU machines that lack it: what is drawn is skipped and says so,
everything else of the suite runs. Never in place of one that is there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything:
    """A strategy, a setting, a profile: whatever is done with it gives another."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self

    def __iter__(self) -> Any:
        return iter(())


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # others ask whether it is installed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


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
    hypothesis, strategies = _Module("hypothesis"), _Module("hypothesis.strategies")
    hypothesis.given = _given  # type: ignore[attr-defined]
    hypothesis.strategies = strategies  # type: ignore[attr-defined]
    modules["hypothesis"], modules["hypothesis.strategies"] = hypothesis, strategies
