"""Contains NgramProposer, a drafter for any model runner, on torch tensors or numpy arrays."""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from ngram_npu.config import MAX_DRAFT_TOKENS, NgramConfig
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.store import NgramStore
from ngram_npu.tensors import is_tensor, operators_for

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

__all__ = ["Drafts", "NgramProposer", "StepResult"]

ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")
"""``torch.Tensor`` or ``numpy.ndarray``. Results are of the same type as the arguments."""

DEFAULT_CONFIG = NgramConfig()
MAX_NEW_TOKENS = MAX_DRAFT_TOKENS + 1
"""Maximum number of tokens that a step stores per request: a full draft and the token after it."""

if TYPE_CHECKING or sys.version_info >= (3, 11):

    class Drafts(NamedTuple, Generic[ArrayT]):
        """Result of :meth:`NgramProposer.propose`; all int32."""

        draft_token_ids: ArrayT
        """[B, k], -1 in unused positions."""
        num_draft_tokens: ArrayT
        """[B], number of draft tokens per request."""
        match_len: ArrayT
        """[B], length in tokens of the match that the draft continues; 0 without a match."""
        agreement: ArrayT | None = None
        """[B], what the store's second newest occurrence says about the draft
        (``store_propose_``); -2: the draft is not from the store. None: there is no store."""

    class StepResult(NamedTuple, Generic[ArrayT]):
        """Result of :meth:`NgramProposer.step`; all int32."""

        next_token_ids: ArrayT
        """[B], each request's newest token."""
        num_sampled: ArrayT
        """[B], number of valid sampled tokens."""
        draft_token_ids: ArrayT
        num_draft_tokens: ArrayT
        match_len: ArrayT
        agreement: ArrayT | None = None
        """This and the three fields above: as in :class:`Drafts`."""

else:  # Python 3.10 has no generic named tuples, but accepts Drafts[...] of a plain named tuple.
    _DRAFTS = "draft_token_ids", "num_draft_tokens", "match_len", "agreement"
    Drafts = namedtuple("Drafts", _DRAFTS, defaults=[None])
    StepResult = namedtuple(
        "StepResult", ("next_token_ids", "num_sampled", *_DRAFTS), defaults=[None]
    )


