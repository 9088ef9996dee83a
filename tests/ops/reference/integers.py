"""The integers of the kernels: fixed width, wrapping; and arrays of them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


def wrap32(value: int) -> int:
    """The int32 that two's complement arithmetic leaves of ``value``."""
    return (value + 2**31) % 2**32 - 2**31
