from __future__ import annotations

import numpy as np
import reference

from . import ngram_propose
from .ngram_index import indexed_spec
from .spec import Args, Array, in_buffer

TOKENS, ROWS = 0, 2


def _batch(args: Args) -> int:
    return len(args[TOKENS] if args[ROWS] is None else args[ROWS])


def _slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    counts = in_buffer(rng.integers(-1, 4, 8))
    options = (2, 4, 3, *policy, 70, None, 40, bool(counts[0] > 0))  # filled as it happens
    return (tokens, lengths, in_buffer(range(8)), counts, *options)


SPEC = indexed_spec(
    "ngram_index_propose_",
    ngram_propose.SPEC,
    reference.ngram_index_propose_,
    batch_of=_batch,
    missing=(1, 0, 3, 1, 70),
    bad_calls=(
        *ngram_propose.LOOKUP_BAD_CALLS,
        *ngram_propose.K_BAD_CALLS,
        ngram_propose.B_MISMATCH,
    ),
    slot_call=_slot_call,
)
