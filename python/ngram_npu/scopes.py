"""Scopes of the store that requests share, as integers."""

from __future__ import annotations

import hashlib
import operator

_NAMED_SCOPES = 1 << 62


def scope_of(name: str | int | None) -> int:
    """A scope as an integer, for the operators' argument ``scopes`` [B].

    An integer from 0 to 2**62 - 1 is kept, None becomes 0. A string becomes 2**62 plus 62 bits of
    its BLAKE2b hash: never equal to an integer, and equal to another string only by chance.

    Raises:
        TypeError: another type.
        ValueError: an integer out of range.
    """
    if name is None:
        return 0
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return _NAMED_SCOPES | int.from_bytes(digest, "little") & (_NAMED_SCOPES - 1)
    if isinstance(name, bool) or not hasattr(name, "__index__"):
        raise TypeError(f"scope_of: name: expected str, int or None, got {name!r}")
    number = operator.index(name)
    if not 0 <= number < _NAMED_SCOPES:
        raise ValueError(f"scope_of: name: expected 0 to 2**62 - 1, got {number}")
    return number
