"""A stand-in for hypothesis on GPU machines that lack it. Property tests are skipped with a reason,
and all other tests run. It never replaces an installed hypothesis."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything:
    """A strategy, a setting or a profile; every attribute and call gives another one."""

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
