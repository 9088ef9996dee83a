from __future__ import annotations

import numpy as np
from ngram_npu import reference

from . import ngram_step
from .ngram_index import indexed_spec
from .spec import Args, Array, in_buffer

SAMPLED = 2


def _slot_call(
    rng: np.random.Generator, tokens: Array, lengths: Array, policy: tuple[int, bool]
) -> Args:
    sampled = in_buffer(rng.integers(0, 2, (8, 3), dtype=np.int32))
    return (tokens, lengths, sampled, None, None, True, 9, 2, 4, 3, *policy, 70, None)


SPEC = indexed_spec(
    "ngram_index_step_",
    ngram_step.SPEC,
    reference.ngram_index_step_,
    batch_of=lambda args: len(args[SAMPLED]),
    missing=(0,),
    bad_calls=ngram_step.SPEC.bad_calls[:-1],  # whose batch the slots would not fit
    slot_call=_slot_call,
)
