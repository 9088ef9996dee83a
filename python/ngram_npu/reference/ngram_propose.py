"""Reference of ``ngram_propose``; the definition is in docs/ops/ngram_propose.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LATEST = 1


def common_suffix(tokens: list[int], end: int, cap: int) -> int:
    """L(end): length of the longest common suffix of tokens[0..end] and of all tokens, capped."""
    length = 0
    while length < min(cap, end + 1) and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


def draft_for(
    tokens: list[int],
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
) -> tuple[list[int], int]:
    """The draft of one row and the length of the match behind it; ([], 0) where there is none."""
    lengths = [common_suffix(tokens, end, max_n) for end in range(len(tokens) - 1)]
    best = max(lengths, default=0)
    budget = min(k, max_len - len(tokens))
    if best < min_n or budget <= 0:
        return [], 0
    ends = [end for end, length in enumerate(lengths) if length == best]
    start = (ends[-1] if match_policy == LATEST else ends[0]) + 1
    grown = list(tokens)  # with overlap a draft reads on in what it has just drafted
    draft: list[int] = []
    while len(draft) < budget and start + len(draft) < len(grown):
        draft.append(grown[start + len(draft)])
        if overlap:
            grown.append(draft[-1])
    return draft, best


def ngram_propose(
    token_ids: Array,
    num_tokens: Array,
    row_indices: Array | None,
    num_sampled: Array | None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    workspace: Array | None,
    fill: bool = False,
) -> tuple[Array, Array, Array]:
    """token_ids [R,S], num_tokens [R], row_indices and num_sampled [B] ->
    draft_token_ids [B,k], num_draft_tokens [B], match_len [B]; all int32."""
    return draft_rows(
        token_ids,
        num_tokens,
        row_indices,
        num_sampled,
        k,
        fill,
        lambda _, tokens: draft_for(tokens, min_n, max_n, k, match_policy, overlap, max_len),
    )


def draft_rows(
    token_ids: Array,
    num_tokens: Array,
    row_indices: Array | None,
    num_sampled: Array | None,
    k: int,
    fill: bool,
    draft_of: Callable[[int, list[int]], tuple[list[int], int]],
) -> tuple[Array, Array, Array]:
    """The same with any drafter: from a batch position and its row, the draft and its match."""
    num_rows, capacity = token_ids.shape
    rows = list(range(num_rows)) if row_indices is None else [int(row) for row in row_indices]
    draft_token_ids = np.full((len(rows), k), -1, np.int32)
    num_draft_tokens = np.zeros(len(rows), np.int32)
    match_len = np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        if not 0 <= row < num_rows or not 1 <= num_tokens[row] <= capacity:
            continue
        length = int(num_tokens[row])
        if fill:
            draft_token_ids[i] = token_ids[row, length - 1]
        if length < 2 or (num_sampled is not None and num_sampled[i] <= 0):
            continue
        tokens = [int(token) for token in token_ids[row, :length]]
        draft, best = draft_of(i, tokens)
        draft_token_ids[i, : len(draft)] = draft
        num_draft_tokens[i] = len(draft)
        match_len[i] = best
    return draft_token_ids, num_draft_tokens, match_len
