"""Contains what the index and the store share: memory allocation, the choice between torch's and
numpy's operators, and the error for corrupt memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu import _library

Int32Array = npt.NDArray[np.int32]

WORD_BYTES = 4
_HUGE_PAGE_BYTES = 2 << 20
_TORCH_PROBLEM = _library.get_torch_problem()


class IntegrityError(RuntimeError):
    """The memory of an index or a store is corrupt: its state is not one that any operator
    writes."""


def allocate_words(words: int, *, prefault: bool = False) -> Int32Array:
    """Allocates zeroed int32 words, in huge pages if the system has them.

    Lookups access memory at random. With small pages, each access would also miss the TLB. The
    system commits memory at its first use, and then zeroes a whole huge page.

    Args:
        words: number of words.
        prefault: commit all memory now.
    """
    # A shared mapping would get no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, words * WORD_BYTES + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    mapped = np.frombuffer(mapping, np.uint8)  # keeps the mapping alive
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    array = mapped[start : start + words * WORD_BYTES].view(np.int32)
    if prefault:
        array[:: mmap.PAGESIZE // WORD_BYTES] = 0
    return array


def operators_for(op: str, /, **arguments: Any) -> Any:
    """Returns torch's operators if the first argument is a tensor, otherwise numpy's operators,
    which check themselves that all arguments are arrays.

    Raises:
        ValueError: the first argument is a tensor, and another argument is not. torch's own message
            would have many lines.
        RuntimeError: the first argument is a tensor and the torch operators are not registered.
    """
    first = next(iter(arguments))
    if not is_tensor(arguments[first]):
        return _C
    if _TORCH_PROBLEM:
        raise RuntimeError(f"torch.ops.ngram_npu is not available: {_TORCH_PROBLEM}")
    for name, value in arguments.items():
        if value is not None and not is_tensor(value):
            raise ValueError(
                f"{op}: {name}: expected a torch.Tensor as {first}, got {type(value).__name__}"
            ) from None
    return sys.modules["torch"].ops.ngram_npu


def is_tensor(value: object) -> bool:
    """Returns whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
