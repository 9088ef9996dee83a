"""Size of an operator's workspace."""

from __future__ import annotations

import ngram_npu._C as _C


def workspace_size(op: str, batch: int) -> int:
    """Number of int32 items in the workspace of ``op`` for up to ``batch`` requests.

    Allocate it once, zeroed, outside graph capture, one per operator and stream; every call leaves
    it zeroed. Device kernels need 16-byte alignment, which torch's allocators provide::

        workspace = torch.zeros(
            workspace_size("ngram_step_", max_batch), dtype=torch.int32, device="cuda"
        )

    Args:
        op: an operator whose schema has a ``workspace``.
        batch: the largest number of requests in a call.

    Raises:
        ValueError: an operator without a workspace, or a negative batch.
    """
    if batch < 0:
        raise ValueError(f"workspace_size: batch: expected >= 0, got {batch}")
    size = _C.workspace_words(op, batch)
    if size < 0:
        raise ValueError(f"workspace_size: op: expected an operator with a workspace, got {op!r}")
    return size
