"""What a store in host memory and a store on a device have in common: texts of whole requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.store.identifiers import Scope, scope_of
from ngram_npu.tensors import Int32Array

MAX_SAVE_ATTEMPTS = 10


class ClearedDuringSaveError(Exception):
    """Text that was already copied to the file has been cleared."""


class TextStore(ABC):
    """Base of :class:`NgramStore` and :class:`DeviceStore`."""

    tokenizer: str

    @abstractmethod
    def texts(self) -> list[tuple[int, Int32Array]]:
        """Returns scope and text of each request, as far as its blocks are still in the store."""

    @abstractmethod
    def add_text(self, text: Int32Array, scope: int) -> None:
        """Adds a text as a request that uses the last slot."""

    @abstractmethod
    def _save_once(self, path: str | PathLike[str]) -> None:
        """Writes a file. Raises ClearedDuringSaveError if text was cleared meanwhile."""

    def warm(self, texts: Iterable[npt.ArrayLike], *, scope: int | str | None = None) -> None:
        """Adds texts to the store, one after the other, each as the output of one request.

        The texts use the last slot; a request in this slot continues in a new block.

        Args:
            texts: lists or arrays of token ids: example answers, without their prompts.
            scope: the scope of the texts.

        Raises:
            ValueError: a text is not a vector of token ids from 0 to 2**31 - 1.
            RuntimeError: another call has been using the store for ten seconds.
        """
        scope_number = scope_of(scope)
        for text in [self._check_token_ids(text) for text in texts]:
            self.add_text(text, scope_number)

    def merge(self, other: TextStore, *, new_only: bool = False) -> None:
        """Adds the text of another store, each request's text in its scope.

        Each text is added as if a request had generated it again, so what the store has learned
        about its n-grams (the counters in the entries) starts at zero. The texts are added in the
        order of their oldest blocks; the text added last is overwritten last. A text contains what
        ``other`` still has of it, for open requests the text so far. ``other`` is not changed.

        Args:
            other: the store to copy from.
            new_only: skip texts that this store contains completely.

        Raises:
            ValueError: ``other`` is this store, or has another vocabulary.
            RuntimeError: another call has been using one of the stores for ten seconds.
        """
        if other is self:
            raise self._make_error("merge: expected another store, got this one")
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise self._make_error(
                f"merge: expected a store of vocabulary {self.tokenizer}, got {other.tokenizer}"
            )
        known = {(scope, text.tobytes()) for scope, text in self.texts()} if new_only else set()
        for scope, text in other.texts():
            if (scope, text.tobytes()) not in known:
                self.add_text(text, scope)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the store, without the open requests, to a file, which is replaced atomically. A
        process that is killed during the call leaves the old file and a file that ends in ``.tmp``,
        which the next call for this path removes.

        Steps of other threads continue. In host memory, a step waits at most for the copy of a
        megabyte, and the file contains a part of the text that is added during the call. On a
        device, the text is copied at one point between two steps, and its counters start at zero,
        as after :meth:`merge`. If :meth:`clear` is called meanwhile, the call starts again.

        The file contains unencrypted text as token ids: only its owner may read it.

        Raises:
            OSError: writing fails.
            RuntimeError: another call has been using the store for ten seconds, or text was cleared
                during each of ten attempts.
        """
        for _ in range(MAX_SAVE_ATTEMPTS):
            with suppress(ClearedDuringSaveError):
                self._save_once(path)
                return
        raise RuntimeError(
            f"{type(self).__name__}: save: text was cleared during each of {MAX_SAVE_ATTEMPTS} "
            "attempts"
        )

    def _make_error(self, message: str) -> ValueError:
        return ValueError(f"{type(self).__name__}: {message}")

    def _check_keep_updates(self, keep_updates: int | None) -> None:
        if keep_updates is not None and keep_updates < 1:
            raise self._make_error(
                f"mark_update: keep_updates: expected at least 1 or None, got {keep_updates}"
            )

    def _check_token_ids(self, text: npt.ArrayLike) -> Int32Array:
        """Returns the token ids of a text as int32."""
        token_ids = np.asarray(text)
        if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
            raise self._make_error(
                f"warm: expected a vector of token ids, got {token_ids.dtype} of shape "
                f"{list(token_ids.shape)}"
            )
        if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**31:
            raise self._make_error(
                f"warm: expected token ids of 0 to 2**31 - 1, got {token_ids.min()} to "
                f"{token_ids.max()}"
            )
        return np.ascontiguousarray(token_ids, np.int32)


def count_tokens_by_scope(
    scopes: npt.NDArray[np.int64], num_tokens: npt.NDArray[Any]
) -> dict[Scope, int]:
    """Returns the number of tokens of each scope, given the scope and the tokens of each block."""
    unique_scopes, scope_of_block = np.unique(scopes, return_inverse=True)
    sums = np.bincount(scope_of_block, weights=num_tokens)
    return dict(zip(map(Scope, unique_scopes.tolist()), map(int, sums), strict=True))
