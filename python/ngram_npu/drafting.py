"""Runs the operators of one drafting step: look up, end drafts by cost, query the store, fill.

``NgramProposer``, ``AsyncSpecState`` and the vLLM drafters pass the rows, slots and scopes of a
step. Only this module decides between index and scan.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

import ngram_npu._C as _C
from ngram_npu.config import NgramConfig
from ngram_npu.index import NgramIndex
from ngram_npu.store import NgramStore, store_arguments
from ngram_npu.tensors import is_tensor

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")
"""``torch.Tensor`` or ``numpy.ndarray``. Results are of the same type as the arguments."""

ENGINES = ("auto", "index", "scan")


if TYPE_CHECKING or sys.version_info >= (3, 11):

    class Drafts(NamedTuple, Generic[ArrayT]):
        """Result of :meth:`NgramProposer.propose`; all int32."""

        draft_token_ids: ArrayT
        """[B, k], -1 in unused positions."""
        num_draft_tokens: ArrayT
        """[B], number of draft tokens per request."""
        match_len: ArrayT
        """[B], length in tokens of the match that the draft continues; 0 without a match."""

    class StepResult(NamedTuple, Generic[ArrayT]):
        """Result of :meth:`NgramProposer.step`; all int32."""

        next_token_ids: ArrayT
        """[B], each request's newest token."""
        num_sampled: ArrayT
        """[B], number of valid sampled tokens."""
        draft_token_ids: ArrayT
        num_draft_tokens: ArrayT
        match_len: ArrayT
        """This and the two fields above: as in :class:`Drafts`."""

else:  # Python 3.10 has no generic named tuples, but accepts Drafts[...] of a plain named tuple.
    Drafts = namedtuple("Drafts", "draft_token_ids num_draft_tokens match_len")
    StepResult = namedtuple("StepResult", ("next_token_ids", "num_sampled", *Drafts._fields))


def uses_index(
    config: NgramConfig, engine: str, *, capacity: int, max_scan: int, device_type: str, prefix: str
) -> bool:
    """Returns whether drafts are looked up in an index. A ladder always needs an index. ``auto``
    uses one on the CPU if the config allows an index and rows can be long enough for a gain.

    Args:
        config: lookup and draft settings.
        engine: one of ``ENGINES``.
        capacity: maximum number of tokens in a row.
        max_scan: with ``auto``, rows are scanned if their capacity is at most this.
        device_type: device of the rows.
        prefix: beginning of error messages.

    Raises:
        ValueError: the engine is unknown, or contradicts ``config`` or the device.
    """
    needs_index = engine == "index" or config.is_ladder
    option, expected, got, reason = "engine", "", repr(engine), ""
    if engine not in ENGINES:
        expected = "'index', 'scan' or 'auto'"
    elif engine == "scan" and config.is_ladder:
        expected = "'index' or 'auto' with sizes='ladder'"
    elif engine == "index" and not config.fits_index:
        expected = "max_n - min_n <= 7, and no min_draft_probability without a ladder, for 'index'"
        got = f"{config.min_n} to {config.max_n}"
    elif needs_index and device_type != "cpu":
        expected, reason = f"'auto' or 'scan' on {device_type}", ": the index is in host memory"
        if config.is_ladder:
            option, expected, got = "sizes", f"'consecutive' on {device_type}", "'ladder'"
    if expected:
        raise ValueError(f"{prefix}{option}: expected {expected}, got {got}{reason}")
    is_faster = engine == "auto" and device_type == "cpu" and capacity > max_scan
    return needs_index or (is_faster and config.fits_index)


