"""Administers the store of a running engine, as vLLM's ``worker_extension_cls``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from ngram_npu.engines.vllm.feed.scopes import fold_scope
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.sharing import SharedStore
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE
from ngram_npu.store import NgramStore, StoreFileError

T = TypeVar("T")
Adapter = tuple[int, str] | None


class StoreExtension:
    """Methods for ``collective_rpc``, which calls them on every rank at the same point between two
    steps, so that all stores stay equal. They wait for the steps that are in progress. If a rank
    fails where others may not, its worker ends.

    Three arguments select a scope: ``scope``, the value that requests have in
    ``extra_args["ngram_npu_scope"]``; ``adapter``, the lora_int_id and lora_name of their LoRA
    adapter; and ``salt``, their ``cache_salt``. If all three are None, they select the scope of
    requests without these properties.

    Raises:
        RuntimeError: The engine has no store, or a call or the device keeps it in use.
        ValueError: A scope is passed to a runner that has one scope for all requests, or a text
            does not consist of token ids.
    """

    def ngram_npu_store_warm(
        self,
        texts: list[list[int]],
        scope: object = None,
        adapter: Adapter = None,
        salt: str | None = None,
    ) -> None:
        """Adds texts, lists of token ids, as if requests had output them (``NgramStore.warm``)."""
        _call_with_store(
            self,
            lambda shared: shared.contents.warm(
                texts, scope=_find_scope(shared, scope, adapter, salt)
            ),
        )

    def ngram_npu_store_clear(
        self,
        scope: object = None,
        adapter: Adapter = None,
        salt: str | None = None,
        *,
        all_scopes: bool = False,
    ) -> None:
        """Removes the text of one scope, or of all scopes, from the store in memory, not from
        files.

        Raises:
            ValueError: One scope is selected with the option ``prompt_scopes``: its text is also in
                the scopes of prompts, which the store cannot list.
        """

        def clear(shared: SharedStore) -> None:
            if shared.has_prompt_scopes and not all_scopes:
                raise ValueError("ngram_npu: clear: expected all_scopes=True with prompt_scopes")
            shared.contents.clear(None if all_scopes else _find_scope(shared, scope, adapter, salt))

        _call_with_store(self, clear)

    def ngram_npu_store_mark_update(self, keep_updates: int | None = None) -> None:
        """Announces that the model's weights have changed, and removes text from before the last
        ``keep_updates`` updates (``NgramStore.mark_update``)."""
        _call_with_store(self, lambda shared: shared.contents.mark_update(keep_updates))

    def ngram_npu_store_merge(self, path: str) -> None:
        """Adds the text of a store's file, which must be the same on all ranks."""

        def merge(shared: SharedStore) -> None:
            vocabulary = shared.contents.tokenizer or shared.vocabulary()
            # A device store is smaller than most files: only text that it can hold is added.
            capacity = getattr(shared.contents, "file_capacity", None)
            store = NgramStore.load(path, tokenizer=vocabulary, token_capacity=capacity)
            shared.contents.merge(store)

        _call_with_store(self, merge)

    def ngram_npu_store_statistics(self) -> dict[str, Any]:
        """Returns ``StoreStatistics`` as a mapping; of a store on the device
        ``DeviceStoreStatistics``, which has no counts of lookups and drafts."""
        return _call_with_store(self, lambda shared: vars(shared.contents.statistics).copy())


def _find_scope(shared: SharedStore, name: Any, adapter: Adapter, salt: str | None) -> int:
    if not shared.has_scopes and (name, adapter, salt) != (None, None, None):
        raise ValueError("ngram_npu: scope: expected none, this runner has one for all requests")
    lora = adapter and SimpleNamespace(lora_int_id=adapter[0], lora_name=adapter[1])
    extra = {} if name is None else {EXTRA_ARGUMENT: name}
    if shared.exchanges_scopes:
        salt = fold_scope(name, salt)
    return shared.find_scope(lora, SimpleNamespace(extra_args=extra), salt)


def _call_with_store(worker: Any, call: Callable[[SharedStore], T]) -> T:
    """Calls ``call`` with the store of a worker's drafter, after all steps in progress."""
    runner = worker.model_runner
    speculator = getattr(runner, "speculator", None)
    drafters = (
        getattr(runner, "drafter", None),
        speculator,
        getattr(speculator, LOOKUP_ATTRIBUTE, None),
    )
    drafter: Any = next((d for d in drafters if getattr(d, "shared_store", None)), None)
    if drafter is None:
        raise RuntimeError("ngram_npu: store: this engine has none; set the option store")
    shared: SharedStore = drafter.shared_store
    try:
        if not shared.settle():
            raise RuntimeError("ngram_npu: store: the device did not finish its steps")
        return call(shared)
    except Exception as error:
        # A ValueError about arguments occurs on all ranks before a store is changed.
        is_on_all_ranks = isinstance(error, ValueError) and not isinstance(error, StoreFileError)
        if is_on_all_ranks or not getattr(drafter, "has_other_ranks", False):
            raise
        logger.critical(
            "ngram_npu: store: other ranks may have changed their stores, so this worker ends"
        )
        raise SystemExit(1) from error
