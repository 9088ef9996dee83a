"""Contains the cost of draft tokens, by which drafts end and are compared.

The cost of a draft token is -16 * log2 of the probability that it is accepted if the tokens before
it are, in sixteenths of a bit. The table ``costs.json`` (docs/design/store.md) has a row for each
length of context: the length of the match plus the number of draft tokens before. Tokens from the
request's own row have one column. Tokens from a store have four columns, for what the second newest
occurrence of the n-gram says about the token.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.config import NgramConfig
from ngram_npu.tensors import is_tensor

NO_TOKEN = 255
"""The cost at a position behind the draft."""
COST_UNITS_PER_BIT = 16
OWN_DRAFT, SINGLE_OCCURRENCE = -2, -1
"""Values of ``agreement``: the draft is not from a store; it is, and the n-gram has no second
occurrence. Other values are the number of draft tokens that both occurrences are followed by."""
NUM_COLUMNS = 4
"""Columns of a store's tokens: no second occurrence; it agrees; it disagrees first at this token;
it disagreed before."""
FIRST_CONTEXT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 15)
"""The shortest context of each row of the table."""
_MAX_MATCH_LEN = 16
_NUM_MATCH_LENS = _MAX_MATCH_LEN + 1


@functools.cache
def load_table() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns the packaged costs of tokens from a row [10] and from a store [10, 4]."""
    text = resources.files("ngram_npu").joinpath("costs.json").read_text(encoding="utf-8")
    table = json.loads(text)
    return np.array(table["row"], np.uint8), np.array(table["store"], np.uint8)


@functools.cache
def _make_costs(k: int) -> npt.NDArray[np.uint8]:
    """Returns [k + 3, 17, k]: the cost of each token of a draft, by its agreement + 2 and by the
    length of its match, up to 16."""
    row, store = load_table()
    agreement, match_len, position = np.ogrid[-2 : k + 1, 0:_NUM_MATCH_LENS, 0:k]
    context = np.clip(match_len + position, 1, FIRST_CONTEXT_LENGTHS[-1])
    context_bin = np.searchsorted(FIRST_CONTEXT_LENGTHS, context, side="right") - 1
    column = 2 + np.sign(position - agreement)
    column[: 2 + SINGLE_OCCURRENCE + 1] = 0
    costs: npt.NDArray[np.uint8] = store[context_bin, column]
    costs[0] = row[context_bin[0]]
    costs.flags.writeable = False
    return costs