class Drafting:
    """A drafter's settings and state: index, store, workspace.

    The methods do not validate arguments, because the operators do so before they write. The
    letters in shapes are those of ``NgramProposer``.
    """

    def __init__(
        self,
        config: NgramConfig,
        *,
        kind: Literal["numpy", "torch"],
        index: NgramIndex | None = None,
        store: NgramStore | None = None,
        workspace: Any = None,
        copy_to_device: Callable[[Any], Any] | None = None,
    ) -> None:
        """
        Args:
            config: lookup and draft settings.
            kind: whether the arguments of all calls are arrays or tensors.
            index: index of the rows; None: rows are scanned. A ladder needs an index.
            store: store that is queried after the lookup. A store needs a ladder and a
                ``min_draft_probability``.
            workspace: workspace of the scan on a device.
            copy_to_device: copies a table of costs to the device; None: the first call does so.
        """
        self.config, self.kind = config, kind
        self.index, self.store = index, store
        self._ops: Any = _C if kind == "numpy" else sys.modules["torch"].ops.ngram_npu
        self._workspace = workspace
        self._scan_arguments = config.lookup_arguments
        self._index_arguments = config.lookup_arguments
        self._match_costs = config.match_cost_table
        if self._match_costs is not None and (copy_to_device is not None or kind == "numpy"):
            table = self._convert_table(self._match_costs)
            if copy_to_device is not None:
                table = copy_to_device(table)
            self._scan_arguments["match_costs"] = table
        if copy_to_device is None:
            copy_to_device = _return_unchanged
        self._uses_prompt_scopes = False
        self._store_arguments: dict[str, Any] = {}
        if store is not None:
            self._store_arguments = store_arguments(config, store.tensor)
            self._store_arguments["costs"] = copy_to_device(self._store_arguments["costs"])
        if index is not None and config.cost_table is not None:
            self._index_arguments["costs"] = copy_to_device(self._convert_table(config.cost_table))
            if config.token_logits is not None:
                logits = copy_to_device(self._convert_table(config.token_logits))
                self._index_arguments["token_logits"] = logits
                if store is not None:
                    self._store_arguments["token_logits"] = logits

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
        prompt_scopes: Any = None,
        k: int | None = None,
        scan: bool = False,
        fill: bool = False,
        draft_costs: Any = None,
        workspace: Any = None,
        int64: bool = False,
    ) -> Drafts[Any]:
        """Drafts from rows that contain the sampled tokens already.

        The method has the arguments of :meth:`NgramProposer.propose`, and the following ones:

            store_slots: [B], slots of the store; None: ``slot_indices``.
            k: Maximum number of draft tokens, at most ``config.k`` (default: ``config.k``). With 0,
                nothing is drafted, but the index and the store are still updated.
            scan: scan the rows, and neither read nor update the index and the store.
            fill: continue the draft in unused positions, then repeat the newest token.
            workspace: workspace of this call's scan; None: the constructor's workspace.
            int64: return int64 draft tokens from a scan.
        """
        index = None if scan else self.index
        if index is None:
            return self._scan_rows(
                token_ids,
                num_tokens,
                self._make_arguments(
                    None, k, fill, token_ids, row_indices, draft_costs, num_sampled
                ),
                self._workspace if workspace is None else workspace,
                int64=int64,
            )
        costs = draft_costs
        if costs is None and self.store is not None:
            costs = self._allocate_costs(num_sampled, k)
        arguments = self._make_arguments(index, k, fill, token_ids, row_indices, costs, num_sampled)
        if slot_indices is not None:
            arguments["slot_indices"] = slot_indices
        results = self._ops.ngram_index_propose_(token_ids, num_tokens, index.tensor, **arguments)
        drafts = Drafts._make(results)
        if self.store is not None:
            slots = slot_indices if store_slots is None else store_slots
            rows = token_ids, num_tokens, num_sampled
            self._update_store(rows, drafts, costs, row_indices, slots, scopes, prompt_scopes, fill)
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
        prompt_scopes: Any = None,
        advance: bool = True,
        k: int | None = None,
        fill: bool = False,
        draft_costs: Any = None,
        workspace: Any = None,
    ) -> StepResult[Any]:
        """Appends the sampled tokens to the rows, then drafts.

        The arguments are those of :meth:`NgramProposer.step` and :meth:`propose`;
        ``slot_indices`` selects the slots of the index and of the store.
        """
        index = self.index
        costs = draft_costs
        if costs is None and self.store is not None:
            costs = self._allocate_costs(sampled_token_ids, k)
        if self.store is not None and not advance:
            # The store needs the new lengths. The operator computes them in a copy, because it
            # ignores rows and lengths that are out of range.
            if isinstance(num_tokens, np.ndarray):
                num_tokens = num_tokens.copy()
            elif is_tensor(num_tokens):  # the operator rejects anything else
                num_tokens = num_tokens.clone()
            advance = True
        rows = token_ids, num_tokens, sampled_token_ids
        arguments = self._make_arguments(index, k, fill, token_ids, row_indices, costs, None)
        if discard is not None:
            arguments["discard"] = discard
        if self.config.vocab_size is not None:
            arguments["vocab_size"] = self.config.vocab_size
        if index is None:
            workspace = self._workspace if workspace is None else workspace
            if workspace is not None:
                arguments["workspace"] = workspace
            results = self._ops.ngram_step_(*rows, advance=advance, **arguments)
        else:
            if slot_indices is not None:
                arguments["slot_indices"] = slot_indices
            results = self._ops.ngram_index_step_(*rows, index.tensor, advance=advance, **arguments)
        result = StepResult._make(results)
        if self.store is not None:
            rows = token_ids, num_tokens, result.num_sampled
            drafts = Drafts(*result[2:])
            self._update_store(
                rows, drafts, costs, row_indices, slot_indices, scopes, prompt_scopes, fill
            )
        return result

    def end(self, slots: Any) -> None:
        """Empties the slots [N] of finished requests. The store keeps their text."""
        if self.index is not None:
            self._ops.ngram_index_reset_(self.index.tensor, slots)
        if self.store is not None:
            self.store.finish(slots)
            if self._uses_prompt_scopes:
                self.store.finish(self._find_prompt_slots(slots))

    def _make_arguments(
        self,
        index: NgramIndex | None,
        k: int | None,
        fill: bool,
        token_ids: Any,
        row_indices: Any,
        draft_costs: Any,
        num_sampled: Any,
    ) -> dict[str, Any]:
        """Returns the lookup's arguments. Default values are omitted, because torch needs time for
        each passed argument, even for None."""
        arguments = (self._scan_arguments if index is None else self._index_arguments).copy()
        if self._match_costs is not None and index is None:
            placed = arguments.get("match_costs")
            if placed is None or (self.kind == "torch" and placed.device != token_ids.device):
                placed = self._convert_table(self._match_costs).to(token_ids.device)
                arguments["match_costs"] = self._scan_arguments["match_costs"] = placed
        if row_indices is not None:
            arguments["row_indices"] = row_indices
        if draft_costs is not None:
            arguments["draft_costs"] = draft_costs
        if num_sampled is not None:
            arguments["num_sampled"] = num_sampled
        if k is not None:
            arguments["k"] = k
        if fill:
            arguments["fill"] = True
        return arguments

    def _scan_rows(
        self,
        token_ids: Any,
        num_tokens: Any,
        arguments: dict[str, Any],
        workspace: Any,
        int64: bool,
    ) -> Drafts[Any]:
        if workspace is None and "draft_costs" not in arguments and not int64:
            return Drafts._make(self._ops.ngram_propose(token_ids, num_tokens, **arguments))
        row_indices = arguments.get("row_indices")
        batch = len(num_tokens if row_indices is None else row_indices)
        k = arguments.pop("k")
        drafts = Drafts(
            self._allocate(token_ids, (batch, k), "int64" if int64 else "int32"),
            self._allocate(token_ids, (batch,), "int32"),
            self._allocate(token_ids, (batch,), "int32"),
        )
        self._ops.ngram_propose_(
            token_ids, num_tokens, workspace=workspace, **drafts._asdict(), **arguments
        )
        return drafts

    def _convert_table(self, table: Any) -> Any:
        return table if self.kind == "numpy" else sys.modules["torch"].from_numpy(table.copy())

    def _allocate_costs(self, like: Any, k: int | None) -> Any:
        """Returns [B, k] uint8 for the drafts' costs, which the store compares with its own."""
        return self._allocate(like, (len(like), self.config.k if k is None else k), "uint8")

    def _allocate(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns uninitialised memory on the device of ``like``."""
        if self.kind == "numpy":
            return np.empty(shape, dtype)
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    def _update_store(
        self,
        rows: tuple[Any, Any, Any],
        drafts: Drafts[Any],
        draft_costs: Any,
        row_indices: Any,
        slots: Any,
        scopes: Any,
        prompt_scopes: Any,
        fill: bool,
    ) -> None:
        """Replaces drafts by better drafts from the store, then stores the sampled tokens. Does the
        same in the prompt scopes, with further slots."""
        calls = [(slots, scopes)]
        if prompt_scopes is not None:
            self._uses_prompt_scopes = True
            if slots is None:
                slots = self._count_up(rows[2]) if row_indices is None else row_indices
            calls.append((self._find_prompt_slots(slots), prompt_scopes))
        assert self.store is not None
        for call_slots, call_scopes in calls:
            self._ops.ngram_store_step_(
                *rows,
                self.store.tensor,
                row_indices=row_indices,
                slot_indices=call_slots,
                scopes=call_scopes,
                draft_token_ids=drafts.draft_token_ids,
                num_draft_tokens=drafts.num_draft_tokens,
                match_len=drafts.match_len,
                draft_costs=draft_costs,
                fill=fill,
                **self._store_arguments,
            )

    def _count_up(self, like: Any) -> Any:
        """Returns 0, 1, ... for the batch positions, of the kind of ``like`` [B]."""
        if self.kind == "numpy":
            return np.arange(len(like), dtype=np.int32)
        torch = sys.modules["torch"]
        return torch.arange(len(like), dtype=torch.int32, device=like.device)

    def _find_prompt_slots(self, slots: Any) -> Any:
        """Returns the slots for the text in prompt scopes, the second half of the store's slots.
        Slots out of range stay out of range."""
        assert self.store is not None
        return slots + self.store.num_slots // 2 * (slots >= 0)


def _return_unchanged(table: Any) -> Any:
    return table
