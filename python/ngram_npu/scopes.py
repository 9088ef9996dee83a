"""Scopes of the store that requests share, as integers."""

from __future__ import annotations

import hashlib
import operator

_NAMED_SCOPES = 1 << 62


class Scope(int):
    """A result of :func:`scope_of`, which it keeps as it is."""


def scope_of(name: str | int | None) -> Scope:
    """A scope as an integer, for the operators' argument ``scopes`` [B].

    An integer from 0 to 2**62 - 1 is kept, None becomes 0. A string becomes 2**62 plus 62 bits of
    its BLAKE2b hash: never equal to an integer, and equal to another string only by chance.

    Raises:
        TypeError: another type.
        ValueError: an integer out of range.
    """
    if isinstance(name, Scope):
        return name
    if name is None:
        return Scope(0)
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return Scope(_NAMED_SCOPES | int.from_bytes(digest, "little") & (_NAMED_SCOPES - 1))
    if isinstance(name, bool) or not hasattr(name, "__index__"):
        raise TypeError(f"scope_of: name: expected str, int or None, got {name!r}")
    number = operator.index(name)
    if not 0 <= number < _NAMED_SCOPES:
        raise ValueError(f"scope_of: name: expected 0 to 2**62 - 1, got {number}")
    return Scope(number)
