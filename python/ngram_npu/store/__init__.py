"""The store: bounded memory of text that requests share and draft from (docs/design/store.md)."""

from ngram_npu.store.contents import BLOCK_TOKENS
from ngram_npu.store.file import StoreFileError
from ngram_npu.store.identifiers import (
    PRIVATE_SCOPE,
    SHARED_SCOPE,
    Scope,
    scope_of,
    scope_of_request,
    tokenizer_digest,
)
from ngram_npu.store.store import DEFAULT_TOKENS, NgramStore, StoreStatistics

__all__ = [
    "BLOCK_TOKENS",
    "DEFAULT_TOKENS",
    "PRIVATE_SCOPE",
    "SHARED_SCOPE",
    "NgramStore",
    "Scope",
    "StoreFileError",
    "StoreStatistics",
    "scope_of",
    "scope_of_request",
    "tokenizer_digest",
]
