"""The store that the requests of an engine share, for all drafters: its file, requests' scopes.

Every rank has its own. All begin with the same one (:mod:`ngram_npu.engines.vllm.startup`) and get
the same tokens, and so have the same contents; one of them writes the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

import ngram_npu._C as _C
from ngram_npu import store_file
from ngram_npu.engines.vllm.options import Options, vocabulary_digest
from ngram_npu.engines.vllm.patching import logger, one_line
from ngram_npu.scopes import scope_of
from ngram_npu.store import Kind, NgramStore

STORE_TOKENS = 1 << 24
"""350 MB, which are committed at the start."""
TOKENS_PER_SLOT = 1024
EXTRA_ARGUMENT = "ngram_npu_scope"
"""Key in ``SamplingParams.extra_args`` for the scope of a request."""
IDLE_S = 1.0
"""A store that no text has entered for so long is saved."""
IDLE_SHARE = 1 / 6
"""Of ``store_save_minutes``: the least time between two saves of an idle store."""
PAUSE_PER_SAVE = 20
"""Least time between two saves in durations of the last one, so that saves take at most 5 %."""
NO_SCOPES = (
    "ngram_npu: store: expected a runner that shows whose its requests are, this vLLM's has "
    "another GPUModelRunner.{}"
)
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
        least = TOKENS_PER_SLOT * slots
        tokens = options.store_tokens or max(STORE_TOKENS, least)
        if tokens < least:
            raise ValueError(
                f"ngram_npu: store_tokens: expected at least {least}, {TOKENS_PER_SLOT} for each "
                f"of {slots} slots, got {tokens}"
            )
        self.path, self._minutes = options.store_file, options.store_save_minutes
        self._is_killed = getattr(vllm_config, "shutdown_timeout", None) == 0
        """Whether a server that is stopped kills its workers before they can save."""
        self._model_config = vllm_config.model_config
        vocabulary = self.vocabulary() if self.path or options.store_seed else ""
        sizes: dict[str, Any] = {"num_slots": slots, "token_capacity": tokens, "kind": kind}
        sizes |= {"visibility": visibility, "tokenizer": vocabulary}
        self._empty = functools.partial(NgramStore, **sizes)
        self._load: Callable[[str], NgramStore] = functools.partial(NgramStore.load, **sizes)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.digest = ""
        """Of what was loaded; empty: nothing."""
        self.loaded = ""
        """The files that were loaded, as text."""
        self.settle: Callable[[], bool] = lambda: True
        """Waits until the text of all steps has come in; says whether it has."""
        self.scoped = False
        """Whether requests have scopes of their own: the runner must know them."""
        self._requires_scope = options.scope == "required"
        self._calls_busy: tuple[int, ...] | None = None
        self.held = self._begin(options.store_seed)

    def _begin(self, seed: str) -> NgramStore:
        """What this engine's own file holds, which includes the seed that it began with. Of a new
        seed, what both hold is held once."""
        own = self.path if self.path and os.path.exists(self.path) else ""
        if seed and self.path and os.path.realpath(seed) == os.path.realpath(self.path):
            raise ValueError("ngram_npu: store_seed: expected another file than store_file")
        name, found, earlier = "store_file", None, None
        try:
            if own:
                found = self._load(own)
            name = "store_seed"
            checksum = store_file.describe(seed).checksum[:32] if seed else ""
            if found is not None and checksum in (found.seed, found.checksum[:32]):
                seed = ""
            if seed:
                found, earlier = self._load(seed), found
                found.seed = checksum
            if found is None:
                return self._empty()
            if earlier is not None:
                found.merge(earlier, new_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: {name}: {error}") from error
        self.loaded = " and ".join(filter(None, (seed, own)))
        self.digest = found.checksum + ("" if earlier is None else earlier.checksum)
        return found

    def vocabulary(self) -> str:
        """The model's digest; empty, and one line in the log, if it cannot be read."""
        try:
            return vocabulary_digest(self._model_config) or ""
        except Exception as error:
            says = "ngram_npu: the store's files are not compared with the tokenizer: %s"
            logger.info(says, one_line(error))
            return ""

    def is_one_of_many(self, *, alike: bool) -> None:
        """From now on a step that finds the store in use raises: other ranks' would not skip it.
        Drops what was loaded if that is not ``alike`` on all; its file stays as it is."""
        if not alike:
            self.held, self.path = self._empty(), ""
        self._calls_busy = self._words("calls_busy")

    def announce(self, owner: object) -> None:
        """Logs a line about the store and one about its file. Saves the file while the engine runs
        (:meth:`_save_when_due`) and when ``owner`` ends. Steps go on meanwhile. For one rank."""
        if self.path:
            if self._minutes > 0:
                self._thread = threading.Thread(
                    target=self._save_when_due, name="ngram_npu store", daemon=True
                )
                self._thread.start()
            Finalize(owner, self._end, exitpriority=0)
            self._log_when_saved()
        whose = "all requests of this engine"
        refused = "; those with a cache_salt, a LoRA adapter or a scope are refused"
        if self.scoped:
            whose = f"requests of one cache_salt, LoRA adapter and extra_args[{EXTRA_ARGUMENT!r}]"
            refused = "; those with none of the three are refused" if self._requires_scope else ""
        held, tokens = self.held, self.held.statistics.tokens_held
        loaded = f", {tokens} of them from {self.loaded}" if tokens else ""
        logger.info(
            f"ngram_npu: store={held.visibility} is on: {whose} draft from each other's text "
            f"({held.token_capacity} tokens in {held.nbytes >> 20} MB{loaded}){refused}"
        )

    def check_not_skipped(self) -> None:
        """Checks that the last step did not skip a store in use, after :meth:`is_one_of_many`.

        Raises:
            RuntimeError: it did.
        """
        if self._calls_busy not in (None, self._words("calls_busy")):
            raise RuntimeError("ngram_npu: store: expected to be free, got a call that uses it")

    def _log_when_saved(self) -> None:
        when = "when the engine ends"
        if self._minutes > 0:
            when = (
                f"{IDLE_S:g} s after text stops coming in, at least every {self._minutes:g} min "
                f"while it comes in, and {when}"
            )
        logger.info("ngram_npu: store_file=%s is written %s", self.path, when)
        if self._is_killed:
            lost = "text since the last save" if self._minutes > 0 else "all text"
            logger.warning(
                "ngram_npu: with shutdown_timeout=0 vLLM kills its workers when the server is "
                "stopped, and %s is lost; --shutdown-timeout 10 gives them time to save it",
                lost,
            )

    def _save_when_due(self) -> None:
        """vLLM may kill a worker at any time, so the file is written soon after requests end: when
        text stops coming in, or after ``store_save_minutes`` of it."""
        saved = seen = self._words("entered", "epoch")
        last, busy_s, idle_s = time.monotonic(), 60 * self._minutes, 0.0
        while not self._ended.wait(min(IDLE_S, busy_s)):
            state = self._words("entered", "epoch")
            is_idle, seen = state == seen, state
            started = time.monotonic()
            if state == saved or started - last < (idle_s if is_idle else busy_s):
                continue
            if self._save():
                saved = state
            last = time.monotonic()
            pause_s = PAUSE_PER_SAVE * (last - started)
            busy_s = max(60 * self._minutes, pause_s)
            idle_s = max(60 * self._minutes * IDLE_SHARE, pause_s) if saved == state else busy_s

    def _words(self, *names: str) -> tuple[int, ...]:
        words = np.asarray(self.held.tensor)
        return tuple(int(words[_C.STORE_WORDS[name]]) for name in names)

    def _end(self) -> None:
        self._ended.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        if self.settle():
            self._save()
        else:
            logger.warning("ngram_npu: the store is not saved: the device did not finish its steps")

    def _save(self) -> bool:
        try:
            self.held.save(self.path)
        except Exception as error:
            logger.warning("ngram_npu: the store is not saved: %s", one_line(error))
            return False
        return True


def scope_of_request(lora_request: Any, sampling_params: Any, cache_salt: str | None) -> int:
    """Differs for each LoRA adapter, salt and scope in ``extra_args``. Without the first two it is
    ``scope_of`` the third. Never raises, which would end the engine."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    named = extra.get(EXTRA_ARGUMENT)
    marked = isinstance(named, str) and named.startswith(_MARK)
    if lora_request is None and not cache_salt and not marked:
        with contextlib.suppress(TypeError, ValueError):
            return scope_of(named)
    adapter = lora_request and [lora_request.lora_int_id, lora_request.lora_name]
    owner = [adapter, named, cache_salt] if cache_salt else [adapter, named]
    try:
        return scope_of(_MARK + json.dumps(owner, default=repr))
    except (TypeError, ValueError):  # such as a key that is no string
        return scope_of(_MARK + repr(owner))
