"""The integers of the kernels: fixed width, wrapping."""

from __future__ import annotations


def wrap32(value: int) -> int:
    """The int32 that two's complement arithmetic leaves of ``value``."""
    return (value + 2**31) % 2**32 - 2**31
