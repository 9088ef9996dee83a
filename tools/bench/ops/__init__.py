"""Imports all modules with ops. tools/bench/README.md describes how to add one."""

import importlib
import pkgutil

from tools.bench.ops.base import OPS, Op

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["OPS", "Op"]
