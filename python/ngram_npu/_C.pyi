"""The CPU kernels on numpy arrays. They copy no array and release the GIL while they run.

The arguments of an operator (docs/ops) have the names and defaults of the torch operator's
arguments; `help` shows the signature. Keyword-only arguments may also be passed by position, in the
order of the signature.

Arrays are int32 unless stated otherwise, contiguous in their inner dimension (the outer stride is
free), aligned, and native-endian; written arrays must be writable. Invalid arguments raise a
ValueError that names the operator, the argument, and the expected and received value, before
anything is written.

Functions and classes without a description are private; the headers in csrc/cpu describe them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

__version__: str
compiler: str
MAX_NGRAM: int
MAX_DRAFT_TOKENS: int

def instruction_set() -> str:
    """Returns the instruction set in use: "scalar", "avx2", "avx512" or "neon"."""

def set_instruction_set(name: str) -> None:
    """Selects the instruction set for the whole process; "auto" selects the widest one. Raises a
    ValueError if the name is unknown or the machine does not support the instruction set."""

def num_threads() -> int:
    """Returns the limit set by :func:`set_num_threads`; 0 means no limit."""

def set_num_threads(limit: int) -> None:
    """Limits every call, with arrays or tensors, to ``limit`` threads; 0 removes the limit. Without
    a limit, calls with tensors use torch's number of threads, and calls with arrays use
    OMP_NUM_THREADS threads or as many as this process has cores."""

def workspace_words(op: str, batch: int) -> int:
    """Returns the number of int32 items of workspace that ``op`` needs for a batch on any device;
    -1 if ``op`` takes no workspace."""

_Shape = tuple[tuple[str, int, str], ...]

def describe_shapes(op: str) -> tuple[dict[str, _Shape], list[tuple[_Shape, str | None]]]:
    """Returns the shapes of the operator's arguments by name, and of its results with the argument
    whose dtype they have (None: int32). A size is (letter, number to add, letter of the rows that
    an absent tensor selects); the letter of a constant is empty."""

CHUNK_ITEMS: int

def pack_rows(
    rows: list[_Int32], first_chunks: _Int64, min_items: _Int64, split: int
) -> tuple[_Int64, _Int32, int, int]:
    """Packs rows into chunks of 64 items. Row i begins at chunk ``first_chunks[i]``, padded to at
    least ``min_items[i]`` items. Returns the chunks' indices, the chunks, the number of chunks of
    ``rows[:split]``, and the smallest item of ``rows[split:]``."""

def join_spans(items: _Int32, begins: _Int64, counts: _Int32) -> _Int32: ...
def count_items(lists: list[list[int]]) -> _Int32: ...
def list_drafts(draft_token_ids: _Int32, num_draft_tokens: _Int32) -> list[list[int]]: ...
def __getattr__(operator: str) -> Any:
    """Returns an operator, which is defined from its schema in csrc/schemas.h."""
