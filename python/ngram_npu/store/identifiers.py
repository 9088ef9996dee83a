"""Identifiers in a store and its files: scopes of requests, and digests of vocabularies."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

_DIGEST_BYTES = 16


class Scope(int):
    """The number of a scope, as in the operators' argument ``scopes`` [B]. :func:`scope_of`
    returns a ``Scope`` unchanged."""


SHARED_SCOPE = Scope(0)
"""The scope of requests without a name, which share text."""
PRIVATE_SCOPE = Scope(-1)
"""The reserved scope of requests that share with nobody: their text is not stored, and nothing is
drafted for them from a store."""


def scope_of(name: str | tuple[Any, ...] | Scope | None) -> Scope:
    """Returns the number of a scope.

    Args:
        name: a string or a tuple of strings, bytes, integers and None, such as
            ``("tenant", 7)``. Names of different types or lengths are different names.
            None: the scope that all requests without a name share.

    Returns:
        0 for None. For a name, 63 bits of its BLAKE2b hash: 1 to 2**63 - 1, equal to the number of
        another name only by chance.

    Raises:
        TypeError: another type, also an integer: pass the number of a scope as ``Scope(number)``.
    """
    if isinstance(name, Scope):
        return name
    if name is None:
        return SHARED_SCOPE
    if not isinstance(name, (str, tuple)):
        raise TypeError(f"scope_of: name: expected str, tuple, Scope or None, got {name!r}")
    digest = hashlib.blake2b(_encode(name), digest_size=8).digest()
    return Scope(1 + int.from_bytes(digest, "little") % (2**63 - 1))


def scope_of_request(cache_salt: str | None, adapter: str | None = None) -> Scope:
    """Returns the scope of vLLM's requests with this ``cache_salt`` and this LoRA adapter.

    vLLM's prefix cache separates requests by the same two values. Engines that exchange text and
    the files of ``ngram-npu learn`` use the same scopes.

    Args:
        cache_salt: An empty salt is none, as in vLLM.
        adapter: The adapter's name. Its integer id differs between engines.

    Returns:
        :data:`SHARED_SCOPE` without a salt and an adapter, otherwise a scope that differs from that
        of any other salt or adapter, except by chance.

    Raises:
        TypeError: Another type.
    """
    for name, value in (("cache_salt", cache_salt), ("adapter", adapter)):
        if not isinstance(value, (str, type(None))):
            raise TypeError(f"scope_of_request: {name}: expected str or None, got {value!r}")
    if not cache_salt and adapter is None:
        return SHARED_SCOPE
    return _compute_request_scope(cache_salt or None, adapter)


@functools.lru_cache(maxsize=4096)
def _compute_request_scope(cache_salt: str | None, adapter: str | None) -> Scope:
    return scope_of(("vLLM request", cache_salt, adapter))


def _encode(value: Any) -> bytes:
    """Encodes a value with its type and its length, so that no two values have the same bytes."""
    if isinstance(value, tuple):
        tag, raw = b"t", b"".join(map(_encode, value))
    elif isinstance(value, str):
        tag, raw = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        tag, raw = b"b", value
    elif value is None:
        tag, raw = b"n", b""
    elif isinstance(value, int) and not isinstance(value, bool):
        tag, raw = b"i", str(int(value)).encode()
    else:
        raise TypeError(
            f"scope_of: name: expected a tuple of str, bytes, int and None, got {value!r} in it"
        )
    return tag + len(raw).to_bytes(8, "little") + raw


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
