"""Drafts of the V2 runner's requests from a store in the device's memory."""

from __future__ import annotations

import torch

from ngram_npu.drafting import Drafts
from ngram_npu.store.device_store import DeviceStore


class DeviceStoreDrafts:
    """Stores the text of the runner's rows, and drafts from it. The row of a request is its slot.

    All launches go to the current stream, and nothing waits for the device. The text of a request's
    newest step is held back until its next step, because the runner may learn only then that the
    request ended within it.

    Args:
        token_ids, num_tokens: [R, S] and [R] int32, the runner's rows on the device.
        max_new: Maximum number of tokens that a step samples for a request.

    Raises:
        ValueError: The store has fewer slots than there are rows.
    """

    def __init__(
        self, store: DeviceStore, token_ids: torch.Tensor, num_tokens: torch.Tensor, max_new: int
    ) -> None:
        if len(token_ids) > store.num_slots:
            raise ValueError(
                f"ngram_npu: store: expected at most {store.num_slots} rows, max_num_seqs, got "
                f"{len(token_ids)}"
            )
        self.store = store
        self._rows = token_ids, num_tokens
        self._max_new = max_new
        self._scopes = torch.zeros(len(token_ids), dtype=torch.int64, device=token_ids.device)

    def begin(self, row: int, scope: int) -> None:
        """A request of this scope begins in ``row``."""
        self.store.begin_request(row)
        self._scopes[row] = scope

    def append(self, rows: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
        """Stores a step's text, and returns the scopes of its requests.

        Args:
            rows: [B] int32 or int64. Rows out of range are ignored.
            num_sampled: [B] int32.
        """
        # The operators ignore rows that are out of range, but reading their scopes is an error.
        scopes = self._scopes[rows.clamp(0, len(self._scopes) - 1)]
        self.store.begin_step(len(rows), self._max_new)
        self.store.append(
            *self._rows,
            num_sampled,
            row_indices=rows,
            slot_indices=rows,
            scopes=scopes,
            max_new=self._max_new,
        )
        return scopes

    def replace(
        self,
        rows: torch.Tensor,
        num_sampled: torch.Tensor,
        scopes: torch.Tensor,
        drafts: Drafts[torch.Tensor],
    ) -> None:
        """Replaces drafts from the requests' own rows by text of the store that follows a longer
        n-gram.

        Args:
            scopes: The result of :meth:`append` for this step.
            drafts: int32 or int64, padded.
        """
        self.store.propose(
            *self._rows,
            num_sampled,
            row_indices=rows,
            scopes=scopes,
            draft_token_ids=drafts.draft_token_ids,
            num_draft_tokens=drafts.num_draft_tokens,
            match_len=drafts.match_len,
            fill=True,
        )
