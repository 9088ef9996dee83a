"""Runs single files of vLLM in place, with stand-ins for the modules that they import.

Nothing of theirs is copied: the measured functions are the file's own. Imports that these functions
never need are replaced by names that can be called, subclassed and used as decorators.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Given = Mapping[str, Mapping[str, Any]]
"""Module -> the names in it that need real definitions."""


def run_file(file: Path, name: str, given: Given) -> ModuleType:
    """Executes ``file`` as a module called ``name``, with ``vllm`` made of stand-ins.

    Exceptions of the file propagate. The module stays importable by its name: torch.compile
    looks functions up by their module.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _stand_ins(given):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Names(type):
    """Makes a class's attributes, such as ``tl.constexpr``, stand-ins themselves."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _made(name)


class _Name(metaclass=_Names):
    """Works for any use of the name: as a base class, generic or not; as an object; as a decorator,
    with or without arguments, that returns the decorated object unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, decorated: Any = None, *args: Any, **kwargs: Any) -> Any:
        return decorated


def _made(name: str) -> type:
    return _Names(name, (_Name,), {})


class _StandIn(ModuleType):
    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package: its submodules are stand-ins as well
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...], given: Given) -> None:
        self._roots = roots
        self._given = given

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self._given.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _stand_ins(given: Given) -> Iterator[None]:
    """Within the block ``vllm`` (and ``torch`` if not installed) imports as stand-ins."""
    roots = ("vllm",) if importlib.util.find_spec("torch") else ("vllm", "torch")
    hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"}
    for name in hidden:
        del sys.modules[name]
    finder = _Finder(roots, given)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in roots]:
            del sys.modules[name]
        sys.modules.update(hidden)
