"""Modules that only an extra of the package brings."""

from __future__ import annotations

import importlib
from typing import Any

from ngram_npu.replay.errors import ReplayError

__all__ = ["optional"]


def optional(module: str, option: str, extra: str) -> Any:
    """Import what an option of the command needs.

    Raises:
        ReplayError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ReplayError(
            f'{option} needs {package}: pip install {package} (the extra "{extra}")'
        ) from error