class NgramProposer:
    """Drafts by looking up each request's last tokens in its own context, and in a store.

    A proposer stores no token data: it reads the runner's buffers, and :meth:`step` appends to
    these buffers in place. No call waits for a device. Rows may be slices of a larger buffer.

    With a store, requests also draft from other requests' text, and each call adds the sampled
    tokens to the store (docs/design/store.md). Each request uses a slot of the store, by default
    the number of its row. The store recognizes rows that move; a new request in a row should be
    announced by ``store.begin_requests``.

    A copy or a pickle has the same settings. A proposer with a store cannot be copied or pickled.

    Letters in shapes: R is the number of rows of the token buffer, S the capacity of a row, B the
    number of requests in this step, M the number of columns of ``sampled_token_ids`` (1 to 65).
    ``num_tokens``, ``token_ids`` and ``sampled_token_ids`` are int32; ``row_indices``, the row of
    each batch position (None: request i uses row i), is int32 or int64; ``discard`` is bool. A
    request with a row out of range is padding: nothing is written or stored for it.
    """

    def __init__(
        self, config: NgramConfig = DEFAULT_CONFIG, *, store: NgramStore | None = None
    ) -> None:
        """
        Args:
            config: lookup and draft settings.
            store: the store to draft from, on the device of the rows. Proposers that share a store
                must use different slots.

        Raises:
            TypeError: ``config`` is not a :class:`NgramConfig`.
        """
        if not isinstance(config, NgramConfig):
            raise TypeError(f"NgramProposer: config: expected NgramConfig, got {config!r}")
        self.config, self.store = config, store
        self._lookup_arguments = config.lookup_arguments
        self._limit_arguments = config.limit_arguments
        self._costs = DraftCosts(config) if config.min_draft_probability is not None else None

    def propose(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        *,
        row_indices: ArrayT | None = None,
        num_sampled: ArrayT | None = None,
        slot_indices: ArrayT | None = None,
        scopes: ArrayT | None = None,
        workspace: ArrayT | None = None,
    ) -> Drafts[ArrayT]:
        """Drafts for each request, for a runner that appends the sampled tokens itself.

        Args:
            token_ids: [R, S], the contexts.
            num_tokens: [R], the lengths of the contexts in tokens.
            row_indices: [B], the row of each request; without this argument B = R.
            num_sampled: [B], number of tokens that the step sampled, which a store stores (at most
                65). Nothing is drafted for requests with 0. Required with a store.
            slot_indices: [B], the store's slot of each request; None: the request's row.
            scopes: [B] int32 or int64, with a store: requests share text only within a scope
                (:func:`ngram_npu.scope_of`); None: the same scope for all.
            workspace: workspace of the lookup on a device; ignored on the CPU.

        Raises:
            ValueError: an argument has the wrong dtype, device, shape or stride.
        """
        operators = operators_for(
            "ngram_propose",
            token_ids=token_ids,
            num_tokens=num_tokens,
            row_indices=row_indices,
            num_sampled=num_sampled,
            workspace=workspace,
        )
        arguments = self._lookup_arguments.copy()
        if row_indices is not None:
            arguments["row_indices"] = row_indices
        if num_sampled is not None:
            arguments["num_sampled"] = num_sampled
        elif self.store is not None:
            raise ValueError(
                "NgramProposer: propose: num_sampled: expected an array with a store, got None"
            )
        drafts: Drafts[Any]
        if workspace is None:
            drafts = Drafts(*operators.ngram_propose(token_ids, num_tokens, **arguments))
        else:
            drafts = self._allocate(token_ids, num_tokens if row_indices is None else row_indices)
            del arguments["k"]
            operators.ngram_propose_(
                token_ids,
                num_tokens,
                draft_token_ids=drafts.draft_token_ids,
                num_draft_tokens=drafts.num_draft_tokens,
                match_len=drafts.match_len,
                workspace=workspace,
                **arguments,
            )
        if self.store is not None:
            rows = token_ids, num_tokens, num_sampled
            drafts = self._use_store(rows, drafts, row_indices, slot_indices, scopes)
        if self._costs is not None:
            self._costs.end_drafts(*drafts)
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
        scopes: ArrayT | None = None,
        workspace: ArrayT | None = None,
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
        operators = operators_for(
            "ngram_step_",
            token_ids=token_ids,
            num_tokens=num_tokens,
            sampled_token_ids=sampled_token_ids,
            discard=discard,
            row_indices=row_indices,
            workspace=workspace,
        )
        if self.store is not None and not advance:
            # The store needs the new lengths. The operator computes them in a copy, because it
            # ignores rows and lengths that are out of range.
            num_tokens = _copy(num_tokens)
            advance = True
        arguments = {"discard": discard, "row_indices": row_indices, "workspace": workspace}
        # Default values are omitted, because torch needs time for each passed argument.
        arguments = {name: value for name, value in arguments.items() if value is not None}
        result: StepResult[Any] = StepResult(
            *operators.ngram_step_(
                token_ids,
                num_tokens,
                sampled_token_ids,
                advance=advance,
                **arguments,
                **self._lookup_arguments,
            )
        )
        drafts: Drafts[Any] = Drafts(*result[2:5])
        if self.store is not None:
            rows = token_ids, num_tokens, result.num_sampled
            drafts = self._use_store(rows, drafts, row_indices, slot_indices, scopes)
        if self._costs is not None:
            self._costs.end_drafts(*drafts)
        return StepResult(result.next_token_ids, result.num_sampled, *drafts)

    def _use_store(
        self,
        rows: tuple[Any, Any, Any],
        drafts: Drafts[Any],
        row_indices: Any,
        slot_indices: Any,
        scopes: Any,
    ) -> Drafts[Any]:
        """Stores the sampled tokens, and replaces drafts by longer matches in the store.

        Args:
            rows: tokens, lengths, and number of sampled tokens.
        """
        store, batch = self.store, len(rows[2])
        assert store is not None
        if slot_indices is None:
            store.reserve_slots(len(rows[0]), batch)
        agreement = self._allocate_int32(rows[2], (batch,))
        store.append_and_propose(
            *rows,
            row_indices=row_indices,
            scopes=scopes,
            slot_indices=slot_indices,
            max_new=MAX_NEW_TOKENS,
            hold_back=False,
            draft_token_ids=drafts.draft_token_ids,
            num_draft_tokens=drafts.num_draft_tokens,
            match_len=drafts.match_len,
            agreement=agreement,
            **self._limit_arguments,
        )
        return drafts._replace(agreement=agreement)

    def _allocate(self, token_ids: Any, requests: Any) -> Drafts[Any]:
        """Returns uninitialised drafts for each of ``requests`` [B]."""
        batch = len(requests)
        shapes = (batch, self.config.k), (batch,), (batch,)
        return Drafts(*(self._allocate_int32(token_ids, shape) for shape in shapes))

    @staticmethod
    def _allocate_int32(like: Any, shape: tuple[int, ...]) -> Any:
        """Returns uninitialised memory on the device of ``like``."""
        if is_tensor(like):
            return like.new_empty(shape, dtype=sys.modules["torch"].int32)
        return np.empty(shape, np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "store": self.store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _copy(array: Any) -> Any:
    return array.clone() if is_tensor(array) else np.array(array)
