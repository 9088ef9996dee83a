"""Administers the store of a running engine, as vLLM's ``worker_extension_cls``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ngram_npu.engines.vllm.drafter import ATTRIBUTE, Drafter
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.shared_store import SharedStore
from ngram_npu.store import SHARED_SCOPE, NgramStore, Scope, StoreFileError, scope_of_request

T = TypeVar("T")


class StoreExtension:
    """Methods for ``collective_rpc``, which calls them on every rank at the same point between two
    steps, so that all stores stay equal. They wait for the steps that are in progress. If a rank
    fails where others may not, its worker ends.

    Two arguments select the requests that share text: ``salt``, their ``cache_salt``, and
    ``adapter``, the name of their LoRA adapter. Without both, they select requests without both.

    Raises:
        RuntimeError: The engine has no store.
        ValueError: A salt or an adapter is passed to a runner that does not know those of requests,
            or a text does not consist of token ids.
    """

    def ngram_npu_store_warm(
        self, texts: list[list[int]], salt: str | None = None, adapter: str | None = None
    ) -> None:
        """Adds texts, lists of token ids, as if requests had output them (``NgramStore.warm``).

        Raises:
            ValueError: No request can draft from these texts, because requests without salt and
                adapter share with nobody.
        """
        drafter, store = _find_store(self)
        scope = _find_scope(store, salt, adapter)
        if scope == SHARED_SCOPE and drafter.options.scope == "private":
            raise ValueError(
                "ngram_npu: salt: expected a cache_salt or an adapter, got none: with "
                "scope='private', requests without both share with nobody"
            )
        _call(drafter, lambda: store.contents.warm(texts, scope=scope))

    def ngram_npu_store_clear(
        self,
        salt: str | None = None,
        adapter: str | None = None,
        *,
        all_scopes: bool = False,
    ) -> None:
        """Removes the text of one scope, or of all scopes, from the store in memory, not from
        files."""
        drafter, store = _find_store(self)
        scope = None if all_scopes else _find_scope(store, salt, adapter)
        _call(drafter, lambda: store.contents.clear(scope))

    def ngram_npu_store_mark_update(self, keep_updates: int | None = None) -> None:
        """Announces that the model's weights have changed, and removes text from before the last
        ``keep_updates`` updates (``NgramStore.mark_update``)."""
        drafter, store = _find_store(self)
        _call(drafter, lambda: store.contents.mark_update(keep_updates))

    def ngram_npu_store_merge(self, path: str) -> None:
        """Adds the text of a store's file, which must be the same on all ranks. Of more text than
        the engine's store can hold, only the newest is added."""
        drafter, store = _find_store(self)

        def merge() -> None:
            vocabulary = store.contents.tokenizer or store.compute_vocabulary_digest()
            capacity = store.contents.capacity
            store.contents.merge(NgramStore.load(path, tokens=capacity, tokenizer=vocabulary))

        _call(drafter, merge)

    def ngram_npu_store_statistics(self) -> dict[str, Any]:
        """Returns ``StoreStatistics`` as a mapping."""
        drafter, store = _find_store(self)
        return _call(drafter, lambda: vars(store.contents.statistics).copy())


def _find_store(worker: Any) -> tuple[Drafter, SharedStore]:
    """Returns a worker's drafter and its store."""
    runner = worker.model_runner
    owners = getattr(runner, "drafter", None), getattr(runner, "speculator", None)
    for owner in owners:
        drafter: Drafter | None = getattr(owner, ATTRIBUTE, None)
        if drafter is not None and drafter.shared_store is not None:
            return drafter, drafter.shared_store
    raise RuntimeError("ngram_npu: store: this engine has none; set the option store")


def _find_scope(store: SharedStore, salt: str | None, adapter: str | None) -> Scope:
    if not store.has_scopes and (salt, adapter) != (None, None):
        raise ValueError(
            "ngram_npu: salt, adapter: expected none, because this runner does not know those of "
            f"requests, got {salt!r} and {adapter!r}"
        )
    return scope_of_request(salt, adapter)


def _call(drafter: Drafter, call: Callable[[], T]) -> T:
    """Changes or reads the store. If this fails where other ranks may succeed, the worker ends."""
    assert drafter.shared_store is not None
    try:
        result = call()
        drafter.shared_store.copy_if_due(is_idle=True)
        return result
    except Exception as error:
        # A ValueError about arguments occurs on all ranks before a store is changed.
        is_on_all_ranks = isinstance(error, ValueError) and not isinstance(error, StoreFileError)
        if is_on_all_ranks or not drafter.has_other_ranks:
            raise
        logger.critical(
            "ngram_npu: store: other ranks may have changed their stores, so this worker ends"
        )
        raise SystemExit(1) from error
