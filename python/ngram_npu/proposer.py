"""Contains NgramProposer, a drafter for any model runner, on torch tensors or numpy arrays."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Literal

import numpy as np

from ngram_npu.config import INDEX_POLICY, NgramConfig
from ngram_npu.drafting import ArrayT, Drafting, Drafts, StepResult, uses_index
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.store import NgramStore, make_store
from ngram_npu.tensors import is_tensor, operators_for

__all__ = ["Drafts", "NgramProposer", "StepResult"]


class NgramProposer:
    """Drafts by looking up each request's last tokens in its own context.

    A proposer stores no token data: it reads the runner's buffers, and :meth:`step` appends to
    these buffers in place. No call waits for a device. Rows may be slices of a larger buffer.

    With ``engine="index"`` a proposer has an index of the rows, which must then be on the CPU. The
    time of a step hardly grows with the context; the drafts are the same as with
    ``engine="scan"``. The first call that uses the index creates it, for the rows of that call's
    buffer. A runner that moves rows passes each request's slot. A runner that reuses a slot for
    another request should call :meth:`reset`; otherwise the index detects the change itself.

    With a store, requests also draft from other requests' text, and each step adds to the store.
    This needs the CPU, a ladder and a ``min_draft_probability`` (docs/guides/store.md).

    A copy or a pickle has the same settings and creates its own index and store. A proposer with a
    store passed to the constructor cannot be copied or pickled.

    Letters in shapes: R is the number of rows of the token buffer, S the capacity of a row, B the
    number of requests in this step, M the number of columns of ``sampled_token_ids`` (1 to 65).
    ``num_tokens``, ``token_ids`` and ``sampled_token_ids`` are int32; ``row_indices``, the row of
    each batch position (None: request i uses row i), is int32 or int64; ``discard`` is bool. A
    request with a row out of range is padding: nothing is written or stored for it.
    """

    def __init__(
        self,
        config: NgramConfig,
        engine: Literal["index", "scan", "auto"] = "auto",
        *,
        num_slots: int | None = None,
        token_capacity: int | None = None,
        store: NgramStore | None = None,
    ) -> None:
        """
        Args:
            config: lookup and draft settings.
            engine: ``"index"``, ``"scan"`` or ``"auto"``. ``"auto"`` scans if ``max_n - min_n``
                exceeds 7, if the rows are not on the CPU, or if the rows are so short that the
                index would not be faster; otherwise it uses the index. A ladder needs the index.
            num_slots: slots of the index; None: the rows of the first call's buffer. Rows without
                a slot are scanned; the first such call warns.
            token_capacity: maximum number of tokens in all slots together (the KV cache's
                capacity); None: enough for full rows. Rows that do not fit are scanned.
            store: the store to draft from, with a ``min_draft_probability``. None: if
                ``config.store`` is set, a store is created together with the index. Proposers that
                share a store must use different slots.

        Raises:
            TypeError: ``config`` is not a :class:`NgramConfig`, or a size is not an integer.
            ValueError: the engine is unknown, an index is requested for ``max_n - min_n`` above 7,
                or a store is passed without ``min_draft_probability``.
        """
        if not isinstance(config, NgramConfig):
            raise TypeError(f"NgramProposer: config: expected NgramConfig, got {config!r}")
        for name, size in (("num_slots", num_slots), ("token_capacity", token_capacity)):
            if size is not None and not hasattr(size, "__index__"):
                raise TypeError(f"NgramProposer: {name}: expected int or None, got {size!r}")
        self._config_uses_index(config, engine, capacity=0, device_type="cpu")  # checks `engine`
        if store is not None and config.min_draft_probability is None:
            raise ValueError(
                "NgramProposer: store: expected None without a min_draft_probability, got a store"
            )
        self.config = config
        self.engine = "index" if config.is_ladder else engine if config.fits_index else "scan"
        self._num_slots, self._token_capacity = num_slots, token_capacity
        self._has_warned = False
        self._scan_draftings: dict[str, Drafting] = {}
        self._index_drafting: Drafting | None = None
        self._store = store
        self._has_store = store is not None or config.store is not None

    @staticmethod
    def _config_uses_index(
        config: NgramConfig, engine: str, *, capacity: int, device_type: str
    ) -> bool:
        return uses_index(
            config,
            engine,
            capacity=capacity,
            max_scan=INDEX_POLICY.max_scan_row_capacity,
            device_type=device_type,
            prefix="NgramProposer: ",
        )

    @property
    def index(self) -> NgramIndex | None:
        """The index, or None. The first call that uses the index creates it; in a compiled
        function, no index is created."""
        return None if self._index_drafting is None else self._index_drafting.index

    @property
    def store(self) -> NgramStore | None:
        """The store. Unless it was passed to the constructor, it is created with the index."""
        return self._store if self._index_drafting is None else self._index_drafting.store

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_scan_draftings": {},
            "_index_drafting": None,
            "_has_warned": False,
        }

    def propose(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        *,
        row_indices: ArrayT | None = None,
        num_sampled: ArrayT | None = None,
        slot_indices: ArrayT | None = None,
        workspace: ArrayT | None = None,
        draft_costs: ArrayT | None = None,
        scopes: ArrayT | None = None,
        prompt_scopes: ArrayT | None = None,
    ) -> Drafts[ArrayT]:
        """Drafts for each request, for a runner that appends the sampled tokens itself.

        With ``engine="index"`` each slot may occur once per call, calls must not overlap, and
        indexed tokens of a row must not change. With other engines, rows are scanned and no state
        is kept.

        Args:
            token_ids: [R, S], the contexts.
            num_tokens: [R], the lengths of the contexts in tokens.
            row_indices: [B], the row of each request; without this argument B = R.
            num_sampled: [B], number of tokens that the step sampled. Nothing is drafted for
                requests with 0. Required with a store.
            slot_indices: [B], the index slot of each request; None: the request's row.
            workspace: workspace of the scan on a device; ignored on the CPU and with an index.
            draft_costs: [B, k] uint8, written: each draft token's cost in sixteenths of a bit, 255
                in unused positions. Needs a ``min_draft_probability``.
            scopes: [B] int32 or int64, with a store: requests share text only within a scope
                (:func:`ngram_npu.scope_of`); None: the same scope for all.
            prompt_scopes: [B] as ``scopes``, a second scope of each request, such as one per prompt
                in RL: the request drafts from the scope of which more accepted tokens are expected,
                and its text is stored in both. ``scopes`` and ``prompt_scopes`` must have no number
                in common. The store needs two slots for each slot of the index.

        Raises:
            ValueError: an argument has the wrong dtype, device, shape or stride.
        """
        op = "ngram_index_propose_" if self.engine == "index" else "ngram_propose"
        drafting = self._get_drafting(op, token_ids, allow_index=self.engine == "index")
        self._check_store("propose", drafting, num_sampled, scopes, prompt_scopes)
        if drafting.store is not None and num_sampled is None:
            raise ValueError("NgramProposer: propose: num_sampled: expected an array with a store")
        arguments: dict[str, Any] = {
            "num_sampled": num_sampled,
            "row_indices": row_indices,
            "slot_indices": slot_indices,
            "workspace": workspace,
            "draft_costs": draft_costs,
        }
        try:
            scope_arguments: dict[str, Any] = {"scopes": scopes, "prompt_scopes": prompt_scopes}
            drafts = drafting.propose(token_ids, num_tokens, **scope_arguments, **arguments)
        except (RuntimeError, TypeError, AttributeError):
            _check_kinds(op, drafting, token_ids=token_ids, num_tokens=num_tokens, **arguments)
            raise
        has_default_rows = row_indices is None and slot_indices is None
        self._keep_index(drafting, len(token_ids) if has_default_rows else 0)
        return drafts

    def step(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        sampled_token_ids: ArrayT,
        *,
        discard: ArrayT | None = None,
        row_indices: ArrayT | None = None,
        slot_indices: ArrayT | None = None,
        advance: bool = True,
        workspace: ArrayT | None = None,
        draft_costs: ArrayT | None = None,
        scopes: ArrayT | None = None,
        prompt_scopes: ArrayT | None = None,
    ) -> StepResult[ArrayT]:
        """Appends the sampled tokens to the rows, then drafts.

        Arguments that are not listed are those of :meth:`propose`.

        Args:
            token_ids: [R, S], written.
            num_tokens: [R], written if ``advance``.
            sampled_token_ids: [B, M], padded with -1; the leading valid ids of a row are used.
            discard: [B] bool; sampled tokens of these requests are ignored (chunked prefill).
            advance: whether the number of appended tokens is added to ``num_tokens``; False for a
                runner that updates its lengths itself.

        Raises:
            ValueError: an argument has the wrong dtype, device, shape or stride.
        """
        drafting = self._get_drafting("ngram_index_step_", token_ids)
        self._check_store("step", drafting, sampled_token_ids, scopes, prompt_scopes)
        op = "ngram_step_" if drafting.index is None else "ngram_index_step_"
        rows: dict[str, Any] = {
            "token_ids": token_ids,
            "num_tokens": num_tokens,
            "sampled_token_ids": sampled_token_ids,
        }
        arguments: dict[str, Any] = {
            "discard": discard,
            "row_indices": row_indices,
            "slot_indices": slot_indices,
            "workspace": workspace,
            "draft_costs": draft_costs,
        }
        try:
            scope_arguments: dict[str, Any] = {"scopes": scopes, "prompt_scopes": prompt_scopes}
            result = drafting.step(**rows, **scope_arguments, advance=advance, **arguments)
        except (RuntimeError, TypeError, AttributeError):
            _check_kinds(op, drafting, **rows, **arguments)
            raise
        # Explicit indices cause no warning, because reading indices could wait for a device.
        has_default_rows = row_indices is None and slot_indices is None
        self._keep_index(drafting, len(sampled_token_ids) if has_default_rows else 0)
        return result

    def append(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        *,
        row_indices: ArrayT | None = None,
        slot_indices: ArrayT | None = None,
    ) -> None:
        """Indexes prompts or parts of prompts before the step, which indexes only a bounded number
        of tokens. With ``engine="scan"`` this method does nothing.

        Arguments and errors are those of :meth:`step`. Each slot may occur once.
        """
        drafting = self._get_drafting("ngram_index_append_", token_ids)
        if drafting.index is not None:
            drafting.index.append(
                token_ids,
                num_tokens,
                match_policy=self.config.match_policy_code,
                row_indices=row_indices,
                slot_indices=slot_indices,
            )
            has_default_rows = row_indices is None and slot_indices is None
            self._keep_index(drafting, len(token_ids) if has_default_rows else 0)

    def reset(self, slot_indices: ArrayT) -> None:
        """Empties the slots of finished requests, slot_indices [N]. A store keeps their text."""
        if self._index_drafting is None:
            return
        try:
            self._index_drafting.end(slot_indices)
        except (RuntimeError, TypeError):
            tensors = _get_state_tensors(self._index_drafting)
            operators_for("ngram_index_reset_", **tensors, slot_indices=slot_indices)
            raise

    def _get_drafting(self, op: str, token_ids: Any, *, allow_index: bool = True) -> Drafting:
        """Returns the :class:`Drafting` with the index, or one that scans."""
        if self._index_drafting is not None and allow_index:
            return self._index_drafting
        kind: Literal["numpy", "torch"] = "numpy" if isinstance(token_ids, np.ndarray) else "torch"
        if kind == "torch" and not is_tensor(token_ids):
            raise ValueError(
                f"{op}: token_ids: expected a tensor or an array, got {type(token_ids).__name__}"
            )
        if self.engine != "scan" and allow_index:
            if token_ids.ndim != 2:
                raise ValueError(f"{op}: token_ids: expected rank 2, got rank {token_ids.ndim}")
            rows, capacity = token_ids.shape
            device = "cpu" if kind == "numpy" else token_ids.device.type
            if self._config_uses_index(
                self.config, self.engine, capacity=capacity, device_type=device
            ):
                return self._make_drafting(rows, capacity, kind)
        if kind not in self._scan_draftings:
            self._scan_draftings[kind] = Drafting(self.config, kind=kind)
        return self._scan_draftings[kind]

    def _make_drafting(self, rows: int, capacity: int, kind: Literal["numpy", "torch"]) -> Drafting:
        tokens = rows * capacity if self._token_capacity is None else self._token_capacity
        slots = max(1, rows) if self._num_slots is None else self._num_slots
        index = make_index(self.config, slots, tokens, kind=kind)
        store = self._store
        if store is None and self._has_store:
            store = make_store(self.config, slots, kind=kind)
        return Drafting(self.config, kind=kind, index=index, store=store)

    def _check_store(
        self, method: str, drafting: Drafting, sampled: Any, scopes: Any, prompt_scopes: Any
    ) -> None:
        """Validates the scopes and the store before anything is written."""
        prefix = f"NgramProposer: {method}"
        for name, value in (("scopes", scopes), ("prompt_scopes", prompt_scopes)):
            if value is None:
                continue
            if not self._has_store:
                raise ValueError(f"{prefix}: {name}: expected None without a store")
            if sampled is not None:
                _check_scopes(f"{prefix}: {name}", value, len(sampled), drafting.kind)
        store, index = drafting.store, drafting.index
        if store is None:
            return
        if store.kind != drafting.kind:
            raise ValueError(
                f"{prefix}: store: expected kind={drafting.kind!r}, got kind={store.kind!r}"
            )
        if prompt_scopes is not None and index and store.num_slots < 2 * index.num_slots:
            raise ValueError(
                f"{prefix}: prompt_scopes: expected a store with at least {2 * index.num_slots} "
                f"slots, two for each slot of the index, got {store.num_slots}"
            )

    def _keep_index(self, drafting: Drafting, rows: int) -> None:
        """Keeps the index. Called after the operator, so that a rejected call creates no index.
        ``rows``: number of rows that the call uses as slots; 0 if it passed rows or slots."""
        index = drafting.index
        if index is None:
            return
        self._index_drafting = drafting
        if rows > index.num_slots and not self._has_warned and not _is_being_compiled():
            self._has_warned = True
            warnings.warn(
                f"NgramProposer: the index has {index.num_slots} slots; the other rows are "
                "scanned. Pass num_slots to the proposer, or slot_indices to each call",
                stacklevel=3,
            )


def _check_scopes(prefix: str, scopes: Any, size: int, kind: str) -> None:
    """Raises ValueError unless ``scopes`` has one integer per request, in host memory."""
    is_numpy = kind == "numpy"
    if not (isinstance(scopes, np.ndarray) if is_numpy else is_tensor(scopes)):
        raise ValueError(
            f"{prefix}: expected a {'numpy array' if is_numpy else 'torch.Tensor'}, got "
            f"{type(scopes).__name__}"
        )
    dtype = str(scopes.dtype).rpartition(".")[2]
    if tuple(scopes.shape) != (size,) or dtype not in ("int32", "int64"):
        raise ValueError(
            f"{prefix}: expected int32 or int64 [{size}], got {dtype} {list(scopes.shape)}"
        )
    device = "cpu" if is_numpy else scopes.device.type
    is_contiguous = scopes.flags.c_contiguous if is_numpy else scopes.is_contiguous()
    if device != "cpu" or not is_contiguous:
        raise ValueError(
            f"{prefix}: expected contiguous memory on cpu, got "
            f"{'contiguous' if is_contiguous else 'strided'} memory on {device}"
        )


def _get_state_tensors(drafting: Drafting) -> dict[str, Any]:
    """Returns the tensors of index and store, whose kind all other arguments must have."""
    states = {"index": drafting.index, "store": drafting.store}
    return {name: state.tensor for name, state in states.items() if state is not None}


def _check_kinds(op: str, drafting: Drafting, **arguments: Any) -> None:
    """Raises an error of one line if arrays and tensors are mixed. Torch's own has many lines."""
    operators_for(op, **arguments, **_get_state_tensors(drafting))


def _is_being_compiled() -> bool:
    """Returns whether torch is compiling. A warning would break the graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
