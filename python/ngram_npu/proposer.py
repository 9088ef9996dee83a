"""A drafter for any model runner: torch tensors or numpy arrays in, drafts of the same kind out."""

from __future__ import annotations

import sys
import warnings
from collections import namedtuple
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from ngram_npu.config import SHORT_ROW, NgramConfig
from ngram_npu.index import (
    DeviceNgramIndex,
    NgramIndex,
    cost_table,
    is_tensor,
    make_index,
    operators_for,
)
from ngram_npu.store import NgramStore, make_store, store_lookup

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")
"""``torch.Tensor`` or ``numpy.ndarray``; a call takes one kind and returns it."""


if TYPE_CHECKING or sys.version_info >= (3, 11):

    class Drafts(NamedTuple, Generic[ArrayT]):
        """What :meth:`NgramProposer.propose` returns; all int32."""

        draft_token_ids: ArrayT
        """[B, k], -1 in unused places."""
        num_draft_tokens: ArrayT
        """[B], used slots of each request."""
        match_len: ArrayT
        """[B], length in tokens of the match behind the draft; 0 without one."""

    class StepResult(NamedTuple, Generic[ArrayT]):
        """What :meth:`NgramProposer.step` returns; all int32."""

        next_token_ids: ArrayT
        """[B], each request's newest token."""
        num_sampled: ArrayT
        """[B], valid sampled tokens."""
        draft_token_ids: ArrayT
        """[B, k], -1 in unused places."""
        num_draft_tokens: ArrayT
        """[B], used slots of each request."""
        match_len: ArrayT
        """[B], length in tokens of the match behind the draft; 0 without one."""

else:  # Python 3.10 has no generic named tuples, but takes Drafts[...] of a plain one.
    Drafts = namedtuple("Drafts", "draft_token_ids num_draft_tokens match_len")
    StepResult = namedtuple("StepResult", ("next_token_ids", "num_sampled", *Drafts._fields))


