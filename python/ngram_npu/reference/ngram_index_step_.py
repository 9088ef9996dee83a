"""Reference of ``ngram_index_step_``: the rescan, whatever the index holds."""

from __future__ import annotations

from ngram_npu.reference.ngram_propose import Array
from ngram_npu.reference.ngram_step_ import ngram_step_


def ngram_index_step_(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    discard: Array | None,
    row_indices: Array | None,
    advance: bool,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    index: Array,
    slot_indices: Array | None,
    workspace: Array | None,
) -> tuple[Array, Array, Array, Array, Array]:
    """As ``ngram_step_``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    return ngram_step_(
        token_ids,
        num_tokens,
        sampled_token_ids,
        discard,
        row_indices,
        advance,
        vocab_size,
        min_n,
        max_n,
        k,
        match_policy,
        overlap,
        max_len,
        workspace,
    )
