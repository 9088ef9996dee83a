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
    """Drafts by looking each request's last tokens up in its own context.

    It owns no token data: the runner's buffers are read and, by :meth:`step`, appended to in place.
    Nothing waits for a device. Rows may be slices of a larger buffer.

    With ``engine="index"`` it owns an index of the rows, so that a step's cost hardly grows with
    the context; drafts are those of ``engine="scan"``, bit for bit. The index is made by the
    first call that uses it, for that buffer's rows. A runner that moves rows passes each request's
    slot; one that reuses a slot for another request may say so by :meth:`reset` (it is also
    noticed).

    With a store, requests also draft from what others said, and it is fed by each step: on the CPU,
    with a ladder and a ``min_draft_probability`` (docs/guides/store.md).

    A copy, or a pickle, has the settings and makes an index and a store of its own; with a store
    that it was given, it cannot be made.

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
            config: what to look for.
            engine: ``"index"``, ``"scan"``, or ``"auto"``: the index unless ``max_n - min_n``
                exceeds 7, the buffer's rows are too short for it to pay, or they are on a GPU,
                where it has not been measured yet. A ladder has the index only, on the CPU.
            num_slots: slots of the index; None: the rows of the first call's buffer. Rows without
                a slot are scanned; the first such call warns.
            token_capacity: tokens that all slots may hold together (a KV cache's capacity); None:
                all rows full. Where it is exceeded, rows are scanned.
            store: with a ``min_draft_probability``, what the requests share, whatever the config
                says of it; None: a store of its own where the config asks for one, made with the
                index. Those who share one have their requests in different slots.

        Raises:
            TypeError: ``config`` is no :class:`NgramConfig`, or a size is no integer.
            ValueError: an unknown engine; the index for a span it does not hold; a store without
                ``min_draft_probability``.
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
        """Made by the first call that uses it: outside a compiled function."""
        self._num_slots, self._token_capacity = num_slots, token_capacity
        self._warned = False
        self._lookup = config.lookup_arguments
        self._costs: Any = None  # of the index's kind, made by the first call
        self.store = store
        """Its own one is made with the index."""
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
        """Drafts for each request as its row stands: for a runner that appends by itself.

        With ``engine="index"`` the index answers, as in :meth:`step`: no slot twice, one call at a
        time, and no row changes below what has been indexed. Otherwise rows are scanned, and
        nothing is kept.

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
            scopes: [B] int32 or int64, with a store: whose text each request's is
                (:func:`ngram_npu.scope_of`); None: all the same.

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
        """Appends what was sampled to the rows, then drafts from the grown rows.

        Args:
            token_ids: [R, S], written.
            num_tokens: [R], written where ``advance``.
            sampled_token_ids: [B, M]; the leading run of valid ids of each row counts, -1 pads.
            discard: [B] bool; what these sampled is ignored (chunked prefill).
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
        # The host does not read which rows they are: then nobody can warn.
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
        """Indexes prompts, or pieces of them, ahead of the step that needs them (which would do it
        itself, a bounded number of tokens at a time). With a scan there is nothing to do.

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
        """Forgets requests that have finished: slot_indices [N]. A store keeps what they said."""
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
        """Before anything is written: the store, and what is wrong with scopes for it."""
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
        """[B, k] uint8: what a store compares its drafts with."""
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
        """Where the store promises more, its drafts replace ``drafts``; it then takes what was
        sampled."""
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
        """After the operator: a call that it refuses keeps no index."""
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
    """Those that are not None, which is the default of the others."""
    return {name: value for name, value in arguments.items() if value is not None}


def _is_being_compiled() -> bool:
    """Then there is no warning: torch could not make one graph of it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
