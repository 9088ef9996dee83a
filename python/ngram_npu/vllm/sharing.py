"""The store that the requests of an engine share: its file, and the scopes of requests.

Every rank of a server has its own store. All get the same tokens and so have the same contents;
one of them writes the file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Literal

from ngram_npu.config import STORE_TOKENS
from ngram_npu.store import NgramStore, scope_of, store_lookup
from ngram_npu.vllm.options import Options

logger = logging.getLogger("vllm.ngram_npu")

TOKENS_PER_SLOT = 1024
EXTRA_ARGUMENT = "ngram_npu_scope"
"""Key in ``SamplingParams.extra_args`` for the scope of a request."""
_MARK = "ngram_npu: "
"""Prefix of scopes that are not an ``extra_args`` string."""


class SharedStore:
    """A store and the settings of its operator."""

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
        self.held = NgramStore(slots, tokens, visibility=visibility, kind=kind)
        if self.path and os.path.exists(self.path):
            self._take(self.path, slots, kind)
        self.lookup = store_lookup(options.ngram, self.held.tensor)

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

    def announce(self, owner: object, scoped: bool) -> None:
        """Logs a line about the store, and saves the file when the engine ends. For one rank."""
        if self.path:
            Finalize(owner, _save, args=(self.held, self.path), exitpriority=0)
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

    def step(
        self,
        step: Callable[..., None],
        rows: tuple[Any, Any, Any],
        found: tuple[Any, ...],
        draft_costs: Any,
        **requests: Any,
    ) -> None:
        """Calls the operator ``step``. ``rows`` are tokens, lengths and numbers of sampled tokens;
        ``found`` are drafts, their lengths and the lengths of their matches."""
        draft_token_ids, num_draft_tokens, match_len = found
        step(
            *rows,
            self.held.tensor,
            draft_token_ids=draft_token_ids,
            num_draft_tokens=num_draft_tokens,
            match_len=match_len,
            draft_costs=draft_costs,
            **requests,
            **self.lookup,
        )


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


def _save(store: NgramStore, path: str) -> None:
    try:
        store.save(path)
    except (OSError, RuntimeError) as error:
        logger.warning("ngram_npu: the store is not saved: %s", error)
