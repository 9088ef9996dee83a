"""The store of an engine's rank, with the files that it is loaded from and saved to."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ngram_npu.engines.vllm.metrics import StoreMetrics
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import format_error, logger
from ngram_npu.engines.vllm.saving import BUSY_SAVE_S, StoreSaver
from ngram_npu.store import SHARED_SCOPE, NgramStore, tokenizer_digest
from ngram_npu.store import file as store_file


def check_files(options: Options) -> None:
    """Checks the files of a store, as far as this takes no time.

    Raises:
        ValueError: A file cannot be used. One line.
    """
    seed, path = options.store_seed, options.store_file
    if seed and path and os.path.realpath(seed) == os.path.realpath(path):
        raise ValueError("ngram_npu: store_seed: expected another file than store_file")
    folder = os.path.dirname(os.path.realpath(path)) if path else ""
    if folder and not os.access(folder, os.W_OK):
        state = "a folder that can be written" if os.path.isdir(folder) else "an existing folder"
        raise ValueError(f"ngram_npu: store_file: expected {state}, got {folder}")
    files = {"store_seed": seed, "store_file": path if path and os.path.exists(path) else ""}
    for name, file in files.items():
        try:
            description = store_file.describe(file) if file else None
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: {name}: {error}") from error
        if description is None or name == "store_seed":  # whose last texts are kept
            continue
        if description.num_tokens > options.store_tokens:
            raise ValueError(
                f"ngram_npu: {name}: expected at most {options.store_tokens} tokens, the capacity "
                f"of the store, got {description.num_tokens}: raise store_tokens"
            )


def vocabulary_digest(model_config: Any) -> str | None:
    """Returns the digest of the model's vocabulary; None if the server runs without a tokenizer.
    Loading the tokenizer takes seconds."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    tokenizers = importlib.import_module("vllm.tokenizers")
    return tokenizer_digest(tokenizers.cached_tokenizer_from_config(model_config).get_vocab())


class SharedStore:
    """A store and its files.

    Args:
        device: Where the store is; None: in host memory.
        has_scopes: Whether the runner passes on ``cache_salt`` and adapter of requests.

    Raises:
        ValueError: A file cannot be used.
    """

    def __init__(
        self, vllm_config: Any, options: Options, device: Any, *, has_scopes: bool
    ) -> None:
        check_files(options)
        self.path = options.store_file
        self.has_scopes = has_scopes
        self._is_private = options.scope == "private"
        self._is_killed = getattr(vllm_config, "shutdown_timeout", None) == 0
        """Whether a server that is stopped kills its workers before they can save."""
        self._model_config = vllm_config.model_config
        vocabulary = self.compute_vocabulary_digest() if self.path or options.store_seed else ""
        self._arguments: dict[str, Any] = {
            "device": device,
            "num_slots": options.max_num_seqs,
            "tokenizer": vocabulary,
        }
        self._tokens = options.store_tokens
        self.digest = ""
        """Of the contents that were loaded; empty: none."""
        self._loaded_files = ""
        self._saver: StoreSaver | None = None
        self.contents = self._load_files(options.store_seed)

    def _load_files(self, seed: str) -> NgramStore:
        """Returns the contents of this engine's own file. It includes the seed with which it began;
        a new seed is merged, and text that both contain is kept once."""
        own_file = self.path if self.path and os.path.exists(self.path) else ""
        name, checksum, own_checksum = "store_file", "", ""
        contents = None
        try:
            if own_file:
                own_checksum = store_file.describe(own_file).checksum
                contents = self._load(own_file)
            name = "store_seed"
            if seed:
                checksum = store_file.describe(seed).checksum
                if contents is not None and checksum[:32] in (contents.seed, own_checksum[:32]):
                    seed = checksum = ""
            if seed:
                contents, earlier = self._load(seed), contents
                contents.seed = checksum[:32]
                if earlier is not None:
                    contents.merge(earlier, new_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: {name}: {error}") from error
        self._loaded_files = " and ".join(filter(None, (seed, own_file)))
        self.digest = checksum + own_checksum
        return NgramStore(self._tokens, **self._arguments) if contents is None else contents

    def _load(self, path: str) -> NgramStore:
        return NgramStore.load(path, tokens=self._tokens, **self._arguments)

    def discard_files(self) -> None:
        """Drops what was loaded, because other ranks loaded something else. The file stays as it
        is."""
        self.path = ""
        self.contents.clear()

    def compute_vocabulary_digest(self) -> str:
        """Returns the digest of the model's vocabulary; empty, with a log line, if it cannot be
        read."""
        try:
            return vocabulary_digest(self._model_config) or ""
        except Exception as error:
            text = "ngram_npu: the store's files are not compared with the tokenizer: %s"
            logger.info(text, format_error(error))
            return ""

    def start_saving(self, owner: object, vllm_config: Any) -> None:
        """Saves the file while the engine runs, and when ``owner`` ends. Called on one rank."""
        metrics = StoreMetrics(vllm_config, self.contents.capacity, has_file=bool(self.path))
        self._saver = StoreSaver(owner, self.contents, self.path, metrics)

    def copy_if_due(self, *, is_idle: bool = False) -> None:
        """Launches a copy of the contents for the file, as :meth:`StoreSaver.copy_if_due`."""
        if self._saver is not None:
            self._saver.copy_if_due(is_idle=is_idle)

    def log_settings(self) -> None:
        """Logs a line about the store, and one about its file."""
        if self.path:
            logger.info(
                f"ngram_npu: store_file={self.path} is written when no request runs, every "
                f"{BUSY_SAVE_S:g} s while requests run, and when the engine ends"
            )
            if self._is_killed:
                logger.warning(
                    "ngram_npu: with shutdown_timeout=0 vLLM kills its workers when the server is "
                    "stopped, and text since the last save is lost; --shutdown-timeout 10 gives "
                    "them time to save it"
                )
        requests = "requests with the same cache_salt and LoRA adapter"
        others = "the text of requests without both is not stored"
        if not self._is_private:
            others = "so do requests without both: for servers with one tenant"
        if not self.has_scopes:
            requests = "all requests"
            others = "for servers with one tenant; a cache_salt or a LoRA adapter is rejected"
        store, tokens = self.contents, self.contents.statistics.tokens_held
        loaded = f", {tokens} of them from {self._loaded_files}" if tokens else ""
        logger.info(
            f"ngram_npu: the store is on with scope={'private' if self._is_private else 'shared'}: "
            f"{requests} draft from each other's text; {others} "
            f"({store.capacity} tokens in {store.nbytes / 1e6:.0f} MB{loaded})"
        )
        self._warn_about_unusable_text()

    def _warn_about_unusable_text(self) -> None:
        """Logs a warning if no request has the scope of loaded text."""
        scopes = self.contents.scopes
        total, shared = sum(scopes.values()), scopes.get(SHARED_SCOPE, 0)
        if self._is_private:
            unusable, reason = shared, "has no cache_salt, and scope='private'"
        elif not self.has_scopes:
            unusable = total - shared
            reason = "has a cache_salt or a LoRA adapter, which this runner does not know"
        else:
            return
        if unusable:
            logger.warning(
                f"ngram_npu: no request can draft {unusable} of {total} tokens from "
                f"{self._loaded_files}: their text {reason}"
            )
