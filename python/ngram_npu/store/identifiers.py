"""Identifiers in a store and its files: scopes of requests, and digests of vocabularies."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping

_FIRST_NAMED_SCOPE = 1 << 62
_DIGEST_BYTES = 16


class Scope(int):
    """An integer from :func:`scope_of`. ``scope_of`` returns a ``Scope`` unchanged."""


def scope_of(name: str | int | None) -> Scope:
    """Returns a scope as an integer, for the operators' argument ``scopes`` [B].

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
        return scope_of_bytes(name.encode("utf-8", "surrogatepass"))
    if isinstance(name, bool) or not hasattr(name, "__index__"):
        raise TypeError(f"scope_of: name: expected str, int or None, got {name!r}")
    number = operator.index(name)
    if not 0 <= number < _FIRST_NAMED_SCOPE:
        raise ValueError(f"scope_of: name: expected 0 to 2**62 - 1, got {number}")
    return Scope(number)


def scope_of_bytes(name: bytes) -> Scope:
    """Returns a number above those that ``scope_of`` leaves to integers: 62 bits of the BLAKE2b
    hash of a name."""
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return Scope(_FIRST_NAMED_SCOPE + int.from_bytes(digest, "little") % _FIRST_NAMED_SCOPE)


def tokenizer_digest(vocab: Mapping[str, int]) -> str:
    """Returns 32 hexadecimal digits that identify a tokenizer's vocabulary, so that token ids in a
    file are not read with another tokenizer: BLAKE2b of the pairs of id and token, ordered by id,
    including added tokens.

    The digest is the same for a ``tokenizers.Tokenizer``, for a slow or a fast tokenizer of
    transformers and for vLLM's, which all have ``get_vocab()``, if they have the same tokens. It
    does not cover merges, normalizer, pre-tokenizer, chat template, or which tokens are special.
    With an equal digest, token ids mean the same text, but the same text may be split differently.
    This costs accepted drafts and has no other effect.

    Args:
        vocab: token to id, as returned by ``get_vocab()``.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for number, token in sorted((number, token) for token, number in vocab.items()):
        raw = token.encode("utf-8", "surrogatepass")
        # The length makes the concatenation of all tokens unambiguous.
        digest.update(number.to_bytes(8, "little") + len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
