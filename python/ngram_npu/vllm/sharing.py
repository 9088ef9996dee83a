"""The store that the requests of an engine share: its file, and the scopes of requests.

Every rank of a server has its own store. All begin with the same one (:mod:`ngram_npu.vllm.ranks`)
and get the same tokens, and so have the same contents; one of them writes the file.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from ngram_npu import store_file
from ngram_npu.scopes import scope_of
from ngram_npu.store import Kind, NgramStore
from ngram_npu.vllm.after_import import logger, one_line
from ngram_npu.vllm.options import Options
from ngram_npu.vllm.vocabulary import vocabulary_digest

STORE_TOKENS = 1 << 24
"""350 MB, of which what holds text is committed."""
TOKENS_PER_SLOT = 1024
EXTRA_ARGUMENT = "ngram_npu_scope"
"""Key in ``SamplingParams.extra_args`` for the scope of a request."""
_MARK = "ngram_npu: "
"""Prefix of scopes that are not an ``extra_args`` string."""


class SharedStore:
    """A store and its files."""

    def __init__(self, vllm_config: Any, options: Options, slots: int, kind: Kind) -> None:
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
        self.path, self._minutes = options.store_file, options.store_save_minutes
        vocabulary = ""
        if self.path or options.store_seed:
            vocabulary = _vocabulary(vllm_config.model_config)
        sizes: dict[str, Any] = {"num_slots": slots, "token_capacity": tokens, "kind": kind}
        sizes |= {"visibility": visibility, "tokenizer": vocabulary}
        self._empty = functools.partial(NgramStore, **sizes)
        self._load: Callable[[str], NgramStore] = lambda path: NgramStore.load(path, **sizes)
        self.digest = ""
        """Of what was loaded; empty: nothing."""
        self.loaded = ""
        """The files that were loaded, as text."""
        self.settle: Callable[[], bool] = lambda: True
        """Waits until the text of all steps has come in; says whether it has."""
        self._calls_busy: int | None = None
        self.held = self._begin(options.store_seed)

    def _begin(self, seed: str) -> NgramStore:
        """What this engine's own file holds, which includes the seed that it began with; under it a
        seed that it did not begin with."""
        name = "store_seed"
        try:
            checksum = store_file.describe(seed).checksum if seed else ""
            name = "store_file"
            own = self.path if self.path and os.path.exists(self.path) else ""
            described = store_file.describe(own) if own else None
            self.digest = checksum + (described.checksum if described else "")
            if described and described.seed == checksum[:32]:
                seed = ""
            name = "store_seed" if seed else name
            found = self._load(seed) if seed else None
            name = "store_file"
            if own and found is None:
                found = self._load(own)
            elif own and found is not None:
                found.merge(self._load(own))
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: {name}: {error}") from error
        self.loaded = " and ".join(filter(None, (seed, own)))
        found = self._empty() if found is None else found
        found.seed = checksum[:32]
        return found

    def begin_empty(self) -> None:
        """Drops what was loaded. Its file stays as it is."""
        self.held, self.path = self._empty(), ""

    def never_skip(self) -> None:
        """From now on a step that finds the store in use raises: other ranks' would not skip it."""
        self._calls_busy = self.held.statistics.calls_busy

    def announce(self, owner: object, scoped: bool) -> None:
        """Logs a line about the store, and saves the file now and then and when the engine ends.
        For one rank."""
        if self.path:
            _Saving(owner, self.held, self.path, self._minutes, self.settle)
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
            f", {found.tokens_held} of them from {self.loaded}" if found.tokens_held else "",
        )

    def check_not_skipped(self) -> None:
        """Checks that the last step did not skip a store in use, which it must :meth:`never_skip`.

        Raises:
            RuntimeError: it did.
        """
        busy = self._calls_busy
        if busy is not None and self.held.statistics.calls_busy != busy:
            raise RuntimeError("ngram_npu: store: expected to be free, got a call that uses it")


class _Saving:
    """Saves a store every ``minutes`` in which text came in (0: never), and when ``owner`` ends.
    Steps go on meanwhile."""

    def __init__(
        self,
        owner: object,
        store: NgramStore,
        path: str,
        minutes: float,
        settle: Callable[[], bool],
    ) -> None:
        self._store, self._path, self._settle = store, path, settle
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if minutes > 0:
            self._thread = threading.Thread(
                target=self._now_and_then, args=(60 * minutes,), name="ngram_npu store", daemon=True
            )
            self._thread.start()
        Finalize(owner, self._end, exitpriority=0)

    def _now_and_then(self, seconds: float) -> None:
        saved = self._store.statistics.tokens_entered
        while not self._ended.wait(seconds):
            entered = self._store.statistics.tokens_entered
            if entered != saved:
                saved = entered
                self._save()

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._settle():
            self._save()
        else:
            logger.warning("ngram_npu: the store is not saved: the device did not finish its steps")

    def _save(self) -> None:
        try:
            self._store.save(self._path)
        except (OSError, RuntimeError) as error:
            logger.warning("ngram_npu: the store is not saved: %s", error)


def _vocabulary(model_config: Any) -> str:
    """Digest of the model's vocabulary; empty, and one line in the log, if it cannot be read."""
    try:
        return vocabulary_digest(model_config) or ""
    except Exception as error:
        logger.info(
            "ngram_npu: the store's files are not compared with the tokenizer: %s", one_line(error)
        )
        return ""


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
