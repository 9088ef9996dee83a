from __future__ import annotations

import numpy as np
import reference

from . import ngram_step
from .ngram_index import indexed_spec
from .spec import Args, Array, in_buffer

SAMPLED = 2


def _slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    sampled = in_buffer(rng.integers(0, 2, (8, 3), dtype=np.int32))
    options = (2, 4, 3, *policy, 70, None, 40, bool(sampled[0, 0]), None, None)  # as it happens
    return (tokens, lengths, sampled, None, None, True, 9, *options)


SPEC = indexed_spec(
    "ngram_index_step_",
    ngram_step.SPEC,
    reference.ngram_index_step_,
    batch_of=lambda args: len(args[SAMPLED]),
    missing=(0,),
    bad_calls=(
        *ngram_step.LOOKUP_BAD_CALLS,
        *ngram_step.K_BAD_CALLS,
        ngram_step.B_MISMATCH,
        ngram_step.SAMPLED_BAD_CALLS[0],  # to the batch of the other the slots would not fit
    ),
    slot_call=_slot_call,
)
