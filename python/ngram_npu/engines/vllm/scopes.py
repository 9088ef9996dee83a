"""Scopes of requests in a store.

Engines that exchange text must compute scopes alike. A KV event contains the name of a LoRA adapter
and the ``cache_salt`` of its request, but not ``extra_args``. The scope that a request names there
is therefore folded into its salt when vLLM admits the request. The scope in the store depends only
on the adapter's name and on that salt: the integer id of an adapter differs between engines.
"""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any

from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from ngram_npu.store import SHARED_SCOPE, Scope, scope_of

_FOLDED = "ngram_npu_scope:"
"""Prefix of a salt that contains a scope."""


def find_scope(
    lora_request: Any, sampling_params: Any, cache_salt: str | None, *, is_exchanged: bool
) -> Scope:
    """Returns a scope that differs for each LoRA adapter, salt and scope in ``extra_args``. Never
    raises, because that would end the engine.

    Args:
        is_exchanged: Whether engines exchange text. The salt then contains the scope of
            ``extra_args`` since the request was admitted.
    """
    name = (getattr(sampling_params, "extra_args", None) or {}).get(EXTRA_ARGUMENT)
    if is_exchanged:
        # A request that was admitted elsewhere, or whose salt vLLM does not pass on.
        salt = cache_salt if is_folded(cache_salt) else fold_scope(name, cache_salt)
        return compute_scope(lora_request and lora_request.lora_name, salt)
    if lora_request is None and not cache_salt and isinstance(name, (str, type(None))):
        return scope_of(name)
    adapter = lora_request and (lora_request.lora_int_id, lora_request.lora_name)
    # Other types than str are rejected where vLLM admits a request.
    return scope_of((adapter, name if isinstance(name, str) else repr(name), cache_salt or None))


def fold_scope(name: str | None, salt: str | None) -> str | None:
    """Returns the ``cache_salt`` of a request that names a scope. Without a scope, it is the
    request's own salt. Equal results have equal arguments, except that an empty salt, which vLLM
    ignores, is none."""
    salt = salt or None
    if name is None and not is_folded(salt):
        return salt
    return _FOLDED + json.dumps([name, salt], default=repr)


def is_folded(salt: str | None) -> bool:
    return salt is not None and salt.startswith(_FOLDED)


@functools.lru_cache(maxsize=4096)
def compute_scope(adapter_name: str | None, salt: str | None) -> Scope:
    """Returns the store's scope of a request with a LoRA adapter of this name and with this salt.

    Without both, the scope is shared. With only a scope that :func:`fold_scope` folded into the
    salt, it is ``scope_of`` of that scope, as in an engine without a feed, so that files of the
    store remain valid. Never raises: a publisher may send any salt.
    """
    if adapter_name is None and not salt:
        return SHARED_SCOPE
    if adapter_name is None and is_folded(salt):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            name, own_salt = json.loads(str(salt).removeprefix(_FOLDED))
            if own_salt is None and isinstance(name, str) and fold_scope(name, None) == salt:
                return scope_of(name)
    return scope_of(("exchanged", adapter_name, salt or None))