class DraftCosts:
    """Computes the costs of draft tokens, and ends drafts by them, on arrays and on tensors.

    The methods read no tensor on the host. On a device, the first call copies tables of a few
    kilobytes to it (:meth:`copy_tables`).

    Letters in shapes: B is the number of requests, k ``config.k``.

    Args:
        config: ``k`` and ``min_draft_probability``.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._k = config.k
        costs = _make_costs(config.k).reshape(-1, config.k)
        limit = config.cost_limit
        self._tables: dict[Any, tuple[Any, Any, Any]] = {}
        num_kept = np.zeros(len(costs), np.int32)
        if limit is not None:
            num_kept[:] = (np.cumsum(costs, axis=1, dtype=np.int32) <= limit).sum(axis=1)
        self._ends_drafts = limit is not None
        self._costs, self._num_kept = costs, num_kept
        self._columns = np.arange(config.k, dtype=np.int32)
        self._is_behind = self._columns >= np.arange(config.k + 1)[:, None]
        """[k + 1, k], by number of draft tokens: whether a position is behind the draft."""

    def compute_costs(self, match_len: Any, num_draft_tokens: Any, agreement: Any = None) -> Any:
        """Returns [B, k] uint8, the cost of each draft token, and 255 behind the draft.

        Args:
            match_len: [B] int32, as the operators write it.
            num_draft_tokens: [B] int32.
            agreement: [B] int32, as ``store_propose_`` writes it; None: all drafts are from the
                requests' own rows.
        """
        index = _find_row(match_len, agreement)
        if is_tensor(match_len):
            costs, _, columns = self.copy_tables(match_len.device)
            return costs[index].masked_fill_(columns >= num_draft_tokens[:, None], NO_TOKEN)
        costs = self._costs.take(index, axis=0)
        np.putmask(costs, self._is_behind.take(num_draft_tokens, axis=0), NO_TOKEN)
        return costs

    def compute_probabilities(
        self, match_len: Any, num_draft_tokens: Any, agreement: Any = None
    ) -> Any:
        """Returns [B, k] float32, the probability that each draft token is accepted if the tokens
        before it are; nearly 0 behind the draft. Arguments are those of :meth:`compute_costs`."""
        costs = self.compute_costs(match_len, num_draft_tokens, agreement)
        if is_tensor(costs):
            return sys.modules["torch"].exp2(costs / -COST_UNITS_PER_BIT)
        return np.exp2(costs * np.float32(-1 / COST_UNITS_PER_BIT))

    def end_drafts(
        self, draft_token_ids: Any, num_draft_tokens: Any, match_len: Any, agreement: Any = None
    ) -> None:
        """Ends each draft, in place, where the probability that all of it is accepted would fall
        below ``config.min_draft_probability``. Without this setting, it does nothing.

        Args:
            draft_token_ids: [B, at most k], written: -1 behind the draft.
            num_draft_tokens: [B] int32, written.
            match_len: [B] int32.
            agreement: as in :meth:`compute_costs`.
        """
        if not self._ends_drafts:
            return
        self.limit_counts(num_draft_tokens, match_len, agreement)
        width = draft_token_ids.shape[1]
        if is_tensor(match_len):
            _, _, columns = self.copy_tables(match_len.device)
            draft_token_ids.masked_fill_(columns[:width] >= num_draft_tokens[:, None], -1)
            return
        # `take` and `putmask` take a third of the time of indexing with arrays.
        is_behind = self._is_behind[:, :width].take(num_draft_tokens, axis=0)
        np.putmask(draft_token_ids, is_behind, -1)

    def limit_counts(self, num_draft_tokens: Any, match_len: Any, agreement: Any = None) -> None:
        """Does what :meth:`end_drafts` does to ``num_draft_tokens``, for a caller that ignores the
        tokens behind a draft."""
        if not self._ends_drafts:
            return
        if is_tensor(match_len):
            _, num_kept, _ = self.copy_tables(match_len.device)
            num_draft_tokens.clamp_(max=num_kept[_find_row(match_len, agreement)])
            return
        if agreement is None:  # the first rows, without a vector of their indices
            kept = self._num_kept[:_NUM_MATCH_LENS].take(match_len, mode="clip")
        else:
            kept = self._num_kept.take(_find_row(match_len, agreement))
        np.minimum(num_draft_tokens, kept, out=num_draft_tokens)

    def copy_tables(
        self, device: Any, copy: Callable[[Any], Any] | None = None
    ) -> tuple[Any, Any, Any]:
        """Returns the tables on a device of torch. The first call copies them, for which the host
        may wait.

        Args:
            copy: copies a tensor to the device (default: ``tensor.to(device)``).
        """
        tensors = self._tables.get(device)
        if tensors is None:
            torch = sys.modules["torch"]
            arrays = self._costs, self._num_kept, self._columns
            copy = copy or (lambda tensor: tensor.to(device))
            tensors = tuple(copy(torch.from_numpy(array.copy())) for array in arrays)
            self._tables[device] = tensors
        return tensors


def _find_row(match_len: Any, agreement: Any) -> Any:
    """Returns the index in the flattened tables."""
    if is_tensor(match_len):
        row = match_len.clamp(0, _MAX_MATCH_LEN)
    else:
        row = np.minimum(match_len, _MAX_MATCH_LEN)
    if agreement is None:
        return row
    return row + (agreement - OWN_DRAFT) * _NUM_MATCH_LENS
