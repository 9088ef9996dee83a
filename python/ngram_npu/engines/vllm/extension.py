"""What a running engine's store can be told: ``worker_extension_cls`` of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.sharing import EXTRA_ARGUMENT, SharedStore, scope_of_request
from ngram_npu.engines.vllm.v2 import BESIDE
from ngram_npu.store import NgramStore
from ngram_npu.store_file import StoreFileError

T = TypeVar("T")
Adapter = tuple[int, str] | None


class StoreExtension:
    """Methods for ``collective_rpc``, which calls them on every rank at the same place between two
    steps, so that all stores stay equal. They wait for the steps that are under way. A rank that
    fails where others may not ends its worker.

    A scope is what requests name in ``extra_args["ngram_npu_scope"]``, with their LoRA adapter
    (``adapter``: its (lora_int_id, lora_name)) and their ``cache_salt`` (``salt``). None: theirs
    who have none.

    Raises:
        RuntimeError: the engine has no store, or a call or the device keeps it in use.
        ValueError: a scope in a runner that has one for all, or texts that are no token ids.
    """

    def ngram_npu_store_warm(
        self,
        texts: list[list[int]],
        scope: object = None,
        adapter: Adapter = None,
        salt: str | None = None,
    ) -> None:
        """Adds texts, lists of token ids, as if requests had said them (``NgramStore.warm``)."""
        _told(self, lambda s: s.held.warm(texts, scope=_scope(s, scope, adapter, salt)))

    def ngram_npu_store_clear(
        self,
        scope: object = None,
        adapter: Adapter = None,
        salt: str | None = None,
        *,
        all_scopes: bool = False,
    ) -> None:
        """Removes the text of one scope, or of all, and wipes it from memory, not from files."""
        _told(
            self,
            lambda s: s.held.clear(None if all_scopes else _scope(s, scope, adapter, salt)),
        )

    def ngram_npu_store_merge(self, path: str) -> None:
        """Adds the text of a store's file, which has to be the same on all ranks."""

        def merge(shared: SharedStore) -> None:
            vocabulary = shared.held.tokenizer or shared.vocabulary()
            shared.held.merge(NgramStore.load(path, tokenizer=vocabulary))

        _told(self, merge)

    def ngram_npu_store_statistics(self) -> dict[str, Any]:
        """``StoreStatistics`` as a mapping."""
        return _told(self, lambda shared: vars(shared.held.statistics).copy())


def _scope(shared: SharedStore, named: object, adapter: Adapter, salt: str | None) -> int:
    if not shared.scoped and (named, adapter, salt) != (None, None, None):
        raise ValueError("ngram_npu: scope: expected none, this runner has one for all requests")
    lora = adapter and SimpleNamespace(lora_int_id=adapter[0], lora_name=adapter[1])
    extra = {} if named is None else {EXTRA_ARGUMENT: named}
    return scope_of_request(lora, SimpleNamespace(extra_args=extra), salt)


def _told(worker: Any, call: Callable[[SharedStore], T]) -> T:
    """Calls with the store of a worker's drafter, when all steps begun have run."""
    runner = worker.model_runner
    speculator = getattr(runner, "speculator", None)
    drafters = getattr(runner, "drafter", None), speculator, getattr(speculator, BESIDE, None)
    drafter: Any = next((d for d in drafters if getattr(d, "shared_store", None)), None)
    if drafter is None:
        raise RuntimeError("ngram_npu: store: this engine has none")
    shared: SharedStore = drafter.shared_store
    try:
        if not shared.settle():
            raise RuntimeError("ngram_npu: store: the device did not finish its steps")
        return call(shared)
    except Exception as error:
        on_all_ranks = isinstance(error, ValueError) and not isinstance(error, StoreFileError)
        if on_all_ranks or not getattr(drafter, "one_of_many", False):
            raise
        logger.critical(
            "ngram_npu: store: other ranks may have changed theirs, so this worker ends"
        )
        raise SystemExit(1) from error
