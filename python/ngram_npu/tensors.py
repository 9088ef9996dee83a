"""Chooses between torch's and numpy's operators by the type of an argument."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu import _library

Int32Array = npt.NDArray[np.int32]

_MISSING_OPERATORS_REASON = _library.explain_missing_operators()


def operators_for(op: str, /, **arguments: Any) -> Any:
    """Returns torch's operators if the first argument is a tensor, otherwise numpy's operators,
    which check themselves that all arguments are arrays.

    Raises:
        ValueError: the first argument is a tensor, and another argument is not. torch's own message
            would have many lines.
        RuntimeError: the first argument is a tensor and the torch operators are not registered.
    """
    first = next(iter(arguments))
    if not is_tensor(arguments[first]):
        return _C
    if _MISSING_OPERATORS_REASON:
        raise RuntimeError(f"torch.ops.ngram_npu is not available: {_MISSING_OPERATORS_REASON}")
    for name, value in arguments.items():
        if value is not None and not is_tensor(value):
            raise ValueError(
                f"{op}: {name}: expected a torch.Tensor as {first}, got {type(value).__name__}"
            )
    return sys.modules["torch"].ops.ngram_npu


def is_tensor(value: object) -> bool:
    """Returns whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
