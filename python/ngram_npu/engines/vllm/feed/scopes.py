"""Scopes of text that engines exchange, which all of them must compute alike.

A KV event contains the name of a LoRA adapter and the ``cache_salt`` of its request, but not
``extra_args``. The scope that a request names there is therefore folded into its salt when vLLM
admits the request. The scope in the store depends only on the adapter's name and on that salt: the
integer id of an adapter differs between engines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator

from ngram_npu.store.identifiers import Scope, scope_of, scope_of_bytes

_FOLDED = "ngram_npu_scope:"
"""Prefix of a salt that contains a scope."""


def fold_scope(name: str | int | None, salt: str | None) -> str | None:
    """Returns the ``cache_salt`` of a request that names a scope. Without a scope, it is the
    request's own salt. Equal results have equal arguments, except that an empty salt, which vLLM
    ignores, is none."""
    salt = salt or None
    if name is None and not is_folded(salt):
        return salt
    # Integers of NumPy are scopes, too.
    name = name if name is None or isinstance(name, str) else operator.index(name)
    return _FOLDED + json.dumps([name, salt])


def is_folded(salt: str | None) -> bool:
    return salt is not None and salt.startswith(_FOLDED)


def compute_scope(adapter_name: str | None, salt: str | None) -> Scope:
    """Returns the store's scope of a request with a LoRA adapter of this name and with this salt.

    Without both, the scope is 0. With only a scope that :func:`fold_scope` folded into the salt, it
    is ``scope_of`` of that scope, as in an engine without a feed, so that files of the store remain
    valid. Never raises: a publisher may send any salt.
    """
    return _compute_scope(adapter_name, salt or None)


@functools.lru_cache(maxsize=4096)
def _compute_scope(adapter_name: str | None, salt: str | None) -> Scope:
    if adapter_name is None:
        if salt is None:
            return Scope(0)
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            name, own_salt = json.loads(salt.removeprefix(_FOLDED))
            if own_salt is None and fold_scope(name, None) == salt:
                return scope_of(name)
    owner = b""
    for part in (adapter_name, salt):
        raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
        # With the length, two pairs cannot have the same bytes. None differs from an empty name.
        owner += (0 if part is None else len(raw) + 1).to_bytes(8, "little") + raw
    return scope_of_bytes(owner)
