"""Files of stores, as `learn` reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError
from ngram_npu.memory import Int32Array
from ngram_npu.output import check_writable
from ngram_npu.store import BLOCK_TOKENS, NgramStore
from ngram_npu.store_file import MAGIC, StoreFileError

Text = tuple[int, Int32Array]
"""An answer: the number of its scope, and its tokens."""

_LATER_BLOCK = BLOCK_TOKENS - 16
"""New tokens of a text's later blocks, which repeat the last 16 of the block before."""


def is_store(path: Path) -> bool:
    """Whether a file begins like a store's. What cannot be read is reported by who reads it."""
    if not path.is_file():  # opening a pipe would take what it has
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def new(store_tokens: int, tokenizer: str = "") -> NgramStore:
    """An empty store of a vocabulary.

    Raises:
        InputError: too few or too many tokens.
    """
    try:
        return NgramStore(1, store_tokens, tokenizer=tokenizer)
    except ValueError as error:
        raise InputError(str(error)) from error


def load(path: Path, tokenizer: str = "") -> NgramStore:
    """The store in a file.

    Raises:
        InputError: it cannot be used, is of another vocabulary, or cannot be read.
    """
    try:
        return NgramStore.load(path, tokenizer=tokenizer)
    except StoreFileError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def check_output(path: Path) -> None:
    """Checks before any work that a store may be saved there.

    Raises:
        InputError: as for `check_writable`; or it is another file, such as logs, which a missing
            name behind `-o` would have replaced.
    """
    check_writable(path)
    if path.exists() and not is_store(path) and not (path.is_file() and not path.stat().st_size):
        raise InputError(f"{path}: is not a store's file, and is not overwritten")


def save(store: NgramStore, path: Path) -> None:
    """Replaces the file by the store.

    Raises:
        InputError: it cannot be written; the old file remains.
    """
    try:
        store.save(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def describe(path: Path) -> dict[str, Any]:
    """What is in the file of a store.

    Raises:
        InputError: it cannot be used, or not be read.
    """
    store = load(path)
    return {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "token_capacity": store.token_capacity,
        "tokens_held": store.statistics.tokens_held,
        "blocks_in_use": store.statistics.blocks_in_use,
        "texts": len(texts_of(store)),
        "scopes": len(store.scopes),
        "visibility": store.visibility,
        "tokenizer": store.tokenizer,
    }


def texts_of(store: NgramStore) -> list[Text]:
    """The scope and the tokens of each text that the store holds, oldest first."""
    return store._texts()


def enter(store: NgramStore, texts: Iterable[Text]) -> None:
    """Adds texts to the store, each under its scope as a number."""
    for scope, tokens in texts:
        store._enter(tokens, scope)


def blocks_of(num_tokens: int) -> int:
    """How many blocks a store needs for a text."""
    return 1 + max(0, -(-(num_tokens - BLOCK_TOKENS) // _LATER_BLOCK))
