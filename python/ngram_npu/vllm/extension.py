"""What a running engine's store can be told: ``worker_extension_cls`` of vLLM."""

from __future__ import annotations

from typing import Any

from ngram_npu.store import NgramStore
from ngram_npu.vllm.row_lookup import BESIDE
from ngram_npu.vllm.sharing import SharedStore


class StoreExtension:
    """Methods for ``collective_rpc``, which calls them on every rank at the same place between two
    steps, so that all stores stay equal. They wait for the steps that are under way.

    A scope is what requests name in ``extra_args["ngram_npu_scope"]``; None: theirs who name none.
    Each method raises RuntimeError if the engine has no store.
    """

    def ngram_npu_store_warm(self, texts: list[list[int]], scope: str | int | None = None) -> None:
        """Adds texts, lists of token ids, as if requests had said them (``NgramStore.warm``)."""
        _store_of(self).warm(texts, scope=scope)

    def ngram_npu_store_clear(
        self, scope: str | int | None = None, *, all_scopes: bool = False
    ) -> None:
        """Removes the text of a scope and wipes it from memory. A file has it until it is written
        again."""
        _store_of(self).clear(None if all_scopes else 0 if scope is None else scope)

    def ngram_npu_store_merge(self, path: str) -> None:
        """Adds the text of a store's file, which every rank reads; the same on all of them."""
        store = _store_of(self)
        store.merge(NgramStore.load(path, tokenizer=store.tokenizer))

    def ngram_npu_store_statistics(self) -> dict[str, Any]:
        """``StoreStatistics`` as a mapping."""
        return vars(_store_of(self).statistics).copy()


def _store_of(worker: Any) -> NgramStore:
    """The store of a worker's drafter; all steps begun have run."""
    runner = worker.model_runner
    speculator = getattr(runner, "speculator", None)
    beside = getattr(speculator, BESIDE, None)
    for drafter in (getattr(runner, "drafter", None), speculator, beside):
        shared: SharedStore | None = getattr(drafter, "shared_store", None)
        if shared is not None:
            if not shared.settle():
                raise RuntimeError("ngram_npu: store: the device did not finish its steps")
            return shared.held
    raise RuntimeError("ngram_npu: store: this engine has none")
