"""SGLang's own modules on a machine without a GPU. Two packages that its imports ask for, and that
nothing here calls, are replaced: its compiled kernels, and torchvision."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REPLACED = ("sgl_kernel", "torchvision")


class _Anything(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything("", (), {}), name)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in REPLACED:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def worker_module() -> Any:
    """SGLang's module of the worker of NGRAM."""
    importlib.import_module("transformers.image_processing_utils_fast")  # knows no torchvision
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    return importlib.import_module("sglang.srt.speculative.ngram_worker")