class NgramProposer:
    """Drafts by looking up each request's last tokens in its own context.

    It owns no token data: it reads the runner's buffers, and :meth:`step` appends to them in place.
    No call waits for a device. Rows may be slices of a larger buffer.

    With ``engine="index"`` it owns an index of the rows, so that the time of a step hardly grows
    with the context; the drafts are the same as with ``engine="scan"``. The first call that uses
    the index makes it, for the rows of that call's buffer. A runner that moves rows passes each
    request's slot. A runner that reuses a slot for another request should call :meth:`reset`; if it
    does not, the index finds out by itself.

    With a store, requests also draft from other requests' text, and each step adds to the store.
    This needs the CPU, a ladder and a ``min_draft_probability`` (docs/guides/store.md).

    A copy or a pickle has the same settings and makes its own index and store; a proposer that was
    given a store cannot be copied or pickled.

    Letters: R rows of the token buffer, S their capacity, B requests in this step, M width of the
    sampled-token matrix (1 to 65). ``num_tokens``, ``token_ids``, ``sampled_token_ids`` are int32,
    ``row_indices`` (batch position -> row; None: row i = i) int32 or int64, masks bool.
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
            engine: ``"index"``, ``"scan"``, or ``"auto"``: the index unless ``max_n - min_n``
                exceeds 7, the rows are too short for it to be faster, or they are on a GPU, where
                it has not been measured yet. A ladder needs the index and the CPU.
            num_slots: slots of the index; None: the rows of the first call's buffer. Rows without
                a slot are scanned; the first such call warns.
            token_capacity: tokens that all slots may hold together (the KV cache's capacity); None:
                enough for full rows. Beyond it, rows are scanned.
            store: a store to use with a ``min_draft_probability``, instead of ``config.store``;
                None: a store of its own if ``config.store`` is set, made with the index. Proposers
                that share a store must use different slots.

        Raises:
            TypeError: ``config`` is not a :class:`NgramConfig`, or a size is not an integer.
            ValueError: an unknown engine, an index for ``max_n - min_n`` above 7, or a store
                without ``min_draft_probability``.
        """
        if not isinstance(config, NgramConfig):
            raise TypeError(f"NgramProposer: config: expected NgramConfig, got {config!r}")
        if engine not in ("index", "scan", "auto"):
            raise ValueError(
                f"NgramProposer: engine: expected 'index', 'scan' or 'auto', got {engine!r}"
            )
        for name, size in (("num_slots", num_slots), ("token_capacity", token_capacity)):
            if size is not None and not hasattr(size, "__index__"):
                raise TypeError(f"NgramProposer: {name}: expected int or None, got {size!r}")
        if engine == "scan" and config.is_ladder:
            raise ValueError(
                "NgramProposer: engine: expected 'index' or 'auto' with sizes='ladder', got 'scan'"
            )
        if engine == "index" and not config.fits_index:
            raise ValueError(
                "NgramProposer: engine: expected max_n - min_n <= 7 for 'index', "
                f"got {config.min_n} to {config.max_n}"
            )
        if store is not None and config.min_draft_probability is None:
            raise ValueError(
                "NgramProposer: store: expected None without a min_draft_probability, got a store"
            )
        self.config = config
        self.engine = "index" if config.is_ladder else engine if config.fits_index else "scan"
        self.index: NgramIndex | DeviceNgramIndex | None = None
        """Made by the first call that uses it, which must be outside a compiled function."""
        self._num_slots, self._token_capacity = num_slots, token_capacity
        self._warned = False
        self._lookup = config.lookup_arguments
        self._costs: Any = None  # of the index's kind, made by the first call
        self.store = store
        """The proposer's own store is made with the index."""
        self._has_store = store is not None or config.store is not None
        self._owns_store = store is None
        self._store_lookup: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "index": None, "_warned": False}
        return {**state, "store": None} if self._owns_store else state

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
    ) -> Drafts[ArrayT]:
        """Drafts for each request: for a runner that appends the sampled tokens itself.

        With ``engine="index"`` the rules of :meth:`step` apply: no slot twice, one call at a time,
        and indexed tokens of a row must not change. Otherwise rows are scanned and nothing is kept.

        Args:
            token_ids: [R, S], the contexts.
            num_tokens: [R], their live lengths in tokens.
            row_indices: [B]; B = R without it.
            num_sampled: [B], tokens that the step sampled; requests with none draft nothing. A
                store needs it.
            slot_indices: [B], the index slot of each request; None: that of its row.
            workspace: for device tensors; the CPU ignores it.
            draft_costs: [B, k] uint8, written: each draft token's cost in sixteenths of a bit, 255
                where there is none. With a ``min_draft_probability``.
            scopes: [B] int32 or int64, with a store: requests share text only within a scope
                (:func:`ngram_npu.scope_of`); None: one scope for all.

        Raises:
            ValueError: an argument of the wrong dtype, device, shape or stride.
        """
        index = None
        if self.engine == "index":
            index = self._index_for("ngram_index_propose_", token_ids)
        store = self._store_for("propose", index, num_sampled, scopes)
        if store is not None and num_sampled is None:
            raise ValueError("NgramProposer: propose: num_sampled: expected one with a store")
        ops = operators_for(
            "ngram_propose" if index is None else "ngram_index_propose_",
            token_ids=token_ids,
            num_tokens=num_tokens,
            row_indices=row_indices,
            num_sampled=num_sampled,
            index=None if index is None else index.tensor,
            slot_indices=slot_indices,
            workspace=workspace,
            draft_costs=draft_costs,
            store=None if store is None else store.tensor,
            scopes=scopes,
        )
        arguments = self._lookup | _given(
            row_indices=row_indices, num_sampled=num_sampled, workspace=workspace
        )
        if index is None:
            _refuse_costs("ngram_propose", draft_costs)
            return Drafts(*ops.ngram_propose(token_ids, num_tokens, **arguments))
        if store is not None and draft_costs is None:
            draft_costs = self._cost_buffer(num_sampled)
        found = ops.ngram_index_propose_(
            token_ids,
            num_tokens,
            index.tensor,
            slot_indices=slot_indices,
            **arguments,
            **self._cost_arguments(index, draft_costs),
        )
        all_rows = row_indices is None and slot_indices is None
        self._keep(index, len(token_ids) if all_rows else 0)
        drafts = Drafts(*found)
        if store is not None:
            rows = token_ids, num_tokens, num_sampled
            requests = _given(row_indices=row_indices, slot_indices=slot_indices, scopes=scopes)
            self._step_store(ops, store, rows, drafts, draft_costs, requests)
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
    ) -> StepResult[ArrayT]:
        """Appends the sampled tokens to the rows, then drafts.

        Args:
            token_ids: [R, S], written.
            num_tokens: [R], written if ``advance``.
            sampled_token_ids: [B, M]; the leading run of valid ids of each row counts, -1 pads.
            discard: [B] bool; sampled tokens of these requests are ignored (chunked prefill).
            row_indices: [B].
            slot_indices: [B], the index slot of each request; None: that of its row.
            advance: add the appended tokens to ``num_tokens``; False for a runner that owns its
                lengths. A store needs it.
            workspace: for device tensors; the CPU ignores it.
            draft_costs: [B, k] uint8, written: each draft token's cost in sixteenths of a bit, 255
                where there is none. With a ``min_draft_probability``.
            scopes: as in :meth:`propose`.

        Raises:
            ValueError: an argument of the wrong dtype, device, shape or stride; nothing is written.
        """
        index = self._index_for("ngram_index_step_", token_ids)
        store = self._store_for("step", index, sampled_token_ids, scopes)
        if store is not None and not advance:
            raise ValueError("NgramProposer: step: advance: expected True with a store")
        ops = operators_for(
            "ngram_step_" if index is None else "ngram_index_step_",
            token_ids=token_ids,
            num_tokens=num_tokens,
            sampled_token_ids=sampled_token_ids,
            discard=discard,
            row_indices=row_indices,
            index=None if index is None else index.tensor,
            slot_indices=slot_indices,
            workspace=workspace,
            draft_costs=draft_costs,
            store=None if store is None else store.tensor,
            scopes=scopes,
        )
        arguments = self._lookup | _given(
            discard=discard,
            row_indices=row_indices,
            advance=None if advance else False,
            vocab_size=self.config.vocab_size,
            workspace=workspace,
        )
        if index is None:
            _refuse_costs("ngram_step_", draft_costs)
            return StepResult(
                *ops.ngram_step_(token_ids, num_tokens, sampled_token_ids, **arguments)
            )
        if store is not None and draft_costs is None:
            draft_costs = self._cost_buffer(sampled_token_ids)
        found = ops.ngram_index_step_(
            token_ids,
            num_tokens,
            sampled_token_ids,
            index.tensor,
            slot_indices=slot_indices,
            **arguments,
            **self._cost_arguments(index, draft_costs),
        )
        # Warns only if no indices are given: reading them could wait for a device.
        all_rows = row_indices is None and slot_indices is None
        self._keep(index, len(sampled_token_ids) if all_rows else 0)
        result = StepResult(*found)
        if store is not None:
            rows = token_ids, num_tokens, result.num_sampled
            requests = _given(row_indices=row_indices, slot_indices=slot_indices, scopes=scopes)
            self._step_store(ops, store, rows, Drafts(*found[2:]), draft_costs, requests)
        return result

    def append(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        *,
        row_indices: ArrayT | None = None,
        slot_indices: ArrayT | None = None,
    ) -> None:
        """Indexes prompts or pieces of prompts ahead of the step, which would index only a bounded
        number of tokens at a time. With ``engine="scan"`` it does nothing.

        Arguments and errors as in :meth:`step`; no slot twice.
        """
        index = self._index_for("ngram_index_append_", token_ids)
        if index is not None:
            index.append(
                token_ids,
                num_tokens,
                match_policy=self.config.match_policy_code,
                row_indices=row_indices,
                slot_indices=slot_indices,
            )
            all_rows = row_indices is None and slot_indices is None
            self._keep(index, len(token_ids) if all_rows else 0)

    def reset(self, slot_indices: ArrayT) -> None:
        """Empties the slots of finished requests: slot_indices [N]. A store keeps their text."""
        if self.index is not None:
            self.index.reset(slot_indices)
        if self.store is not None:
            self.store.finish(slot_indices)

    def _index_for(self, op: str, token_ids: Any) -> NgramIndex | DeviceNgramIndex | None:
        if self.engine == "scan":
            return None
        if self.index is not None:
            return self.index
        kind: Literal["numpy", "torch"] = "numpy" if isinstance(token_ids, np.ndarray) else "torch"
        if kind == "torch" and not is_tensor(token_ids):
            raise ValueError(
                f"{op}: token_ids: expected a tensor or an array, got {type(token_ids).__name__}"
            )
        if token_ids.ndim != 2:
            raise ValueError(f"{op}: token_ids: expected rank 2, got rank {token_ids.ndim}")
        rows, capacity = token_ids.shape
        on_device = kind == "torch" and token_ids.device.type != "cpu"
        if self.engine == "auto" and (on_device or capacity <= SHORT_ROW):
            return None
        tokens = rows * capacity if self._token_capacity is None else self._token_capacity
        slots = max(1, rows) if self._num_slots is None else self._num_slots
        device = token_ids.device if on_device else None
        return make_index(self.config, slots, tokens, kind=kind, device=device)

    def _store_for(self, method: str, index: Any, requests: Any, scopes: Any) -> NgramStore | None:
        """Returns the store; checks ``scopes`` before anything is written."""
        if not self._has_store:
            if scopes is not None:
                raise ValueError(f"NgramProposer: {method}: scopes: expected None without a store")
            return None
        if scopes is not None and requests is not None:
            size, dtype = len(requests), str(scopes.dtype).rpartition(".")[2]
            if tuple(scopes.shape) != (size,) or dtype not in ("int32", "int64"):
                raise ValueError(
                    f"NgramProposer: {method}: scopes: expected int32 or int64 [{size}], got "
                    f"{dtype} {list(scopes.shape)}"
                )
        kind: Literal["numpy", "torch"] = "torch" if is_tensor(index.tensor) else "numpy"
        store = self.store or make_store(self.config, index.num_slots, kind=kind)
        if store.kind != kind:
            raise ValueError(f"NgramProposer: {method}: store: expected one of kind={kind!r}")
        return store

    def _cost_buffer(self, like: Any) -> Any:
        """[B, k] uint8: costs of the drafts, which a store compares with its own."""
        shape = len(like), self.config.k
        if is_tensor(like):
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=torch.uint8)
        return np.empty(shape, np.uint8)

    def _step_store(
        self,
        ops: Any,
        store: NgramStore,
        rows: tuple[Any, Any, Any],
        drafts: Drafts[Any],
        draft_costs: Any,
        requests: dict[str, Any],
    ) -> None:
        """Replaces ``drafts`` by better ones from the store, then enters the sampled tokens."""
        self.store = store
        if not self._store_lookup:
            self._store_lookup = store_lookup(self.config, store.tensor)
        ops.ngram_store_step_(
            *rows,
            store.tensor,
            draft_token_ids=drafts.draft_token_ids,
            num_draft_tokens=drafts.num_draft_tokens,
            match_len=drafts.match_len,
            draft_costs=draft_costs,
            **requests,
            **self._store_lookup,
        )

    def _cost_arguments(
        self, index: NgramIndex | DeviceNgramIndex, draft_costs: Any
    ) -> dict[str, Any]:
        if self._costs is None and self.config.cost_limit is not None:
            self._costs = cost_table(self.config, index.tensor)
        return _given(costs=self._costs, draft_costs=draft_costs)

    def _keep(self, index: NgramIndex | DeviceNgramIndex, rows: int) -> None:
        """Keeps the index. Called after the operator, so that a rejected call keeps none."""
        self.index = index
        if rows > index.num_slots and not self._warned and not _is_being_compiled():
            self._warned = True
            warnings.warn(
                f"NgramProposer: the index has {index.num_slots} slots; rows beyond are scanned. "
                "Pass num_slots to the proposer, or slot_indices to each call",
                stacklevel=3,
            )


def _refuse_costs(op: str, draft_costs: Any) -> None:
    if draft_costs is not None:
        raise ValueError(f"{op}: draft_costs: expected None without sizes='ladder', got a tensor")


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def _is_being_compiled() -> bool:
    """Whether torch is compiling. A warning would break the graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
