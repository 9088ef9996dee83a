"""The ops that can be measured, by name. A new op is a class here (README.md, "Adding an
operator")."""

import importlib
import pkgutil

from tools.bench.ops.base import OPS, Op

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["OPS", "Op"]
