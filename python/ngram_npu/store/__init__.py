"""The store: bounded memory of text that requests share and draft from (docs/guides/store.md)."""

from ngram_npu.store.file import StoreFileError
from ngram_npu.store.identifiers import Scope, scope_of, tokenizer_digest
from ngram_npu.store.store import (
    BLOCK_TOKENS,
    VISIBILITIES,
    Kind,
    NgramStore,
    StoreStatistics,
    Visibility,
    make_store,
    store_arguments,
)

__all__ = [
    "BLOCK_TOKENS",
    "VISIBILITIES",
    "Kind",
    "NgramStore",
    "Scope",
    "StoreFileError",
    "StoreStatistics",
    "Visibility",
    "make_store",
    "scope_of",
    "store_arguments",
    "tokenizer_digest",
]
