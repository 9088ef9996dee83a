"""What the requests and the ranks of an engine share: the store with its files, requests' scopes,
and options that must be equal on all ranks.

Every rank has its own store. All of them begin with the same contents and get the same tokens, so
their contents stay equal; one rank writes the file. In the V2 runner and in V1's asynchronous one,
each rank puts its own drafts into the model's input, so the text is wrong if one rank drafts
differently. The ranks therefore compare at the start everything that drafts depend on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import ngram_npu._C as _C
from ngram_npu.engines.vllm.feed.scopes import compute_scope, fold_scope, is_folded
from ngram_npu.engines.vllm.options import (
    EXTRA_ARGUMENT,
    PROMPT_ARGUMENT,
    Options,
    engine_index,
    exchanges_scopes,
    vocabulary_digest,
)
from ngram_npu.engines.vllm.patching import format_error, logger
from ngram_npu.store import BLOCK_TOKENS, Kind, NgramStore, scope_of
from ngram_npu.store import file as store_file
from ngram_npu.store.device_store import DeviceStore

if TYPE_CHECKING:
    from ngram_npu.engines.vllm.feed.insertion import TextInserter

STORE_TOKENS = 1 << 24
"""350 MB of host memory, which are allocated at the start."""
DEVICE_STORE_TOKENS = 1 << 20
"""59 MB of device memory, which vLLM measures before it allocates its KV cache."""
TOKENS_PER_SLOT = 1024
MAX_TEXT_ROWS = 1024
"""Maximum number of fed texts that may be continued."""
IDLE_S = 1.0
"""A store to which no text was added for this time is saved."""
IDLE_SHARE = 1 / 6
"""Minimum time between two saves of an idle store, as a share of ``store_save_minutes``."""
PAUSE_PER_SAVE = 20
"""Minimum time between two saves, in durations of the last one: saves take at most 5 %."""
UNKNOWN_RUNNER = (
    "ngram_npu: store: expected a runner that passes on the scopes of requests, this vLLM's has "
    "another GPUModelRunner.{}"
)
_MARK = "ngram_npu: "
"""Prefix of scopes that are not an ``extra_args`` string."""

RANK_TIMEOUT_S = 60.0
"""How long a rank waits for the others."""
_NOT_COMPARED = (
    *("sources", "num_threads", "metrics"),
    *("store_seed", "store_file", "store_save_minutes", "step_times"),
)
"""Options that change no draft. Instead of the store's files, their contents are compared."""
_STORE = "store's contents"

RankState = dict[str, str]
"""Options of a rank and the digest of its store, by name."""
Draft = TypeVar("Draft", bound=Callable[..., Any])


