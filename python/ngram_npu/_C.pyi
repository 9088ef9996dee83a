"""The CPU kernels on numpy arrays: positional, no copy, the GIL released while they run.

Arrays are int32 unless said otherwise, contiguous in their inner dimension (the outer stride is
free), aligned, and native-endian; what an operator writes must be writable. Bad arguments raise
ValueError naming op, argument, expected and got, before anything is written. Semantics: docs/ops.
"""

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Index = npt.NDArray[np.int32] | npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

__version__: str
compiler: str

def instruction_set() -> str:
    """The instruction set in force: "scalar", "avx2", "avx512" or "neon"."""

def set_instruction_set(name: str) -> None:
    """Takes another one for the whole process; "auto" is the widest. ValueError where it is
    unknown or the machine lacks it."""

def num_threads() -> int:
    """The limit set by :func:`set_num_threads`; 0 where none is."""

def set_num_threads(limit: int) -> None:
    """At most ``limit`` threads per call from now on, in numpy and torch calls alike; 0 lifts the
    limit (then torch's own number, or OMP_NUM_THREADS, or the cores of this process)."""

def ngram_propose(
    token_ids: _Int32,
    num_tokens: _Int32,
    row_indices: _Index | None,
    active: _Mask | None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
) -> tuple[_Int32, _Int32, _Int32]:
    """token_ids [R,S], num_tokens [R], row_indices and active [B] ->
    draft_token_ids [B,k], num_draft_tokens [B], match_len [B]."""

def ngram_step_(
    token_ids: _Int32,
    num_tokens: _Int32,
    sampled_token_ids: _Int32,
    discard: _Mask | None,
    row_indices: _Index | None,
    advance: bool,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    workspace: _Int32 | None,
) -> tuple[_Int32, _Int32, _Int32, _Int32, _Int32]:
    """token_ids [R,S] and num_tokens [R] are written; sampled_token_ids [B,M], discard and
    row_indices [B] -> next_token_ids [B], num_sampled [B], draft_token_ids [B,k],
    num_draft_tokens [B], match_len [B]."""
