"""The store that the requests of an engine share: its file, and the scopes of requests.

Every rank of a server has its own store. All begin with the same one (:mod:`ngram_npu.vllm.ranks`)
and get the same tokens, and so have the same contents; one of them writes the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Literal

import numpy as np

from ngram_npu.config import STORE_TOKENS
from ngram_npu.scopes import scope_of
from ngram_npu.store import NgramStore
from ngram_npu.vllm.after_import import logger
from ngram_npu.vllm.options import Options

TOKENS_PER_SLOT = 1024
EXTRA_ARGUMENT = "ngram_npu_scope"
"""Key in ``SamplingParams.extra_args`` for the scope of a request."""
_MARK = "ngram_npu: "
"""Prefix of scopes that are not an ``extra_args`` string."""


class SharedStore:
    """A store and its file."""

    def __init__(self, options: Options, slots: int, kind: Literal["numpy", "torch"]) -> None:
        """
        Raises:
            ValueError: too few tokens for ``slots`` slots, or a file that cannot be used; one line.
        """
        visibility = options.ngram.store
        assert visibility is not None
        tokens = options.store_tokens or max(STORE_TOKENS, TOKENS_PER_SLOT * slots)
        if tokens < TOKENS_PER_SLOT * slots:
            raise ValueError(
                f"ngram_npu: store_tokens: expected at least {TOKENS_PER_SLOT * slots}, "
                f"{TOKENS_PER_SLOT} for each of {slots} slots, got {tokens}"
            )
        self.path = options.store_file
        self._empty = functools.partial(NgramStore, slots, tokens, visibility=visibility, kind=kind)
        self.held = self._empty()
        self.digest = ""
        """Of what was loaded; empty: nothing."""
        self._calls_busy: int | None = None
        if self.path and os.path.exists(self.path):
            self._take(self.path, slots, kind)

    def _take(self, path: str, slots: int, kind: Literal["numpy", "torch"]) -> None:
        """Loads the file; its text is merged into a new store if the sizes differ."""
        try:
            most = NgramStore.load(path).num_slots
            loaded = NgramStore.load(path, num_slots=min(slots, most), kind=kind)
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: store_file: {error}") from error
        wanted = self.held.num_slots, self.held.token_capacity, self.held.visibility
        if (loaded.num_slots, loaded.token_capacity, loaded.visibility) == wanted:
            self.held = loaded
        else:
            self.held.merge(loaded)
        self.digest = hashlib.sha256(np.asarray(self.held.tensor).data).hexdigest()

    def begin_empty(self) -> None:
        """Drops what was loaded. Its file stays as it is."""
        self.held, self.path = self._empty(), ""

    def never_skip(self) -> None:
        """From now on a step that finds the store in use raises: other ranks' would not skip it."""
        self._calls_busy = self.held.statistics.calls_busy

    def announce(
        self, owner: object, scoped: bool, settle: Callable[[], bool] | None = None
    ) -> None:
        """Logs a line about the store, and saves the file when the engine ends. For one rank.

        ``settle`` is called before that, and says whether all text has come in.
        """
        if self.path:
            Finalize(owner, _save, args=(self.held, self.path, settle), exitpriority=0)
        whose = "all requests of this engine, whatever their LoRA adapter or tenant"
        if scoped:
            whose = f"requests of one LoRA adapter and extra_args[{EXTRA_ARGUMENT!r}]"
        found = self.held.statistics
        logger.info(
            "ngram_npu: store=%s is on: %s draft from each other's text (%d tokens in %d MB%s)",
            self.held.visibility,
            whose,
            self.held.token_capacity,
            self.held.nbytes >> 20,
            f", {found.tokens_held} of them from {self.path}" if found.tokens_held else "",
        )

    def check_not_skipped(self) -> None:
        """Checks that the last step did not skip a store in use, which it must :meth:`never_skip`.

        Raises:
            RuntimeError: it did.
        """
        busy = self._calls_busy
        if busy is not None and self.held.statistics.calls_busy != busy:
            raise RuntimeError("ngram_npu: store: expected to be free, got a call that uses it")


def scope_of_request(lora_request: Any, sampling_params: Any) -> int:
    """The scope from the LoRA adapter and from ``extra_args``. Never raises, which would end the
    engine."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    named = extra.get(EXTRA_ARGUMENT)
    if lora_request is None and not (isinstance(named, str) and named.startswith(_MARK)):
        try:
            return scope_of(named)
        except (TypeError, ValueError):
            pass
    adapter = None
    if lora_request is not None:
        adapter = [lora_request.lora_int_id, lora_request.lora_name]
    return scope_of(_MARK + json.dumps([adapter, named], default=repr))


def _save(store: NgramStore, path: str, settle: Callable[[], bool] | None) -> None:
    if settle is not None and not settle():
        logger.warning("ngram_npu: the store is not saved: the device did not finish its steps")
        return
    try:
        store.save(path)
    except (OSError, RuntimeError) as error:
        logger.warning("ngram_npu: the store is not saved: %s", error)
