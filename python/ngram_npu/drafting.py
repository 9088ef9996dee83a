"""The one sequence by which drafts are made: look up, weigh costs, ask the store, fill.

``NgramProposer``, ``AsyncSpecState`` and the vLLM drafters say which rows, slots and scopes a step
has. Only this module decides between index and scan.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

import ngram_npu._C as _C
from ngram_npu.config import NgramConfig
from ngram_npu.index import NgramIndex, is_tensor
from ngram_npu.store import BLOCK_TOKENS, LEAST_BLOCKS_PER_SLOT, Kind, NgramStore, store_lookup

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")
"""``torch.Tensor`` or ``numpy.ndarray``; a call takes one kind and returns it."""

ENGINES = ("auto", "index", "scan")


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


def takes_index(
    config: NgramConfig, engine: str, *, capacity: int, short: int, device_type: str, says: str
) -> bool:
    """Whether drafts are found with an index. ``auto``: on the CPU, if an index is possible, and
    rows may be long enough for it to be faster. A ladder always needs one.

    Args:
        engine: one of ``ENGINES``.
        capacity: most tokens of a row.
        short: rows of at most this many tokens are scanned.
        device_type: where the rows are.
        says: beginning of an error's text.

    Raises:
        ValueError: an unknown engine, or one that contradicts ``config`` or the device.
    """
    asked = engine == "index" or config.is_ladder
    option, expected, got, why = "engine", "", repr(engine), ""
    if engine not in ENGINES:
        expected = "'index', 'scan' or 'auto'"
    elif engine == "scan" and config.is_ladder:
        expected = "'index' or 'auto' with sizes='ladder'"
    elif engine == "index" and not config.fits_index:
        expected = "max_n - min_n <= 7, and no min_draft_probability without a ladder, for 'index'"
        got = f"{config.min_n} to {config.max_n}"
    elif asked and device_type != "cpu":
        expected, why = f"'auto' or 'scan' on {device_type}", ": the index is in host memory"
        if config.is_ladder:
            option, expected, got = "sizes", f"'consecutive' on {device_type}", "'ladder'"
    if expected:
        raise ValueError(f"{says}{option}: expected {expected}, got {got}{why}")
    pays = engine == "auto" and device_type == "cpu" and capacity > short
    return asked or (pays and config.fits_index)


class Drafting:
    """The drafter's settings and what it keeps: an index, a store, a workspace.

    Not checked here: the operators check their arguments before they write. Letters as in
    ``NgramProposer``.
    """

    def __init__(
        self,
        config: NgramConfig,
        *,
        kind: Literal["numpy", "torch"],
        index: NgramIndex | None = None,
        store: NgramStore | None = None,
        workspace: Any = None,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        """
        Args:
            config: lookup and draft settings.
            kind: what all tensors of a call are.
            index: answers the lookups; None: rows are scanned. A ladder needs it.
            store: asked after the lookup; with a ladder and a ``min_draft_probability``.
            workspace: of the scan on a device.
            place: copies a table of costs to where the operators run; None: the first call does.
        """
        self.config, self.kind = config, kind
        self.index, self.store = index, store
        self._ops: Any = _C if kind == "numpy" else sys.modules["torch"].ops.ngram_npu
        self._workspace = workspace
        self._scan = config.lookup_arguments
        self._indexed = config.lookup_arguments
        self._match_costs = config.match_cost_table
        if self._match_costs is not None and (place is not None or kind == "numpy"):
            table = self._as_kind(self._match_costs)
            self._scan["match_costs"] = table if place is None else place(table)
        if place is None:
            place = _as_it_is
        self._store_lookup: dict[str, Any] = {}
        if store is not None:
            self._store_lookup = store_lookup(config, store.tensor)
            self._store_lookup["costs"] = place(self._store_lookup["costs"])
        if index is not None and config.cost_table is not None:
            self._indexed["costs"] = place(self._as_kind(config.cost_table))
            if config.token_logits is not None:
                logits = place(self._as_kind(config.token_logits))
                self._indexed["token_logits"] = logits
                if store is not None:
                    self._store_lookup["token_logits"] = logits

    def propose(
        self,
        token_ids: Any,
        num_tokens: Any,
        *,
        num_sampled: Any = None,
        row_indices: Any = None,
        slot_indices: Any = None,
        store_slots: Any = None,
        scopes: Any = None,
        k: int | None = None,
        scan: bool = False,
        fill: bool = False,
        draft_costs: Any = None,
        workspace: Any = None,
        int64: bool = False,
    ) -> Drafts[Any]:
        """Drafts from rows as they are.

        Args:
            token_ids, num_tokens, num_sampled, row_indices: as of ``NgramProposer.propose``.
            slot_indices: [B], of the index; None: the rows'.
            store_slots: [B], of the store; None: ``slot_indices``.
            scopes: [B], of the store.
            k: at most ``config.k``; None: that. 0: the index and the store learn all the same.
            scan: this call neither reads nor updates the index; without a store.
            fill: unused places continue the draft, then hold the newest token.
            draft_costs: [B, k] uint8, written.
            workspace: of this call's scan; None: the one given to the constructor.
            int64: a scan's draft tokens are int64.
        """
        index = None if scan else self.index
        workspace = self._workspace if workspace is None else workspace
        costs = draft_costs
        if index is not None:
            if costs is None and self.store is not None:
                costs = self._costs(num_sampled, self.config.k if k is None else k)
            arguments = self._arguments(index, k, fill, token_ids, row_indices, costs)
            if num_sampled is not None:
                arguments["num_sampled"] = num_sampled
            if slot_indices is not None:
                arguments["slot_indices"] = slot_indices
            found = self._ops.ngram_index_propose_(token_ids, num_tokens, index.tensor, **arguments)
            drafts = Drafts._make(found)
        else:
            arguments = self._arguments(None, k, fill, token_ids, row_indices, costs)
            if num_sampled is not None:
                arguments["num_sampled"] = num_sampled
            if workspace is None and costs is None and not int64:
                return Drafts._make(self._ops.ngram_propose(token_ids, num_tokens, **arguments))
            batch = len(num_tokens if row_indices is None else row_indices)
            drafts = self._outputs(token_ids, batch, arguments.pop("k"), int64)
            self._ops.ngram_propose_(
                token_ids, num_tokens, workspace=workspace, **drafts._asdict(), **arguments
            )
            return drafts
        if self.store is not None:
            asked = slot_indices if store_slots is None else store_slots
            rows = token_ids, num_tokens, num_sampled
            self._ask_store(rows, drafts, costs, row_indices, asked, scopes, fill)
        return drafts

    def step(
        self,
        token_ids: Any,
        num_tokens: Any,
        sampled_token_ids: Any,
        *,
        discard: Any = None,
        row_indices: Any = None,
        slot_indices: Any = None,
        scopes: Any = None,
        advance: bool = True,
        k: int | None = None,
        fill: bool = False,
        draft_costs: Any = None,
        workspace: Any = None,
    ) -> StepResult[Any]:
        """Appends the sampled tokens to the rows, then drafts.

        Args:
            token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance: as of
                ``NgramProposer.step``.
            slot_indices: [B], of the index and of the store; None: the rows'.
            scopes, k, fill, draft_costs, workspace: as of :meth:`propose`.
        """
        index = self.index
        costs = draft_costs
        if costs is None and self.store is not None:
            costs = self._costs(sampled_token_ids, self.config.k if k is None else k)
        workspace = self._workspace if workspace is None else workspace
        if self.store is not None and not advance:
            # The store reads the grown lengths. The operator computes them, in a copy: it ignores
            # rows and lengths that are out of range.
            num_tokens, advance = _copy_of(num_tokens), True
        rows = token_ids, num_tokens, sampled_token_ids
        arguments = self._arguments(index, k, fill, token_ids, row_indices, costs)
        if discard is not None:
            arguments["discard"] = discard
        if self.config.vocab_size is not None:
            arguments["vocab_size"] = self.config.vocab_size
        if index is None:
            if workspace is not None:
                arguments["workspace"] = workspace
            found = self._ops.ngram_step_(*rows, advance=advance, **arguments)
        else:
            if slot_indices is not None:
                arguments["slot_indices"] = slot_indices
            found = self._ops.ngram_index_step_(*rows, index.tensor, advance=advance, **arguments)
        result = StepResult._make(found)
        if self.store is not None:
            stepped = token_ids, num_tokens, result.num_sampled
            drafts = Drafts(*result[2:])
            self._ask_store(stepped, drafts, costs, row_indices, slot_indices, scopes, fill)
        return result

    def end(self, slots: Any) -> None:
        """Forgets requests that have ended: slots [N]. The store keeps their text."""
        if self.index is not None:
            self._ops.ngram_index_reset_(self.index.tensor, slots)
        if self.store is not None:
            self.store.finish(slots)

    def _arguments(
        self,
        index: NgramIndex | None,
        k: int | None,
        fill: bool,
        token_ids: Any,
        row_indices: Any,
        draft_costs: Any,
    ) -> dict[str, Any]:
        """The lookup's arguments, without those that are as by default: torch takes time for each
        that is passed, even for None."""
        arguments = (self._scan if index is None else self._indexed).copy()
        if self._match_costs is not None and index is None:
            placed = arguments.get("match_costs")
            if placed is None or (self.kind == "torch" and placed.device != token_ids.device):
                placed = self._as_kind(self._match_costs).to(token_ids.device)
                arguments["match_costs"] = self._scan["match_costs"] = placed
        if row_indices is not None:
            arguments["row_indices"] = row_indices
        if draft_costs is not None:
            arguments["draft_costs"] = draft_costs
        if k is not None:
            arguments["k"] = k
        if fill:
            arguments["fill"] = True
        return arguments

    def _as_kind(self, table: Any) -> Any:
        return table if self.kind == "numpy" else sys.modules["torch"].from_numpy(table.copy())

    def _outputs(self, like: Any, batch: int, k: int, int64: bool) -> Drafts[Any]:
        """Uninitialised tensors where the operators run."""
        return Drafts(
            self._empty(like, (batch, k), "int64" if int64 else "int32"),
            self._empty(like, (batch,), "int32"),
            self._empty(like, (batch,), "int32"),
        )

    def _costs(self, like: Any, k: int) -> Any:
        """[B, k] uint8: the drafts' costs, which a store compares with its own."""
        return self._empty(like, (len(like), k), "uint8")

    def _empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Uninitialised, where ``like`` is."""
        if self.kind == "numpy":
            return np.empty(shape, dtype)
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    def _ask_store(
        self,
        rows: tuple[Any, Any, Any],
        drafts: Drafts[Any],
        draft_costs: Any,
        row_indices: Any,
        slots: Any,
        scopes: Any,
        fill: bool,
    ) -> None:
        """Replaces drafts by better ones from the store, then enters the sampled tokens."""
        assert self.store is not None
        self._ops.ngram_store_step_(
            *rows,
            self.store.tensor,
            row_indices=row_indices,
            slot_indices=slots,
            scopes=scopes,
            draft_token_ids=drafts.draft_token_ids,
            num_draft_tokens=drafts.num_draft_tokens,
            match_len=drafts.match_len,
            draft_costs=draft_costs,
            fill=fill,
            **self._store_lookup,
        )


def _as_it_is(table: Any) -> Any:
    return table


def _copy_of(lengths: Any) -> Any:
    """Anything but an array or a tensor is left for the operator to reject."""
    if isinstance(lengths, np.ndarray):
        return lengths.copy()
    return lengths.clone() if is_tensor(lengths) else lengths


def make_store(config: NgramConfig, num_slots: int, *, kind: Kind) -> NgramStore:
    """The store that ``config.store`` asks for.

    Raises:
        ValueError: too few ``store_tokens`` for ``num_slots`` slots.
    """
    assert config.store is not None
    least = num_slots * LEAST_BLOCKS_PER_SLOT * BLOCK_TOKENS
    if config.store_tokens < least:
        raise ValueError(
            f"NgramConfig: store_tokens: expected at least {least}, 1024 for each of {num_slots} "
            f"requests, got {config.store_tokens}"
        )
    return NgramStore(num_slots, config.store_tokens, visibility=config.store, kind=kind)