class SharedStore:
    """A store and its files."""

    contents: NgramStore | DeviceStore

    def __init__(
        self,
        vllm_config: Any,
        options: Options,
        slots: int,
        kind: Kind,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            slots: Number of requests. With a feed, each text row gets one more slot. With prompt
                scopes, the number of slots is doubled.
            device: Where the store is if ``options.device_store`` is set.

        Raises:
            ValueError: Too few tokens for ``slots`` slots, or a file that cannot be used.
        """
        visibility = "live" if options.device_store else options.ngram.store
        assert visibility is not None
        self.first_text_slot, self.num_text_rows = slots, count_text_rows(options)
        slots += self.num_text_rows
        self.has_prompt_scopes = options.prompt_scopes
        if self.has_prompt_scopes:
            slots *= 2  # the second half is for the text in prompt scopes
        minimum = TOKENS_PER_SLOT * slots
        tokens = options.store_tokens or max(_default_tokens(options), minimum)
        if tokens < minimum:
            raise ValueError(
                f"ngram_npu: store_tokens: expected at least {minimum}, {TOKENS_PER_SLOT} for each "
                f"of {slots} slots, got {tokens}"
            )
        self.path, self._minutes = options.store_file, options.store_save_minutes
        self._is_killed = getattr(vllm_config, "shutdown_timeout", None) == 0
        """Whether a server that is stopped kills its workers before they can save."""
        self._model_config = vllm_config.model_config
        vocabulary = self.vocabulary() if self.path or options.store_seed else ""
        device_store: DeviceStore | None = None
        if options.device_store:
            assert device is not None
            device_store = DeviceStore(
                slots, tokens, max_batch=slots, device=device, tokenizer=vocabulary
            )
            tokens = device_store.file_capacity
        sizes: dict[str, Any] = {"num_slots": slots, "token_capacity": tokens, "kind": kind}
        sizes |= {"visibility": visibility, "tokenizer": vocabulary}
        self._make_empty = functools.partial(NgramStore, **sizes)
        self._load: Callable[[str], NgramStore] = functools.partial(NgramStore.load, **sizes)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.digest = ""
        """Of the contents that were loaded; empty: none."""
        self.loaded = ""
        """The files that were loaded, as text."""
        self._saved_revision: object = None
        self._saved_at = 0.0
        """When the last save began, of ``_saved_revision``."""
        self.settle: Callable[[], bool] = lambda: True
        """Waits until the text of all steps is stored; returns whether it is."""
        self.has_scopes = False
        """Whether the runner passes on the scopes of requests."""
        self._requires_scope = options.scope == "required"
        self.text_inserter: TextInserter | None = None
        """Inserts fed text; None: there is no feed."""
        self.exchanges_scopes = exchanges_scopes(vllm_config)
        """Whether other engines compute the scopes of this engine's requests."""
        self._calls_skipped: int | None = None
        loaded = self._load_files(options.store_seed, device_store)
        if device_store is None:
            self.contents = self._make_empty() if loaded is None else loaded
        else:
            self.contents = device_store
            if loaded is not None:
                device_store.merge(loaded)
                device_store.seed = loaded.seed

    @property
    def host_contents(self) -> NgramStore:
        assert isinstance(self.contents, NgramStore)
        return self.contents

    @property
    def device_contents(self) -> DeviceStore:
        assert not isinstance(self.contents, NgramStore)
        return self.contents

    def _load_files(self, seed: str, device_store: DeviceStore | None) -> NgramStore | None:
        """Returns the contents of this engine's own file; None without files. It includes the seed
        with which it began; a new seed is merged, and text that both contain is kept once."""
        own_file = self.path if self.path and os.path.exists(self.path) else ""
        if seed and self.path and os.path.realpath(seed) == os.path.realpath(self.path):
            raise ValueError("ngram_npu: store_seed: expected another file than store_file")
        name, store, earlier = "store_file", None, None
        try:
            if own_file:
                if device_store is not None:
                    _check_capacity(device_store, own_file)
                store = self._load(own_file)
            name = "store_seed"
            checksum = store_file.describe(seed).checksum[:32] if seed else ""
            if store is not None and checksum in (store.seed, store.checksum[:32]):
                seed = ""
            if seed:
                store, earlier = self._load(seed), store
                store.seed = checksum
            if store is None:
                return None
            if earlier is not None:
                store.merge(earlier, new_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"ngram_npu: {name}: {error}") from error
        self.loaded = " and ".join(filter(None, (seed, own_file)))
        self.digest = store.checksum + ("" if earlier is None else earlier.checksum)
        return store

    def find_scope(self, lora_request: Any, sampling_params: Any, cache_salt: str | None) -> int:
        """Returns the scope of a request. With ``exchanges_scopes``, the salt contains the scope of
        ``extra_args`` since the request was admitted."""
        if self.exchanges_scopes:
            extra_args = getattr(sampling_params, "extra_args", None) or {}
            # A request that was admitted elsewhere, or whose salt vLLM does not pass on.
            if not is_folded(cache_salt):
                cache_salt = fold_scope(extra_args.get(EXTRA_ARGUMENT), cache_salt)
            return compute_scope(lora_request and lora_request.lora_name, cache_salt)
        return scope_of_request(lora_request, sampling_params, cache_salt)

    def find_prompt_scope(self, scope: int, sampling_params: Any) -> int | None:
        """Returns the second scope of a request with this scope; None if it has none."""
        return prompt_scope_of_request(scope, sampling_params) if self.has_prompt_scopes else None

    def vocabulary(self) -> str:
        """Returns the digest of the model's vocabulary; empty, with a log line, if it cannot be
        read."""
        try:
            return vocabulary_digest(self._model_config) or ""
        except Exception as error:
            text = "ngram_npu: the store's files are not compared with the tokenizer: %s"
            logger.info(text, format_error(error))
            return ""

    def share_with_ranks(self, *, contents_equal: bool) -> None:
        """Makes a step that finds the store in use raise: other ranks' steps would not skip it.
        Drops what was loaded if other ranks loaded something else; the file stays as it is."""
        if not contents_equal:
            self.path = ""
            if isinstance(self.contents, NgramStore):
                self.contents = self._make_empty()
            else:
                self.contents.clear()
        self._calls_skipped = self.contents.calls_skipped

    def start_saving(self, owner: object) -> None:
        """Logs a line about the store and one about its file. The file is saved while the engine
        runs (:meth:`_save_when_due`), without stopping steps, and when ``owner`` ends. Called on
        one rank."""
        self._saved_revision, self._saved_at = self.contents.revision, time.monotonic()
        if self.path:
            if self._minutes > 0:
                self._thread = threading.Thread(
                    target=self._save_when_due, name="ngram_npu store", daemon=True
                )
                self._thread.start()
            Finalize(owner, self._end, exitpriority=0)
            self._log_when_saved()
        requests = "all requests of this engine"
        refused = "; those with a cache_salt, a LoRA adapter or a scope are refused"
        if self.has_scopes:
            requests = (
                f"requests of one cache_salt, LoRA adapter and extra_args[{EXTRA_ARGUMENT!r}]"
            )
            refused = "; those with none of the three are refused" if self._requires_scope else ""
        store, tokens = self.contents, self.contents.statistics.tokens_held
        loaded = f", {tokens} of them from {self.loaded}" if tokens else ""
        logger.info(
            f"ngram_npu: store={store.visibility} is on: {requests} draft from each other's text "
            f"({store.token_capacity} tokens in {store.nbytes / 1e6:.0f} MB{loaded}){refused}"
        )

    def check_not_skipped(self) -> None:
        """Checks, after :meth:`share_with_ranks`, that the last step did not skip the store.

        Raises:
            RuntimeError: It did, because another call used the store.
        """
        if self._calls_skipped not in (None, self.contents.calls_skipped):
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
        """Saves soon after requests end, since vLLM may kill a worker at any time: when text stops
        coming in, or after ``store_save_minutes`` of it."""
        previous = self.contents.revision
        last, busy_s, idle_s = time.monotonic(), 60 * self._minutes, 0.0
        while not self._ended.wait(min(IDLE_S, busy_s)):
            state = self.contents.revision
            is_idle, previous = state == previous, state
            started = time.monotonic()
            if state == self._saved_revision or started - last < (idle_s if is_idle else busy_s):
                continue
            is_saved = self._save()
            last = time.monotonic()
            pause_s = PAUSE_PER_SAVE * (last - started)
            busy_s = max(60 * self._minutes, pause_s)
            idle_s = max(60 * self._minutes * IDLE_SHARE, pause_s) if is_saved else busy_s

    def _end(self) -> None:
        self._ended.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        if self.settle():
            self._save()
        else:
            logger.warning("ngram_npu: the store is not saved: the device did not finish its steps")

    @property
    def save_age_s(self) -> float:
        """Time since the last save began, or the engine started; 0 if nothing has changed since."""
        is_saved = self.contents.revision == self._saved_revision
        return 0.0 if is_saved else time.monotonic() - self._saved_at

    def _save(self) -> bool:
        revision, started = self.contents.revision, time.monotonic()
        try:
            self.contents.save(self.path)
        except Exception as error:
            logger.warning("ngram_npu: the store is not saved: %s", format_error(error))
            return False
        self._saved_revision, self._saved_at = revision, started
        return True


def _default_tokens(options: Options) -> int:
    return DEVICE_STORE_TOKENS if options.device_store else STORE_TOKENS


def count_text_rows(options: Options) -> int:
    """Returns how many fed texts may be continued at the same time: at most a quarter of the
    store's slots; 0 without a feed."""
    if not options.store_feed:
        return 0
    tokens = options.store_tokens or _default_tokens(options)
    return min(MAX_TEXT_ROWS, max(1, tokens // (4 * TOKENS_PER_SLOT)))


def _check_capacity(store: DeviceStore, path: str) -> None:
    """Raises ValueError if the store would lose text of its own file, which it replaces. The file
    may be that of a store on the host, which is larger."""
    if store_file.describe(path).sizes.num_blocks * BLOCK_TOKENS <= store.file_capacity:
        return
    num_tokens = NgramStore.load(path).statistics.tokens_held
    if num_tokens > store.token_capacity:
        raise ValueError(
            f"expected at most {store.token_capacity} tokens, the capacity of the store on the "
            f"device, got {num_tokens}: raise store_tokens, or set draft_on='host'"
        )


def scope_of_request(lora_request: Any, sampling_params: Any, cache_salt: str | None) -> int:
    """Returns a scope that differs for each LoRA adapter, salt and scope in ``extra_args``. Without
    the first two it is ``scope_of`` the third. Never raises, because that would end the engine."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    name = extra.get(EXTRA_ARGUMENT)
    marked = isinstance(name, str) and name.startswith(_MARK)
    if lora_request is None and not cache_salt and not marked:
        with contextlib.suppress(TypeError, ValueError):
            return scope_of(name)
    adapter = lora_request and [lora_request.lora_int_id, lora_request.lora_name]
    return _scope_of_value([adapter, name, cache_salt] if cache_salt else [adapter, name])


def prompt_scope_of_request(scope: int, sampling_params: Any) -> int | None:
    """Returns the second scope of a request, None if it names none. It depends on the request's own
    ``scope``, too, so that requests of two tenants that name the same prompt scope share no text.
    Never raises."""
    name = (getattr(sampling_params, "extra_args", None) or {}).get(PROMPT_ARGUMENT)
    return None if name is None else _scope_of_value({"scope": int(scope), "prompt_scope": name})


def _scope_of_value(value: object) -> int:
    """Returns a scope that differs for each value and from the scopes of ``extra_args``."""
    try:
        return scope_of(_MARK + json.dumps(value, default=repr))
    except (TypeError, ValueError):  # such as a key that is not a string
        return scope_of(_MARK + repr(value))


def ranks_of_stage(parallel_config: Any) -> range:
    """Returns the ranks of the engine that draft for the same requests as this one: those of its
    pipeline stage."""
    size = parallel_config.tensor_parallel_size
    size *= getattr(parallel_config, "prefill_context_parallel_size", 1)
    first = getattr(parallel_config, "rank", 0) // size * size
    return range(first, first + size)


def compare_ranks(
    vllm_config: Any, options: Options, store: SharedStore | None, timeout: float = RANK_TIMEOUT_S
) -> bool:
    """Compares this rank's options and store with those of the other ranks, and returns whether
    there are others. If only the stores differ, all ranks begin with an empty one.

    Ranks communicate through the key-value store of vLLM's process group, because a rank without
    ngram_npu would not join a collective.

    Raises:
        ValueError: Other options, or no answer within ``timeout`` seconds. One line.
    """
    ranks = ranks_of_stage(vllm_config.parallel_config)
    if len(ranks) == 1:
        return False
    values = asdict(options)
    values = values.pop("ngram") | values
    state = {name: repr(value) for name, value in values.items() if name not in _NOT_COMPARED}
    state |= {"version of ngram_npu": _C.__version__, _STORE: store.digest if store else ""}
    states = _exchange(vllm_config.parallel_config, ranks, state, timeout)
    first, expected = ranks[0], states[ranks[0]]
    for rank, other in states.items():
        for name in sorted((expected.keys() | other.keys()) - {_STORE}):
            if expected.get(name) != other.get(name):
                raise ValueError(
                    f"ngram_npu: {name}: expected the same on all ranks of an engine, got "
                    f"{expected.get(name)} on rank {first} and {other.get(name)} on rank {rank}"
                )
    if store is not None:
        different = [rank for rank, other in states.items() if other[_STORE] != expected[_STORE]]
        store.share_with_ranks(contents_equal=not different)
        if different and vllm_config.parallel_config.rank == first:
            logger.warning(
                f"ngram_npu: store_seed, store_file: rank {different[0]} loaded another store than "
                f"rank {first}: all ranks begin with an empty one, and none saves it; give all of "
                "them the same files"
            )
    return True


def _exchange(
    parallel_config: Any, ranks: range, state: RankState, timeout: float
) -> dict[int, RankState]:
    """Publishes this rank's state, and returns that of all ranks."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Engines of a data-parallel server may have one process group.
    prefix = f"ngram_npu/{engine_index(parallel_config)}"
    shared = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
    keys = {rank: str(rank) for rank in ranks}
    shared.set(keys[parallel_config.rank], json.dumps(state))
    try:
        shared.wait(list(keys.values()), timedelta(seconds=timeout))
    except dist.DistStoreError:
        silent = [key for key in keys.values() if not shared.check([key])]
        raise ValueError(
            f"ngram_npu: no answer in {timeout:g} s from rank {', '.join(silent)}, expected one "
            "from all ranks of the engine: each needs this ngram_npu, and NGRAM_NPU_VLLM=1"
        ) from None
    return {rank: json.loads(shared.get(key)) for rank, key in keys.items()}


def exit_worker_on_error(draft: Draft) -> Draft:
    """Decorates a drafter's method: an exception ends the worker if ``has_other_ranks``. vLLM would
    only log it on a rank that does not answer, and the other ranks would continue."""

    @functools.wraps(draft)
    def wrapped(drafter: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return draft(drafter, *args, **kwargs)
        except Exception as error:
            if not drafter.has_other_ranks:
                raise
            logger.critical(
                "ngram_npu: this rank cannot draft, so its worker ends: the other ranks would "
                "continue with other drafts, and the text would be wrong",
                exc_info=True,
            )
            raise SystemExit(1) from error

    return wrapped  # type: ignore[return-value]
