"""A drafter for any model runner: torch tensors or numpy arrays in, drafts of the same kind out."""

from __future__ import annotations

import sys
from typing import Any, Generic, NamedTuple, TypeVar

from ngram_npu import _C
from ngram_npu.config import NgramConfig

ArrayT = TypeVar("ArrayT")
"""``torch.Tensor`` or ``numpy.ndarray``; a call takes one kind and returns it."""


class Drafts(NamedTuple, Generic[ArrayT]):
    """What :meth:`NgramProposer.propose` returns; all int32."""

    draft_token_ids: ArrayT
    """[B, k], -1 in unused slots."""
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
    """[B, k], -1 in unused slots."""
    num_draft_tokens: ArrayT
    """[B], used slots of each request."""
    match_len: ArrayT
    """[B], length in tokens of the match behind the draft; 0 without one."""


class NgramProposer:
    """Drafts by looking each request's last tokens up in its own context.

    It owns no token data: the runner's buffers are read and, by :meth:`step`, appended to in place.
    Nothing waits for a device. Rows may be slices of a larger buffer.

    Letters: R rows of the token buffer, S their capacity, B requests in this step, M width of the
    sampled-token matrix (1 to 65). ``num_tokens``, ``token_ids``, ``sampled_token_ids`` are int32,
    ``row_indices`` (batch position -> row; None: row i = i) int32 or int64, masks bool.
    """

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self._lookup = (
            config.min_n,
            config.max_n,
            config.k,
            config.match_code,
            config.overlap,
            config.max_len_or_unlimited,
        )

    def propose(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        *,
        row_indices: ArrayT | None = None,
        active: ArrayT | None = None,
    ) -> Drafts[ArrayT]:
        """Drafts for each request as its row stands.

        Args:
            token_ids: [R, S], the contexts.
            num_tokens: [R], their live lengths in tokens.
            row_indices: [B]; B = R without it.
            active: [B] bool; others draft nothing.

        Raises:
            ValueError: an argument of the wrong dtype, device, shape or stride.
        """
        ops = _ops_for(token_ids)
        return Drafts(*ops.ngram_propose(token_ids, num_tokens, row_indices, active, *self._lookup))

    def step(
        self,
        token_ids: ArrayT,
        num_tokens: ArrayT,
        sampled_token_ids: ArrayT,
        *,
        discard: ArrayT | None = None,
        row_indices: ArrayT | None = None,
        advance: bool = True,
        workspace: ArrayT | None = None,
    ) -> StepResult[ArrayT]:
        """Appends what was sampled to the rows, then drafts from the grown rows, in one pass.

        Args:
            token_ids: [R, S], written.
            num_tokens: [R], written where ``advance``.
            sampled_token_ids: [B, M]; the leading run of valid ids of each row counts, -1 pads.
            discard: [B] bool; what these sampled is ignored (chunked prefill).
            row_indices: [B].
            advance: add the appended tokens to ``num_tokens``; False for a runner that owns its
                lengths.
            workspace: for device tensors; the CPU ignores it.

        Raises:
            ValueError: an argument of the wrong dtype, device, shape or stride; nothing is written.
        """
        ops = _ops_for(token_ids)
        return StepResult(
            *ops.ngram_step_(
                token_ids,
                num_tokens,
                sampled_token_ids,
                discard,
                row_indices,
                advance,
                self.config.vocab_size_or_unlimited,
                *self._lookup,
                workspace,
            )
        )


def _ops_for(token_ids: object) -> Any:
    """torch's operators for a tensor, else numpy's: a tensor cannot exist without torch loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(token_ids, torch.Tensor):
        return torch.ops.ngram_npu
    return _C
